"""What passes between processes: values as bytes, and large tensors in memory that several of them share."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import io
import os
import pickle
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hfta_func._torch import parametrized, writes

_SHARED = _PAGE = 1 << 12
"""Tensors of at least this many bytes are shared, and not copied into every process; all begin at a multiple of it."""


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
    """Tensors in memory that processes share: a file without a name, which is gone when this process ends."""

    def __init__(self) -> None:
        self._file, self._end = open(os.memfd_create("hfta_func"), "wb", buffering=0), 0
        self._refs: dict[Any, tuple[TensorRef, Tensor]] = {}

    def close(self) -> None:
        """Close the file; processes that have mapped it keep it."""
        self._file.close()

    def put(self, tensor: Tensor) -> TensorRef:
        """Write a tensor, unless it has been written."""
        key = _identity(tensor)
        if key not in self._refs:
            # The tensor is kept, so that no other one gets its address.
            self._refs[key] = self.write(tensor), tensor
        return self._refs[key][0]

    def write(self, tensor: Tensor) -> TensorRef:
        """Write a tensor."""
        low, high = self._end, self._end + tensor.nbytes
        self._end = -(-high // _PAGE) * _PAGE
        self._file.truncate(self._end)
        content = f"/proc/{os.getpid()}/fd/{self._file.fileno()}", low, high
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

    def reducer_override(self, obj: Any) -> Any:
        """What an object is made from; PyTorch gives parametrized modules a class of their own, which it does not send."""
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return parametrized, (type(obj).__base__, vars(obj))
        if type(obj) is nn.Parameter:
            # PyTorch itself sends its data, of which no one knows how often it was written.
            return nn.Parameter, (obj.detach(), obj.requires_grad), vars(obj) or None
        return super().reducer_override(obj)


class _Fingerprint(Pickler):
    """Pickles which tensor there is instead of its values; buffers of NumPy's arrays are left out."""

    def __init__(self, file: IO[bytes]):
        cloudpickle.Pickler.__init__(self, file, buffer_callback=lambda buffer: None)
        # Kept, so that no other one gets their addresses.
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.layout != torch.strided:
            return None
        self.tensors.append(obj)
        return _identity(obj)


def _identity(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, writes(tensor)


def fingerprint(value: Any) -> tuple[bytes, list[Tensor]]:
    """Bytes that change if anything does that is sent with a value, but for entries of NumPy's arrays, and its tensors."""
    pickler = _Fingerprint(file := io.BytesIO())
    try:
        pickler.dump(value)
    except Exception:
        # Sending it raises an error that names the cure.
        return b"", []
    return hashlib.sha256(file.getbuffer()).digest(), pickler.tensors


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
