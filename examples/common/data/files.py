"""Original archives: located or downloaded, checked, and read without unpacking."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import struct
import tarfile
import urllib.request
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from examples.common.errors import BadInput, first_line

# What reading a file raises that is cut short, garbled, in an unknown version, or something else.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, LookupError),
    *(NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError),
)


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
    elif source.digest and (digest := _digest(path, source.digest)) != source.digest:
        raise BadInput(f"{path} has {digest} instead of {source.digest}; remove it to download it again")
    return path


def _download(source: Source, path: Path) -> None:
    failures = []
    for url in source.urls:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"downloading {url}", flush=True)
            with _aside(path) as part:
                with urllib.request.urlopen(url, timeout=60) as response, open(part, "wb") as file:
                    while block := response.read(1 << 20):
                        file.write(block)
                if (digest := _digest(part, source.digest)) != source.digest:
                    raise ValueError(f"has {digest} instead of {source.digest}")
            return
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{url}: {first_line(error)}")
    raise BadInput(f"could not download {source.file} ({'; '.join(failures)}); put it into {path.parent} by hand")


def _digest(path: Path, like: str) -> str:
    digest = hashlib.new(like.partition(":")[0])
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"{digest.name}:{digest.hexdigest()}"


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a new file, which replaces ``path`` at the end and is removed if there is no such end."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def reading(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what a damaged file makes a reader raise, ``kinds`` of its own too, into one line that names the file."""
    try:
        yield
    except (*_DAMAGE, *kinds) as error:
        raise BadInput(f"{path}: damaged, or not in its original format: {first_line(error)}") from None


@contextmanager
def reading_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive, with damage turned into one line."""
    with reading(path), zipfile.ZipFile(path) as archive:
        if any(entry.flag_bits & 1 for entry in archive.infolist()):
            raise ValueError("it is encrypted")
        yield archive


@contextmanager
def _cache(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BadInput(f"{path}: damaged: {first_line(error)}; remove it to make it again") from None


def _not_kept(path: Path, error: Exception) -> None:
    print(f"{path} cannot be written ({first_line(error)}); going on without it", flush=True)


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, nests of tensors, names and numbers; read from ``path`` if that is there."""
    if path.exists():
        with _cache(path):
            return torch.load(path, weights_only=True)
    value = make()
    try:
        with _aside(path) as part:
            torch.save(value, part)
    # The latter is what PyTorch's writer raises.
    except (OSError, RuntimeError) as error:
        _not_kept(path, error)
    return value


def mapped(stem: Path, key: Iterable[Any], shape: tuple[int, ...], fill: Callable[[numpy.ndarray], None]) -> Tensor:
    """Bytes that ``fill`` writes, kept in a file and mapped into memory, which they may exceed; not to be written to.

    Args:
        stem: The file's name without ``.<digest of the key>.npy``. Files of this form with another digest are removed.
        key: All that the bytes follow from.
        shape: Of the bytes.
        fill: Writes the whole array that it is given; that is in memory if the file cannot be written.
    """
    digest = hashlib.sha256()
    for item in key:
        digest.update(f"{item!r}\n".encode())
    path = stem.with_name(f"{stem.name}.{digest.hexdigest()[:16]}.npy")
    if not path.exists():
        try:
            for old in stem.parent.iterdir():
                if re.fullmatch(rf"{re.escape(stem.name)}\.[0-9a-f]{{16}}\.npy", old.name) and old.is_file():
                    old.unlink(missing_ok=True)
            with _aside(path) as part:
                array = _allocate(part, shape)
                fill(array)
                array.flush()
        except OSError as error:
            _not_kept(path, error)
            array = numpy.empty(shape, "uint8")
            fill(array)
            return torch.from_numpy(array)
    with _cache(path), warnings.catch_warnings():
        # PyTorch warns of memory that must not be written to.
        warnings.simplefilter("ignore", UserWarning)
        array = numpy.load(path, mmap_mode="r")
        if array.shape != shape or array.dtype != numpy.uint8:
            raise ValueError(f"it holds {array.dtype} {list(array.shape)} instead of uint8 {list(shape)}")
        return torch.from_numpy(array)


def _allocate(path: Path, shape: tuple[int, ...]) -> numpy.memmap:
    array = numpy.lib.format.open_memmap(path, "w+", "uint8", shape)
    # A disk that is full is an error here, but kills the program where it writes to a mapped file with holes.
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array
