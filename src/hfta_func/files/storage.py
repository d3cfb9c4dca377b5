"""Files of tensors that are written atomically and notice damage.

A file is in the safetensors format, so other tools can read its tensors; it begins with a SHA-256 of the rest, and its
metadata is JSON. It is written to ``<name>.tmp``, synchronised and renamed, so a process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from hfta_func._errors import CheckpointError

PathLike: TypeAlias = "str | os.PathLike[str]"

_FORMAT = 1
# How files of every version begin, after the eight bytes of the header's length.
_BEGINNING = b'{"__metadata__":{"checksum":"'
_CHECKSUM = slice(8 + len(_BEGINNING), 8 + len(_BEGINNING) + 64)
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors by name, and metadata: JSON data that may also hold tensors."""
    # A link stays, and the file that it points to is replaced.
    path = os.path.realpath(path)
    inner: dict[str, Tensor] = {}

    def place(value: Any) -> dict[str, str]:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a {type(value).__qualname__} cannot be saved; use numbers, strings, lists, dicts or tensors"
            )
        inner[name := f"metadata[{len(inner)}]"] = value
        return {"__tensor__": name}

    versions = {"format_version": _FORMAT, "package_version": _package_version()}
    text = json.dumps(versions | dict(metadata), default=place)
    # Wide dtypes first, so that every tensor is aligned.
    ordered = dict(sorted({**tensors, **inner}.items(), key=lambda item: -item[1].element_size()))
    entries, end = {}, 0
    for name, tensor in ordered.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors does not support; convert it first")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    entries = {"__metadata__": {"checksum": "0" * 64, "hfta_func": text}, **entries}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(header[: _CHECKSUM.start] + header[_CHECKSUM.stop :])
    with _replacing(path) as file:
        file.write(header)
        for tensor in ordered.values():
            # One tensor at a time is copied, to contiguous memory of the host.
            plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
            data = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
            file.write(data)
            digest.update(data)
        file.seek(_CHECKSUM.start)
        file.write(digest.hexdigest().encode())


def read(path: PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file, checked; the tensors are views of the file, to be copied."""
    with open(path, "rb") as file:
        length = _header_length(file, path)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    digest = hashlib.sha256(mapped[: _CHECKSUM.start])
    digest.update(memoryview(mapped)[_CHECKSUM.stop :])
    if digest.hexdigest().encode() != mapped[_CHECKSUM]:
        raise _damaged(path)
    text, entries = _parse(mapped[8 : 8 + length], path)
    tensors = {}
    for name, entry in entries.items():
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        flat = torch.empty(0, dtype=dtype, device="cpu")
        if end > start:
            flat = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=8 + length + start)
        tensors[name] = flat.reshape(shape)

    def put_back(held: dict[str, Any]) -> Any:
        return tensors.pop(held["__tensor__"]).clone() if "__tensor__" in held else held

    return json.loads(text, object_hook=put_back), tensors


def read_header(path: PathLike) -> dict[str, Any]:
    """The metadata, unchecked."""
    with open(path, "rb") as file:
        text, _ = _parse(file.read(_header_length(file, path)), path)
    return json.loads(text)


def _header_length(file: BinaryIO, path: PathLike) -> int:
    """Bytes in the header; the file's position is then at its start."""
    start = file.read(_CHECKSUM.start)
    if start[8:] != _BEGINNING:
        raise CheckpointError(
            f"{path} is not a file of hfta_func.save, or its header is damaged; read a plain state_dict with import_models"
        )
    length = int.from_bytes(start[:8], "little")
    if length > os.fstat(file.fileno()).st_size - 8:
        raise _damaged(path)
    file.seek(8)
    return length


def _parse(header: bytes, path: PathLike) -> tuple[str, dict[str, Any]]:
    """Metadata as JSON; dtype, shape and offsets of every tensor."""
    try:
        entries = json.loads(header)
        text = entries.pop("__metadata__")["hfta_func"]
        version = int(json.loads(text)["format_version"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(path) from None
    if version > _FORMAT:
        raise CheckpointError(
            f"{path} has format version {version}, but hfta_func {_package_version()} reads versions up to {_FORMAT}; "
            f"install a later hfta_func"
        )
    return text, entries


def _damaged(path: PathLike) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: truncated, or changed after it was saved; load another copy of it")


def _package_version() -> str:
    return sys.modules["hfta_func"].__version__


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """A file that replaces another one if the block succeeds, and is removed otherwise."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}; its former content is unchanged. Save to an existing, "
                f"writable directory with free space"
            ) from error
        raise
    if os.name == "posix":
        # A rename is durable once its directory is synchronised.
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
