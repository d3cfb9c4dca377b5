"""Messages between processes through pipes, and large tensors in files that each process maps into its memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import os
import pickle
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from hfta_func.files.atomic import lock

_SHARED = 1 << 12
"""Tensors of at least this many bytes are shared, and not copied into every process."""

_PREFIX, _OWNER = "hfta-", "owner.lock"


@dataclasses.dataclass(frozen=True)
class SharedTensorRef:
    """A reference to a tensor in a file that several processes map into their memory; a leaf of a tree."""

    path: str
    dtype: torch.dtype
    shape: torch.Size
    kind: str  # type of the device that the tensor is for

    def tensor(self) -> Tensor:
        """The tensor; on the CPU, all processes see what one writes."""
        flat = torch.from_file(self.path, shared=True, size=self.shape.numel(), dtype=self.dtype)
        return flat.reshape(self.shape).to(self.kind)


class TensorBytes(NamedTuple):
    """A tensor's bytes, dtype and shape, for a process that shares no memory with this one."""

    data: bytes
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> TensorBytes:
        """The bytes of a tensor on any device."""
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        return cls(ctypes.string_at(plain.data_ptr(), plain.nbytes), tensor.dtype, tensor.shape)

    def tensor(self) -> Tensor:
        """The tensor, in memory of this process."""
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


class Folder:
    """Files of tensors that processes share, in the system's folder in memory if it has one with room."""

    def __init__(self) -> None:
        _sweep_once()
        self._folders = [
            tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX, ignore_cleanup_errors=True)
            for parent in _shared_folders()
        ]
        self._locks = [_locked(folder.name) for folder in self._folders]
        self._refs: dict[Any, tuple[SharedTensorRef, Tensor]] = {}
        self._count = 0

    def close(self) -> None:
        """Remove all files; processes that have them in memory keep them."""
        for folder, file in zip(self._folders, self._locks, strict=True):
            folder.cleanup()
            file.close()

    def put(self, tensor: Tensor) -> SharedTensorRef:
        """Write a tensor, unless it has been written."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._refs:
            # The tensor is kept, so that no other one gets its address.
            self._refs[key] = self.write(tensor), tensor
        return self._refs[key][0]

    def write(self, tensor: Tensor) -> SharedTensorRef:
        """Write a tensor to a new file."""
        # The system kills a process that writes a file in memory where there is no room.
        free = [folder.name for folder in self._folders if shutil.disk_usage(folder.name).free > 2 * tensor.nbytes]
        if not free:
            raise OSError(
                f"there is no room for {tensor.nbytes} bytes that processes share; free some in {self._folders[-1].name}"
            )
        self._count += 1
        path = str(Path(free[0]) / f"{self._count}.bin")
        ref = SharedTensorRef(path, tensor.dtype, tensor.shape, tensor.device.type)
        torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
        return ref


def _shared_folders() -> list[str]:
    """Folders for shared files: first the one in memory, if the system has one."""
    return [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(folder)]


def _locked(folder: str) -> IO[bytes]:
    """A file in the folder that stays locked until it is closed or this process ends."""
    new = Path(folder) / "new"
    file = new.open("wb")
    lock(file)
    # Other processes look for this name, under which the file has been locked from the beginning.
    new.rename(Path(folder) / _OWNER)
    return file


def sweep() -> None:
    """Remove the folders that killed processes of this user have left."""
    for parent in _shared_folders() if sys.platform != "win32" else ():
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                # Folders of other users, and those that are just being made or removed, are left alone.
                with contextlib.suppress(OSError):
                    is_old = entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
                    if is_old and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        with open(os.path.join(entry.path, _OWNER), "r+b") as file:
                            if lock(file):
                                shutil.rmtree(entry.path, ignore_errors=True)


_sweep_once = functools.cache(sweep)


class Pickler(cloudpickle.Pickler):
    """Pickles anything, functions of a notebook included; large tensors go to a folder, or without one become plain bytes."""

    def __init__(self, file: IO[bytes], folder: Folder | None):
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> Any:
        """The reference that is pickled instead of a tensor."""
        if type(obj) is not Tensor or obj.is_meta or obj.requires_grad or obj.layout != torch.strided:
            return None
        if self._folder is None:
            return TensorBytes.of(obj)
        return None if obj.nbytes < _SHARED else self._folder.put(obj)


class Unpickler(pickle.Unpickler):
    """Reads what :class:`Pickler` has written."""

    def persistent_load(self, pid: Any) -> Any:
        """The tensor of such a reference."""
        return pid.tensor()


def dumps(value: Any, folder: Folder | None = None) -> bytes:
    """A value as bytes, see :class:`Pickler`."""
    file = io.BytesIO()
    Pickler(file, folder).dump(value)
    return file.getvalue()


def loads(message: bytes) -> Any:
    """The value that :func:`dumps` has made bytes of."""
    return Unpickler(io.BytesIO(message)).load()


def send(stream: IO[bytes], message: bytes) -> None:
    """Write one message; if its reader has gone, the next :func:`receive` tells."""
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


def one_line_error(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
