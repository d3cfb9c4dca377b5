"""Batches on disk as tensors of rows, of which no more than a batch is ever in memory."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hfta_func.errors import BatchError
from hfta_func.files import atomic
from hfta_func.files.atomic import PathLike
from hfta_func.files.storage import NAMES, write_data

_HEADER = 512


def write_rows(folder: PathLike, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Write batches to a folder, one file for each name, and return all of their rows as :func:`read_rows` does.

    Args:
        folder: It is created if it does not exist. The files are in the format of safetensors, and replaced as a whole.
        batches: Dicts of tensors ``[N, ...]``, such as a shared :class:`ArrayLoader` of activations yields; N may differ.

    Raises:
        BatchError: if there is no batch, or batches differ in names, dtypes or shapes of rows.
        CheckpointError: if a file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rows = write_rows(folder, [{"hidden": torch.randn(4, 8)}, {"hidden": torch.randn(2, 8)}])
        >>> rows["hidden"].shape, torch.equal(rows["hidden"], read_rows(folder)["hidden"])
        (torch.Size([6, 8]), True)
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for batch in batches:
            kinds_of_batch = {name: (rows.dtype, [*rows.shape[1:]]) for name, rows in batch.items()}
            kinds = kinds or kinds_of_batch
            if kinds_of_batch != kinds:
                raise BatchError(
                    f"a batch has {kinds_of_batch} and the first one {kinds}; give all batches rows of one kind"
                )
            for name, rows in batch.items():
                if name not in files:
                    files[name] = stack.enter_context(atomic.replacing(folder / f"{name}.safetensors"))
                    files[name].write(bytes(_HEADER))
                write_data(rows, files[name].write)
                counts[name] = counts.get(name, 0) + len(rows)
        if not files:
            raise BatchError("there is no batch to write; pass an iterable over batches")
        for name, (dtype, shape) in kinds.items():
            size = files[name].tell() - _HEADER
            entry = {"dtype": NAMES[dtype], "shape": [counts[name], *shape], "data_offsets": [0, size]}
            header = json.dumps({name: entry}).encode().ljust(_HEADER - 8)
            files[name].seek(0)
            files[name].write(len(header).to_bytes(8, "little") + header)
    return read_rows(folder)


def read_rows(folder: PathLike) -> dict[str, Tensor]:
    """The tensors that :func:`write_rows` has written, by name: data for an :class:`ArrayLoader`.

    They are views of the files, of which only those rows are read that a batch takes.

    Raises:
        FileNotFoundError: if the folder has no such file.
    """
    paths = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{os.fspath(folder)} holds no .safetensors file; write them by write_rows")
    return {name: rows for path in paths for name, rows in load_file(path).items()}
