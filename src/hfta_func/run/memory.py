"""The memory of a device: what is free, what a step takes, and whether it ran out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hfta_func._errors import StateError

_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, in the words of CUDA, its libraries, the CPU's allocator, oneDNN or XLA.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
        True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


# oneDNN also complains about descriptors of memory, which are no memory.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can(no|')t allocate memory|not enough memory|std::bad_alloc|_ALLOC_FAILED|RESOURCE_EXHAUSTED"
    r"|could not create a memory(?! descriptor)",
    re.IGNORECASE,
)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        # What PyTorch holds on to is free for tensors.
        return min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and (_PROC / "meminfo").exists():
        (line,) = (line for line in (_PROC / "meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        return min([1024 * int(line.split()[1]), *_left_by_groups()])
    raise StateError(f"the free memory of {device} cannot be read; pass free=, a number of bytes")


def _left_by_groups() -> Iterator[int]:
    """Bytes that each control group of this process leaves it, where the kernel ends processes that take more."""
    groups = _PROC / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cache = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = _CGROUPS / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's, of which only the root can be seen.
        group = root / path.strip("/")
        for place in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            with contextlib.suppress(OSError):
                most = (place / limit).read_text().strip()
                held = dict(entry.split() for entry in (place / "memory.stat").read_text().splitlines())
                if most != "max":
                    # Files that were read are dropped from memory before a process is ended.
                    taken = int((place / usage).read_text()) - int(held.get(cache, 0))
                    yield max(0, int(most) - taken)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``work`` takes at one time, beyond what there is when it starts."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Garbage of before that is freed meanwhile would hide what the work takes.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
    finally:
        if collecting:
            gc.enable()
    kineto: Any = recorded.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = sorted(
        (event for event in kineto.events() if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    return max(itertools.accumulate(event.nbytes() for event in events), default=0)


def release(device: torch.device) -> None:
    """Give memory that nothing uses back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
