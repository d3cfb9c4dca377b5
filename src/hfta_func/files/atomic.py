"""Files that are replaced as a whole, and locks of files.

A file is written under a temporary name in the same folder, synchronised and renamed, so a process may be killed at any
moment, and several may write at once. Locks are the kernel's, which releases them when their process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Iterator
from typing import IO, BinaryIO, TypeAlias

from hfta_func.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

PathLike: TypeAlias = "str | os.PathLike[str]"

_TEMPORARY = re.compile(r"hfta-[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def replacing(path: PathLike, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` if the block succeeds, and is removed otherwise.

    If it is ``durable``, the disk has it at the end, so that it is there after the machine fails, too.
    """
    with _writing(path), _beside(path) as file:
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        if sys.platform == "win32":
            # Only closed files can be renamed there; elsewhere the file stays locked until it has its final name.
            file.close()
        os.replace(file.name, path)
    if durable and os.name == "posix":
        # A rename is durable once its directory is synchronised.
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write(path: PathLike, content: bytes, durable: bool = True) -> None:
    """Replace a file by one with this content, see :func:`replacing`."""
    with replacing(path, durable) as file:
        file.write(content)


@contextlib.contextmanager
def holding(path: PathLike) -> Iterator[None]:
    """Hold a path against other runs by a locked file beside it, and refuse what :func:`replacing` would refuse."""
    with _writing(path):
        name = f"{os.path.abspath(path)}.hfta-lock"
        file = _locked(name, "ab")
        if file is None:
            raise CheckpointError(
                f"{path} belongs to a run that has not ended; wait until it has, or pass another file (the run holds {name})"
            )
    if hasattr(os, "register_at_fork"):
        # A lock lasts as long as any process has the file open, and workers of a loader may outlive a killed run.
        os.register_at_fork(after_in_child=file.close)
    with file:
        try:
            if lock(file) is None:
                # Training there is possible all the same.
                warnings.warn(
                    f"the file system of {path} has no locks; start no second run with this file", stacklevel=5
                )
            yield
        finally:
            # Removed while it is locked, so that the lock of another run stays.
            with contextlib.suppress(OSError):
                if _is_at_its_name(file):
                    os.unlink(name)


@contextlib.contextmanager
def _writing(path: PathLike) -> Iterator[None]:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r} is no path; pass the name of a file")
    try:
        with contextlib.suppress(FileNotFoundError):
            # An empty path is the current directory.
            kind = stat.S_IFMT(os.lstat(path or ".").st_mode)
            if kind == stat.S_IFLNK:
                raise CheckpointError(f"{path} is a link; pass the file that it leads to, {os.path.realpath(path)}")
            if kind != stat.S_IFREG:
                what = "a directory" if kind == stat.S_IFDIR else "a device, pipe or socket"
                raise CheckpointError(f"{path} is {what}; pass the name of a regular file")
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; its former content is unchanged. Save to an existing, writable "
            f"directory with free space"
        ) from error


@contextlib.contextmanager
def _beside(path: PathLike) -> Iterator[BinaryIO]:
    """A new file in the same folder, removed at the end if it still has its name."""
    folder = os.path.dirname(path) or "."
    _remove_stale(folder)
    while (file := _locked(os.path.join(folder, f"hfta-{secrets.token_hex(8)}.tmp"), "xb")) is None:
        pass
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(file.name)


def _remove_stale(folder: str) -> None:
    """Remove what killed processes left in a folder: temporary files that no process has locked."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError), open(entry.path, "r+b", opener=_open) as file:
                    if lock(file):
                        os.unlink(entry.path)


def _locked(name: str, mode: str) -> BinaryIO | None:
    """A file, open and locked; None if another process has locked it."""
    while True:
        file: BinaryIO = open(name, mode, opener=_open)  # pyright: ignore[reportAssignmentType]
        if lock(file) is False:
            file.close()
            return None
        # The process that had locked it before may have removed it.
        if _is_at_its_name(file):
            return file
        file.close()


def _open(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def lock(file: IO[bytes]) -> bool | None:
    """Lock an open file for writers until it is closed; False if another process has, None where there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at_its_name(file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False
