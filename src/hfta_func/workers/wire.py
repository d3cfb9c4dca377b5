"""What passes between processes: values as bytes, and large tensors in memory that several of them share."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import os
import pickle
import shutil
import tempfile
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor

_SHARED = 1 << 12
"""Tensors of at least this many bytes are shared, and not copied into every process."""
_BLOCK, _PAGE = 1 << 24, 1 << 12
"""Bytes of a file of small tensors, and what tensors begin at a multiple of."""


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """What a tensor is made from in another process; a leaf of a tree."""

    content: bytes | tuple[str, int, int]  # its bytes; or a file that is mapped, and the first and the last byte in it
    dtype: torch.dtype
    shape: torch.Size
    kind: str  # type of the device that the tensor is for

    def tensor(self) -> Tensor:
        """The tensor; if it is mapped and on the CPU, all processes see what one writes."""
        if isinstance(self.content, tuple):
            path, low, high = self.content
            flat = torch.from_file(path, shared=True, size=high, dtype=torch.uint8)[low:]
        else:
            flat = torch.frombuffer(bytearray(self.content or b"0"), dtype=torch.uint8)[: len(self.content)]
        return flat.view(self.dtype).reshape(self.shape).to(self.kind)


class Folder:
    """Tensors in memory that processes share, in files without a name that are gone when this process ends."""

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []
        self._place, self._end, self._size = "", 0, 0
        self._refs: dict[Any, tuple[TensorRef, Tensor]] = {}

    def close(self) -> None:
        """Close the files; processes that have mapped them keep them."""
        for file in self._files:
            file.close()

    def put(self, tensor: Tensor) -> TensorRef:
        """Write a tensor, unless it has been written."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._refs:
            # The tensor is kept, so that no other one gets its address.
            self._refs[key] = self.write(tensor), tensor
        return self._refs[key][0]

    def write(self, tensor: Tensor) -> TensorRef:
        """Write a tensor, to memory if the system has a folder there with room."""
        folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(folder)]
        # The system kills a process that writes a file in memory where there is no room.
        free = [folder for folder in folders if shutil.disk_usage(folder).free > 2 * tensor.nbytes]
        if not free:
            raise OSError(
                f"there is no room for {tensor.nbytes} bytes that processes share; free some in {folders[-1]}"
            )
        if free[0] != self._place or self._end + tensor.nbytes > self._size:
            self._place, self._end, self._size = free[0], 0, max(_BLOCK, tensor.nbytes)
            self._files.append(tempfile.TemporaryFile(dir=self._place, buffering=0))
            self._files[-1].truncate(self._size)
        low, high = self._end, self._end + tensor.nbytes
        self._end = -(-high // _PAGE) * _PAGE
        content = f"/proc/{os.getpid()}/fd/{self._files[-1].fileno()}", low, high
        TensorRef(content, tensor.dtype, tensor.shape, "cpu").tensor().copy_(tensor.detach())
        return TensorRef(content, tensor.dtype, tensor.shape, tensor.device.type)


class Pickler(cloudpickle.Pickler):
    """Pickles anything, functions of a notebook included; large tensors go to a folder, or without one become plain bytes."""

    def __init__(self, file: IO[bytes], folder: Folder | None):
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, obj: Any) -> Any:
        """The reference that is pickled instead of a tensor."""
        if type(obj) is not Tensor or obj.is_meta or obj.requires_grad or obj.layout != torch.strided:
            return None
        if self._folder is not None:
            return None if obj.nbytes < _SHARED else self._folder.put(obj)
        plain = torch.empty(obj.shape, dtype=obj.dtype, device="cpu").copy_(obj)
        return TensorRef(ctypes.string_at(plain.data_ptr(), plain.nbytes), obj.dtype, obj.shape, "cpu")


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


def one_line_error(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
