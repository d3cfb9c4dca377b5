"""Memory of a device: how much is free, how much a step takes, and whether it ran out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from hfta_func.errors import StateError

_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")

# oneDNN also reports errors of memory descriptors, which have nothing to do with the amount of memory.
_OUT_OF_MEMORY = re.compile(
    r"(?i)out of memory|can(no|')t allocate memory|not enough memory|std::bad_alloc|_ALLOC_FAILED|RESOURCE_EXHAUSTED"
    r"|could not create a memory(?! descriptor)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device ran out of memory.

    Args:
        error: From CUDA, its libraries, the CPU's allocator, oneDNN or XLA.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
        True
    """
    is_said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return is_said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        # Memory in PyTorch's cache is free for tensors.
        return min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and (_PROC / "meminfo").exists():
        (line,) = (line for line in (_PROC / "meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        return min([1024 * int(line.split()[1]), *_left_by_groups()])
    raise StateError(f"the free memory of {device} cannot be read; pass free=, a number of bytes")


def _left_by_groups() -> Iterator[int]:
    """Bytes that each control group (v2) of this process leaves it, before the kernel would kill it."""
    groups = _PROC / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        if not line.startswith("0::"):
            continue
        # In a container the path may be the host's, of which only the root is visible.
        group = _CGROUPS / line[3:].strip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(_CGROUPS.parts)]):
            with contextlib.suppress(OSError, ValueError):
                most, current = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                held = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                # The kernel drops cached files before it kills a process.
                yield max(0, most - current + int(held.get("inactive_file", 0)))


def profiler(device: torch.device, **options: Any) -> Any:
    """PyTorch's profiler of this process, and of the device if it has one of its own.

    Unlike ``torch.profiler.profile``, it does not import the compiler, which takes seconds. Its tracer would print a line at
    each start and end, unless it is told otherwise before it begins for the first time.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return profile(use_device=None if device.type == "cpu" else device.type, **options)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The peak of bytes that ``work`` allocates, beyond those allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Freeing earlier garbage meanwhile would hide part of the peak.
    with contextlib.ExitStack() as stack, profiler(device, profile_memory=True) as recorded:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        work()
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events), default=0)


def release(device: torch.device) -> None:
    """Return unused memory to the device."""
    # Old garbage is worth its time where it holds the memory of a GPU: a compiler leaves millions of objects.
    gc.collect(2 if device.type == "cuda" else 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
