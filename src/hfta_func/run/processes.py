"""Processes, and tensors that they share.

Messages go through pipes, tensors through files that every process maps into its memory.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

if sys.platform != "win32":
    import fcntl

_SHARED = 1 << 12
"""Tensors of at least this many bytes are shared, and not copied into every process."""


_PREFIX, _OWNER = "hfta-", "owner.lock"


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


class Leaf:
    """A shared tensor as a leaf of a tree."""

    def __init__(self, place: Place):
        self.place = place


class Place(NamedTuple):
    """Where a shared tensor lies."""

    path: str
    dtype: torch.dtype
    shape: torch.Size
    kind: str

    def tensor(self) -> Tensor:
        """The tensor, in the memory of all that ask for it."""
        size = self.shape.numel()
        flat = torch.from_file(self.path, shared=True, size=size, dtype=self.dtype)
        return flat.reshape(self.shape).to(self.kind)


class Raw(NamedTuple):
    """A tensor as bytes."""

    data: bytes
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> Raw:
        """The bytes of a tensor, wherever it lies."""
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        return cls(ctypes.string_at(plain.data_ptr(), plain.nbytes), tensor.dtype, tensor.shape)

    def tensor(self) -> Tensor:
        """The tensor, in this process's own memory."""
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


class Folder:
    """Files for tensors that processes share; in memory, where the system has such a folder with room."""

    def __init__(self) -> None:
        _sweep_once()
        self._folders = [
            tempfile.TemporaryDirectory(dir=place, prefix=_PREFIX, ignore_cleanup_errors=True) for place in _places()
        ]
        self._locks = [_locked(folder.name) for folder in self._folders]
        self._places: dict[Any, tuple[Place, Tensor]] = {}
        self._count = 0

    def close(self) -> None:
        """Remove all files; processes that have them in memory keep them."""
        for folder, lock in zip(self._folders, self._locks, strict=True):
            folder.cleanup()
            lock.close()

    def put(self, tensor: Tensor) -> Place:
        """Write a tensor, once."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._places:
            # The tensor is kept, so that no other one gets its address.
            self._places[key] = self.write(tensor), tensor
        return self._places[key][0]

    def write(self, tensor: Tensor) -> Place:
        """Write a tensor to a file of its own."""
        # Who writes a file in memory where there is no room is killed.
        free = [one.name for one in self._folders if shutil.disk_usage(one.name).free > 2 * tensor.nbytes]
        if not free:
            raise OSError(
                f"there is no room for {tensor.nbytes} bytes that processes share; free some in {self._folders[-1].name}"
            )
        self._count += 1
        path = str(Path(free[0]) / f"{self._count}.bin")
        place = Place(path, tensor.dtype, tensor.shape, tensor.device.type)
        torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
        return place


def _places() -> list[str]:
    return [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]


def _locked(folder: str) -> IO[bytes]:
    """A lock that the system gives back when this process ends, however it ends, and never before."""
    new = Path(folder) / "new"
    lock = new.open("wb")
    if sys.platform != "win32":
        fcntl.flock(lock, fcntl.LOCK_EX)
    # Under the name that others look for it is locked from the beginning.
    new.rename(Path(folder) / _OWNER)
    return lock


def sweep() -> None:
    """Remove the folders of this user's processes that have been killed."""
    for place in _places():
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX):
                    _remove_if_dead(entry)


def _remove_if_dead(entry: os.DirEntry[str]) -> None:
    # Others' folders, those that are just being made, and those that just vanish are left alone.
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return
        with open(os.path.join(entry.path, _OWNER), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)


@functools.cache
def _sweep_once() -> None:
    sweep()


class Pickler(cloudpickle.Pickler):
    """Pickles anything, functions of a notebook included.

    Args:
        file: Where to.
        folder: Places for large tensors; without one, all tensors become plain bytes.
    """

    def __init__(self, file: IO[bytes], folder: Folder | None):
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> Any:
        """What stands for a tensor."""
        if type(obj) is not Tensor or obj.is_meta or obj.requires_grad or obj.layout != torch.strided:
            return None
        if self._folder is None:
            return Raw.of(obj)
        return None if obj.nbytes < _SHARED else self._folder.put(obj)


class Unpickler(pickle.Unpickler):
    """Reads what :class:`Pickler` has written."""

    def persistent_load(self, pid: Any) -> Any:
        """The tensor that something stands for."""
        return pid.tensor()


def dumps(value: Any, folder: Folder | None = None) -> bytes:
    """A value as bytes, see :class:`Pickler`."""
    found = io.BytesIO()
    Pickler(found, folder).dump(value)
    return found.getvalue()


def loads(message: bytes) -> Any:
    """What :func:`dumps` has written."""
    return Unpickler(io.BytesIO(message)).load()


class Process:
    """One worker, seen from the process that asks.

    Args:
        number: Its number, which decides its GPU.
        processors: Its processors.
        on_gpu: Whether it sees one GPU alone.
        module: Whose ``serve`` it runs.
    """

    def __init__(self, number: int, processors: Sequence[int], on_gpu: bool, module: str = "hfta_func.run.part"):
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(len(processors))}
        if on_gpu:
            visible = os.environ.get(
                "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
            ).split(",")
            own["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the process that asks.
            start_new_session=True,
            env={**os.environ, **own},
        )
        self.answers: Any = self._process.stdout
        self.send(json.dumps([sys.path, list(processors)]).encode())

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Tell it something; that it is dead shows in the answer."""
        assert self._process.stdin is not None
        # The pipe of one that was closed is closed.
        with contextlib.suppress(ValueError):
            send(self._process.stdin, message)

    def receive(self) -> Any:
        """Its answer, None if it has died."""
        message = receive(self.answers)
        return None if message is None else pickle.loads(message)

    def status(self) -> int | None:
        """How it ended."""
        return self._process.wait()

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def close(self) -> None:
        """End it and give back its pipes."""
        self._process.kill()
        self._process.communicate()


def send(stream: IO[bytes], message: bytes) -> None:
    """Write one message; that nobody is left to read it shows where the next one is received."""
    with contextlib.suppress(BrokenPipeError):
        stream.write(struct.pack("<Q", len(message)))
        stream.write(message)
        stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """One message, None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    message = stream.read(size)
    return message if len(message) == size else None


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    sweep()
    os._exit(1)


def begin() -> tuple[IO[bytes], IO[bytes]]:
    """What a worker does first: take its processors; returns where its orders come from and its answers go to.

    It ends when the process that asks does, even if that is killed and whatever the worker is doing.
    """
    # It ends by itself only if the process that asks is gone.
    atexit.register(sweep)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    # What its code prints is no answer.
    os.dup2(2, 1)
    orders = sys.stdin.buffer
    paths, processors = json.loads(receive(orders) or b"[[], [0]]")
    sys.path[:] = paths
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))
    return orders, answers


def line(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
