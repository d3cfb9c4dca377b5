"""Files that are replaced as a whole, and runs that hold their file.

A file is written under a temporary name in the same folder, synchronised and renamed, so a process may be killed at any
moment, and several may write at once. Locks are the kernel's, which releases them when their process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from typing import BinaryIO, TypeAlias

from hfta_func.errors import CheckpointError

PathLike: TypeAlias = "str | os.PathLike[str]"


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` if the block succeeds, and is removed otherwise.

    The disk has it at the end, so that it is there after the machine fails, too.
    """
    with _writing(path) as target, contextlib.ExitStack() as stack:
        _remove_temporary(target, 3600.0)
        name = f"{target}.{secrets.token_hex(8)}.tmp"
        with open(name, "xb") as file:
            # Without effect once it has its final name.
            stack.callback(lambda: os.path.lexists(name) and os.unlink(name))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
        # A rename is durable once its directory is synchronised.
        directory = os.open(os.path.dirname(name), os.O_RDONLY)
        stack.callback(os.close, directory)
        os.fsync(directory)


@contextlib.contextmanager
def holding(path: PathLike) -> Iterator[None]:
    """Hold a path against other runs by a locked file beside it, and refuse what :func:`replacing` would refuse.

    The kernel releases the lock when the process ends, even if it is killed.
    """
    with _writing(path) as target:
        file = _locked(name := f"{target}.hfta-lock", path)
        _remove_temporary(target, 0.0)
    # A lock lasts as long as any process has the file open, and workers of a loader may outlive a killed run.
    os.register_at_fork(after_in_child=file.close)
    with file:
        try:
            yield
        finally:
            # Removed while it is locked, so that the lock of another run stays.
            with contextlib.suppress(OSError):
                if _is_at_its_name(file):
                    os.unlink(name)


def _locked(name: str, path: PathLike) -> BinaryIO:
    while True:
        file = open(name, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            text = f"{path} belongs to a run that has not ended; wait until it has, or pass another file"
            raise CheckpointError(f"{text} (the run holds {name})") from None
        except OSError:
            # As on some file systems of clusters.
            warnings.warn(f"the file system of {path} has no locks; start no second run with this file", stacklevel=6)
        # The run that had locked it before may have removed it.
        if _is_at_its_name(file):
            return file
        file.close()


def _is_at_its_name(file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _writing(path: PathLike) -> Iterator[str]:
    """A block that writes the file that a path leads to, whose name it yields."""
    name = os.path.realpath(path)
    if os.path.exists(name) and not os.path.isfile(name):
        raise CheckpointError(f"{path} is a directory, device, pipe or socket; pass the name of a regular file")
    try:
        yield name
    except CheckpointError:
        raise
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}; its former content is unchanged"
        raise CheckpointError(f"{text}. Save to an existing, writable directory with free space") from error


def _remove_temporary(target: str, seconds: float) -> None:
    """Remove temporary files of a file that nobody has written for some seconds: killed processes left them."""
    for name in glob.glob(f"{glob.escape(target)}.????????????????.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(name).st_mtime > seconds:
                os.unlink(name)
