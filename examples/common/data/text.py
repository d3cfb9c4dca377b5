"""Text as sequences of tokens: inputs ``[N, L]`` and targets ``[N, L]``, shifted by one token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc_data.topics import topics as TOPICS
from typing import NamedTuple

import torch
from torch import Tensor

from examples.common.data.files import Source, obtain, reading_zip
from examples.common.errors import BadInput

WIKITEXT2 = Source(
    "wikitext-2-v1.zip",
    "md5:542ccefacc6c27f945fb54453812b3cd",
    (
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
)


class Text(NamedTuple):
    """Training and test sequences, and how many different tokens there are."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    vocabulary: int


@functools.lru_cache(maxsize=1)
def load(name: str, folder: Path, length: int, limit: int | None = None) -> Text:
    """A text by name, in sequences of ``length`` tokens.

    Raises:
        BadInput: if its files cannot be had or read, or a part of it is no longer than ``length``.
    """
    train, test = LOADERS[name](folder)
    number = {token: i for i, token in enumerate(dict.fromkeys(train))}
    # WikiText has a token of this name; a character that only the test part has becomes the commonest one.
    unknown = number.get("<unk>", number.get(" ", 0))

    def sequences(part: str, tokens: list[str]) -> tuple[Tensor, Tensor]:
        if len(tokens) <= length:
            raise BadInput(
                f"--length {length} needs {length + 1} tokens, but the {part} part of {name} has {len(tokens)}; "
                f"take a smaller --length"
            )
        numbers = torch.tensor([number.get(token, unknown) for token in tokens])
        windows = numbers.unfold(0, length + 1, length)[:limit]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return Text(sequences("train", train), sequences("test", test), len(number))


def topics(folder: Path) -> tuple[list[str], list[str]]:
    """Python's own manual, as CPython ships it for ``help()``, in characters; every tenth piece of 1000 is for testing."""
    text = "\n".join(text for _, text in sorted(TOPICS.items()))
    pieces = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    test = "".join(pieces[9::10])
    del pieces[9::10]
    return list("".join(pieces)), list(test)


def wikitext2(folder: Path) -> tuple[list[str], list[str]]:
    """WikiText-2 in words; lines end with a special token."""
    path = obtain(WIKITEXT2, folder)
    with reading_zip(path) as archive:
        files = [archive.read(f"wikitext-2/wiki.{part}.tokens").decode() for part in ("train", "test")]
        if not all(files):
            raise ValueError("a file is empty")
    train, test = (_words(file.splitlines()) for file in files)
    return train, test


def _words(lines: Iterable[str]) -> list[str]:
    return [word for line in lines for word in [*line.split(), "<eos>"]]


LOADERS: dict[str, Callable[[Path], tuple[list[str], list[str]]]] = {"topics": topics, "wikitext2": wikitext2}
