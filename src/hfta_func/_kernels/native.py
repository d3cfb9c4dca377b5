"""Small kernels in C, compiled by the machine's own compiler in a fraction of a second and kept on disk.

They are a faster way to compute what PyTorch's operators compute too: where there is no compiler, or no place to write, the
operators do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# No contraction to fused multiply-adds: a kernel rounds as its source reads, on every processor and at every place of a row.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# The first that the compiler knows.
_EXTRA = (("-march=native", "-fopenmp"), ("-march=native",), ())
_SECONDS = 60.0


def compiler() -> str | None:
    """The C compiler: that of ``CC``, or the first of the usual names; None if there is none or ``HFTA_FUNC_NATIVE=0``."""
    return None if os.environ.get("HFTA_FUNC_NATIVE") == "0" else _found(os.environ.get("CC", ""))


@functools.cache
def _found(preferred: str) -> str | None:
    names = [preferred, "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def folder() -> Path:
    """Where kernels are kept: ``HFTA_FUNC_CACHE``, or ``hfta_func`` in the user's cache."""
    own = os.environ.get("HFTA_FUNC_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfta_func"


# Every thread takes an equal share of all elements in a row: leaf after leaf, in each member after member.
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
"""Up to this many elements one thread is as fast as many."""


def shared_out(head: str, arguments: str, body: str) -> str:
    """A program that threads share: ``body`` is done for elements ``low`` to ``high`` of member ``model`` of ``leaf``.

    Args:
        head: What stands before it.
        arguments: What is passed besides the numbers of leaves and models and the elements of each leaf in one member.
        body: A statement.
    """
    return _SHARED_OUT.format(head=head, arguments=arguments, body=body, small=_SMALL)


@functools.cache
def program(source: str) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """What :func:`shared_out` wrote as ``run(sizes, models, arguments)``; None where it cannot be had.

    Arguments are tensors, lists of tensors, and None.
    """
    library = load(source)
    if library is None:
        return None
    function = library.run
    function.restype = None

    def run(sizes: Sequence[int], models: int, arguments: Sequence[Any]) -> None:
        count, pointer = ctypes.c_int64, ctypes.c_void_p
        places = [
            (pointer * len(one))(*[leaf.data_ptr() for leaf in one])
            if isinstance(one, list)
            else pointer(None if one is None else one.data_ptr())
            for one in arguments
        ]
        threads = torch.get_num_threads()
        function(count(len(sizes)), count(models), (count * len(sizes))(*sizes), count(threads), *places)

    return run


@functools.cache
def load(source: str) -> ctypes.CDLL | None:
    """The functions of a source in C, with OpenMP where the compiler has it; None where they cannot be had."""
    command = compiler()
    if command is None:
        return None
    # What it is made of, by whom and for which processor: a cache may be shared by machines.
    made_of = repr((source, _FLAGS, _EXTRA, command, os.stat(command).st_mtime_ns, _processor()))
    name = f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.so"
    with contextlib.suppress(OSError, RuntimeError):  # no home
        path = folder() / name
        if (kept := _kept(path)) is not None:
            return kept
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            if (made := _build(command, source, Path(place))) is None:
                return None
            whole = made.read_bytes()
            # The digest stands behind the library, which loaders ignore: half of a library would end the process.
            made.write_bytes(whole + hashlib.sha256(whole).digest())
            made.replace(path)
        return _kept(path)
    # The cache cannot be written.
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as place:
        made = _build(command, source, Path(place))
        return None if made is None else ctypes.CDLL(str(made))
    return None


def _kept(path: Path) -> ctypes.CDLL | None:
    """A library from the cache, if it is there and whole and nobody else could have put it there."""
    try:
        content, status = path.read_bytes(), path.stat()
    except OSError:
        return None
    mine = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    if not mine or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path))
    return None


def _build(command: str, source: str, place: Path) -> Path | None:
    """Compile; the library of OpenMP that PyTorch has loaded is the one that kernels find, so they share its threads."""
    code, made = place / "kernel.c", place / "kernel.so"
    code.write_text(source)
    for extra in _EXTRA:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [command, *_FLAGS, *extra, str(code), "-o", str(made), "-lm"],
                check=True, capture_output=True, timeout=_SECONDS,
            )  # fmt: skip
            return made
    return None


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return platform.platform()
