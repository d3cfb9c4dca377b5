"""Processes, and tensors that they share.

Messages go through pipes, tensors through files that every process maps into its memory.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

_SHARED = 1 << 12
"""Tensors of at least this many bytes are shared, and not copied into every process."""


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


class Folder:
    """Files for tensors that processes share; in memory, where the system has such a folder with room."""

    def __init__(self) -> None:
        places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
        self._folders = [
            tempfile.TemporaryDirectory(dir=place, prefix="hfta-", ignore_cleanup_errors=True) for place in places
        ]
        self._places: dict[Any, tuple[Place, Tensor]] = {}
        self._count = 0

    def close(self) -> None:
        """Remove all files; processes that have them in memory keep them."""
        for folder in self._folders:
            folder.cleanup()

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


class Pickler(cloudpickle.Pickler):
    """Pickles anything, functions of a notebook included, with places for large tensors."""

    def __init__(self, file: IO[bytes], folder: Folder):
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> Any:
        """Where a large tensor lies."""
        if type(obj) is not Tensor or obj.is_meta or obj.requires_grad or obj.nbytes < _SHARED:
            return None
        return self._folder.put(obj)


class Unpickler(pickle.Unpickler):
    """Reads what :class:`Pickler` has written."""

    def persistent_load(self, pid: Any) -> Any:
        """The tensor at a place."""
        return pid.tensor()


class Process:
    """One worker, seen from the process that asks."""

    def __init__(self, number: int, processors: Sequence[int], on_gpu: bool):
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(len(processors))}
        if on_gpu:
            visible = os.environ.get(
                "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
            ).split(",")
            own["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from hfta_func.run.part import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the process that asks.
            start_new_session=True,
            env={**os.environ, **own},
        )
        self.answers: Any = self._process.stdout
        self.send(json.dumps([sys.path, list(processors)]).encode())

    def send(self, message: bytes) -> None:
        """Tell it something; that it is dead shows in the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(struct.pack("<Q", len(message)) + message)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def receive(self) -> Any:
        """Its answer, None if it has died."""
        message = receive(self.answers)
        return None if message is None else pickle.loads(message)

    def status(self) -> int | None:
        """How it ended."""
        return self._process.wait()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def receive(stream: IO[bytes]) -> bytes | None:
    """One message, None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    message = stream.read(size)
    return message if len(message) == size else None
