"""Files of tensors that are replaced as a whole and detect damage.

A file is in the safetensors format, so other tools can read its tensors; its header begins with a SHA-256 of the rest, and
its metadata is JSON. The writer of safetensors is not used: it orders metadata at random, and copies all tensors at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from hfta_func.errors import BatchError, CheckpointError
from hfta_func.files import atomic

_FORMAT = 1
# The beginning of the header, in every version.
_BEGINNING = b'{"__metadata__":{"checksum":"'
_CHECKSUM = slice(8 + len(_BEGINNING), 8 + len(_BEGINNING) + 64)
NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
}


def write(path: atomic.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors by name, and metadata: JSON data that may also hold tensors."""
    header, ordered = encode(tensors, metadata)
    digest = hashlib.sha256(header[: _CHECKSUM.start] + header[_CHECKSUM.stop :])
    with atomic.replacing(path) as file:
        file.write(header)
        for tensor in ordered:
            write_data(tensor, file.write, digest.update)
        file.seek(_CHECKSUM.start)
        file.write(digest.hexdigest().encode())


def write_data(tensor: Tensor, *writers: Callable[[Any], Any]) -> None:
    """Call each writer with the bytes of a tensor, which is copied to contiguous memory of the host."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    data = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    for write_to in writers:
        write_to(data)


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
    """The beginning of a file up to its data, and the tensors in the order of the data."""
    inner: dict[str, Tensor] = {}

    def reference(value: Any) -> dict[str, str]:
        if not isinstance(value, Tensor):
            raise TypeError(f"a {type(value).__name__} cannot be saved; use numbers, strings, lists, dicts or tensors")
        inner[name := f"metadata[{len(inner)}]"] = value
        return {"__tensor__": name}

    versions = {"format_version": _FORMAT, "package_version": sys.modules["hfta_func"].__version__}
    _check_keys(metadata)
    text = json.dumps(versions | dict(metadata), default=reference, allow_nan=False)
    # Wide dtypes first, so that every tensor is aligned.
    ordered = dict(sorted({**tensors, **inner}.items(), key=lambda item: -item[1].element_size()))
    entries, end = {}, 0
    for name, tensor in ordered.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors does not support; convert it first")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    entries = {"__metadata__": {"checksum": "0" * 64, "hfta_func": text}, **entries}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, list(ordered.values())


def read(path: atomic.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file, checked; the tensors are views of the file, to be copied."""
    text = text_of(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        digest = hashlib.sha256(mapped[: _CHECKSUM.start])
        with memoryview(mapped) as view, view[_CHECKSUM.stop :] as rest:
            digest.update(rest)
        if digest.hexdigest().encode() != mapped[_CHECKSUM]:
            raise damaged(path)
    with damaged_if_it_raises(path), safe_open(path, "pt") as held:
        tensors = {name: held.get_tensor(name) for name in held.keys()}

    def resolve(value: dict[str, Any]) -> Any:
        return tensors.pop(value["__tensor__"]).clone() if "__tensor__" in value else value

    return json.loads(text, object_hook=resolve), tensors


def text_of(path: atomic.PathLike) -> str:
    """The metadata as JSON, without a look at the checksum."""
    with open(path, "rb") as file:
        if file.read(_CHECKSUM.start)[8:] != _BEGINNING:
            cure = "a module loads a plain state_dict, and stack_params takes modules"
            raise CheckpointError(f"{path} is not a file of hfta_func.save, or its header is damaged; {cure}")
    with damaged_if_it_raises(path), safe_open(path, "pt") as held:
        text = held.metadata()["hfta_func"]
        version = int(json.loads(text)["format_version"])
    if version > _FORMAT:
        reader = f"hfta_func {sys.modules['hfta_func'].__version__} reads versions up to {_FORMAT}"
        raise CheckpointError(f"{path} has format version {version}, but {reader}; install a later hfta_func")
    return text


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into strings, as in the position of a loader."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"metadata has the key {wrong[0]!r}; use strings")
        value = value.values()
    for inner in value if not isinstance(value, str | Tensor) and isinstance(value, Iterable) else ():
        _check_keys(inner)


def damaged(path: atomic.PathLike) -> CheckpointError:
    """The error for a file that was changed after it was written."""
    return CheckpointError(f"{path} is damaged: truncated, or changed after it was saved; load another copy of it")


@contextlib.contextmanager
def damaged_if_it_raises(path: atomic.PathLike) -> Iterator[None]:
    """Turn errors of code that relies on a header of :func:`encode` into the error of a damaged file."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError, SafetensorError):
        raise damaged(path) from None


_HEADER = 512
"""Bytes of the header of a file of rows."""


def write_rows(folder: atomic.PathLike, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Write batches to a folder, one file for each name, and return all of their rows as :func:`read_rows` does.

    Args:
        folder: It is created if it does not exist. The files are in the format of safetensors, and replaced as a whole.
        batches: Dicts of tensors ``[N, ...]``, such as a shared :class:`ArrayLoader` of activations yields; N may differ.

    Raises:
        BatchError: if there is no batch, or batches differ in names, dtypes or shapes of rows.
        CheckpointError: if a file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> rows = write_rows(folder, [{"hidden": torch.randn(4, 8)}, {"hidden": torch.randn(2, 8)}])
        >>> rows["hidden"].shape, torch.equal(rows["hidden"], read_rows(folder)["hidden"])
        (torch.Size([6, 8]), True)
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files, kinds, counts = dict[str, Any](), dict[str, Any](), dict[str, int]()
    with contextlib.ExitStack() as stack:
        for batch in batches:
            given = {name: (rows.dtype, [*rows.shape[1:]]) for name, rows in batch.items()}
            kinds = kinds or given
            if given != kinds:
                raise BatchError(f"a batch has {given} and the first one {kinds}; give all batches rows of one kind")
            for name, rows in batch.items():
                if name not in files:
                    files[name] = stack.enter_context(atomic.replacing(folder / f"{name}.safetensors"))
                    files[name].write(bytes(_HEADER))
                write_data(rows, files[name].write)
                counts[name] = counts.get(name, 0) + len(rows)
        if not files:
            raise BatchError("there is no batch to write; pass an iterable over batches")
        for name, (dtype, shape) in kinds.items():
            size = files[name].tell() - _HEADER
            entry = {"dtype": NAMES[dtype], "shape": [counts[name], *shape], "data_offsets": [0, size]}
            header = json.dumps({name: entry}).encode().ljust(_HEADER - 8)
            files[name].seek(0)
            files[name].write(len(header).to_bytes(8, "little") + header)
    return read_rows(folder)


def read_rows(folder: atomic.PathLike) -> dict[str, Tensor]:
    """The tensors that :func:`write_rows` has written, by name: data for an :class:`ArrayLoader`.

    They are views of the files, of which only those rows are read that a batch takes.

    Raises:
        FileNotFoundError: if the folder has no such file.
    """
    paths = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{os.fspath(folder)} holds no .safetensors file; write them by write_rows")
    return {name: rows for path in paths for name, rows in load_file(path).items()}
