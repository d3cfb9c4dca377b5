"""Compiles small programs in C with the machine's compiler, in a fraction of a second, and keeps them on disk.

Every program is a faster way to compute what PyTorch's operators compute: without a compiler, or a folder to write to, the
operators run instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# No contraction to fused multiply-adds: a kernel rounds as its source reads, on every processor and at every index of a row.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Flags to add: the first row that the compiler accepts.
_EXTRA = (("-march=native", "-fopenmp"), ("-march=native",), ())


def compiler() -> str | None:
    """The C compiler: that of ``CC``, or the first of the usual names; None if there is none or ``HFTA_FUNC_NATIVE=0``."""
    names = [] if os.environ.get("HFTA_FUNC_NATIVE") == "0" else [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def folder() -> Path:
    """The folder of compiled kernels: ``HFTA_FUNC_CACHE``, or ``hfta_func`` in the user's cache."""
    chosen = os.environ.get("HFTA_FUNC_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfta_func"


# Each thread takes an equal part of all elements, counted leaf after leaf and in each leaf member after member.
_SHARED_OUT = """
#include <stdint.h>
#include <tgmath.h>
#ifdef _OPENMP
#include <omp.h>
#endif

{head}

void run(int64_t leaves, int64_t models, const int64_t *sizes, int64_t threads, {arguments})
{{
    int64_t total = 0;
    for (int64_t leaf = 0; leaf < leaves; leaf++)
        total += sizes[leaf] * models;
#pragma omp parallel num_threads(threads) if (total > {small})
    {{
        int64_t thread = 0, all = 1, at = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        all = omp_get_num_threads();
#endif
        const int64_t begin = total / all * thread, end = thread + 1 == all ? total : total / all * (thread + 1);
        for (int64_t leaf = 0; leaf < leaves; leaf++)
            for (int64_t model = 0; model < models; model++, at += sizes[leaf]) {{
                const int64_t low = begin > at ? begin - at : 0, high = end - at < sizes[leaf] ? end - at : sizes[leaf];
                if (low < high)
                    {body};
            }}
    }}
}}
"""
_SMALL = 1 << 15
"""Up to this many elements, one thread is as fast as several."""


def shared_out(head: str, arguments: str, body: str) -> str:
    """A program for several threads: ``body`` runs for elements ``low`` to ``high`` of member ``model`` of ``leaf``.

    ``arguments`` are parameters besides the numbers of leaves, of models, and of elements of each leaf in one member.
    """
    return _SHARED_OUT.format(head=head, arguments=arguments, body=body, small=_SMALL)


@functools.cache
def program(source: str) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """A program of :func:`shared_out` as ``run(sizes, models, arguments)``; None if it cannot be compiled.

    Arguments are tensors, lists of tensors, and None.
    """
    library = load(source)
    if library is None:
        return None
    function = library.run
    function.restype = None
    count, pointer = ctypes.c_int64, ctypes.c_void_p

    def run(sizes: Sequence[int], models: int, arguments: Sequence[Any]) -> None:
        if function.argtypes is None:
            function.argtypes = count, count, pointer, count, *[pointer for _ in arguments]
        # ctypes passes where bytes begin, and makes them faster than arrays.
        pointers = [
            packed([*map(_address, one)]) if isinstance(one, list) else None if one is None else _address(one)
            for one in arguments
        ]
        function(len(sizes), models, packed(sizes), torch.get_num_threads(), *pointers)

    return run


_address = torch.Tensor.data_ptr


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as a row of ``int64_t``."""
    return struct.pack(f"{len(numbers)}q", *numbers)


@functools.cache
def load(source: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The functions of a source in C, with OpenMP if the compiler has it; None if they cannot be compiled."""
    command = compiler()
    if command is None:
        return None
    # Compiler and processor are part of the name, because machines may share a cache.
    inputs = repr((source, _FLAGS, flags, _EXTRA, command, os.stat(command).st_mtime_ns, processor()))
    name = f"{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.so"
    with contextlib.suppress(OSError, RuntimeError):  # The user has no home.
        path = folder() / name
        if (library := _load_cached(path)) is not None:
            return library
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            if (built := _build(command, source, flags, Path(temporary))) is None:
                return None
            # Loading half a library would end the process.
            built.write_bytes(signed(built.read_bytes()))
            built.replace(path)
        return _load_cached(path)
    # The cache cannot be written.
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as temporary:
        built = _build(command, source, flags, Path(temporary))
        return None if built is None else ctypes.CDLL(str(built))
    return None


TYPES = {torch.float32: "float", torch.float64: "double"}
"""The type in C of each dtype that has programs."""


@functools.cache
def load_file(name: str, dtype: torch.dtype | None, functions: str, flags: tuple[str, ...] = ()) -> Any:
    """The functions of a file in C beside this one, for a type of numbers; None if it has none, or they cannot be compiled.

    ``functions`` are their names, each with the types of its arguments: ``"p"`` for pointers and ``"n"`` for numbers.
    """
    if dtype not in TYPES:
        return None
    head, text = (Path(__file__).with_name(file).read_text() for file in ("vectors.h", f"{name}.c"))
    library = load(f"#define REAL {TYPES[dtype]}\n#define SIZE {dtype.itemsize}\n{head}{text}", flags)
    for function in functions.split() if library is not None else ():
        symbol, _, types = function.partition(":")
        getattr(library, symbol).argtypes = [ctypes.c_void_p if letter == "p" else ctypes.c_int64 for letter in types]
    return library


def call(function: Any, *arguments: Any) -> int:
    """Call a function of :func:`load_file` with where tensors begin, other arguments, and the number of threads."""
    given = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
    return function(*given, torch.get_num_threads())


def check_memory(is_missing: int) -> None:
    """Raise a MemoryError if a kernel got no memory for its buffers."""
    if is_missing:
        raise MemoryError("no memory is left for the buffers of a kernel; run fewer members at a time (chunk_size=)")


def signed(content: bytes) -> bytes:
    """The content and its digest, by which :func:`is_whole` knows it. Loaders of libraries ignore what follows one."""
    return content + hashlib.sha256(content).digest()


def is_whole(path: Path) -> bool:
    """Whether a file is there and complete, and only this user can have written it."""
    try:
        content, status = path.read_bytes(), path.stat()
    except OSError:
        return False
    is_trusted = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return is_trusted and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _load_cached(path: Path) -> ctypes.CDLL | None:
    """A library from the cache."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path)) if is_whole(path) else None
    return None


def _build(command: str, source: str, flags: tuple[str, ...], directory: Path) -> Path | None:
    """Compile; a kernel is linked to the OpenMP library that PyTorch has loaded, so both use the same threads."""
    code, built = directory / "kernel.c", directory / "kernel.so"
    code.write_text(source)
    for extra in _EXTRA:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [command, *_FLAGS, *flags, *extra, str(code), "-o", str(built), "-lm"],
                check=True, capture_output=True, timeout=60.0,
            )  # fmt: skip
            return built
    return None


@functools.cache
def processor() -> str:
    """The processor's name and what it can do."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        return " ".join(facts) or platform.machine()
    return platform.platform()
