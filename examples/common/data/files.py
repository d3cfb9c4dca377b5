"""Original archives: found or downloaded, checked, and read without unpacking."""

from __future__ import annotations

import hashlib
import os
import struct
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.common.errors import BadInput

# What reading a file raises that is cut short, garbled or something else.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, LookupError, ValueError)


class Source(NamedTuple):
    """Where an archive comes from.

    Args:
        file: Its name in the folder of ``--data``.
        digest: ``algorithm:hexadecimal``; empty where none has been published, and then it is not downloaded either.
        urls: Places that have it, tried in order; or the page to get it from by hand.
    """

    file: str
    digest: str
    urls: tuple[str, ...]


def obtain(source: Source, folder: Path) -> Path:
    """The archive, downloaded if it is not in the folder, with the right checksum.

    Raises:
        BadInput: if it cannot be had, or its checksum is another.
    """
    path = folder / source.file
    if not path.exists():
        if not source.digest:
            raise BadInput(f"there is no {path}; get it from {source.urls[0]} and put it there")
        _download(source, path)
    elif source.digest and (found := _digest(path, source.digest)) != source.digest:
        raise BadInput(f"{path} has {found} instead of {source.digest}; remove it to download it again")
    return path


def _download(source: Source, path: Path) -> None:
    part, failures = path.with_name(path.name + ".part"), []
    for url in source.urls:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"downloading {url}", flush=True)
            with urllib.request.urlopen(url, timeout=60) as response, open(part, "wb") as file:
                while block := response.read(1 << 20):
                    file.write(block)
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {error}")
            continue
        if (found := _digest(part, source.digest)) == source.digest:
            os.replace(part, path)
            return
        failures.append(f"{url} has {found} instead of {source.digest}")
    part.unlink(missing_ok=True)
    raise BadInput(f"could not download {source.file} ({'; '.join(failures)}); put it into {path.parent} by hand")


def _digest(path: Path, like: str) -> str:
    digest = hashlib.new(like.partition(":")[0])
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{digest.name}:{digest.hexdigest()}"


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn whatever a damaged file makes a reader raise into one line that names it."""
    try:
        yield
    except _DAMAGE as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{path}{what and ' '}{what}: damaged, or not in its original format: {detail}") from None


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, nests of tensors, names and numbers; read from ``path`` if that is there."""
    if path.exists():
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:
            detail = str(error).splitlines()[0]
            raise BadInput(f"{path}: damaged: {detail}; remove it to make it again") from None
    value = make()
    part = path.with_name(path.name + ".part")
    torch.save(value, part)
    os.replace(part, path)
    return value
