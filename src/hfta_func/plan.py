"""How many models fit, and how many pay.

Public: :func:`plan`, :class:`Plan`, :func:`max_models`, :func:`is_out_of_memory`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from hfta_func._batch import check_batch, take_batch
from hfta_func._chunks import now
from hfta_func._errors import StateError
from hfta_func._tree import leaves, num_models, take
from hfta_func._types import Tree
from hfta_func.train import TrainState

T = TypeVar("T")
Run = Callable[[TrainState, Tree], tuple[TrainState, Any]]

_WARMUP, _STEPS = 2, 3
# All sizes take turns, so that a disturbance does not fall on one of them alone: at most and at least so many, and as many
# steps in a turn, at least those above, as make some seconds in all.
_MOST, _LEAST, _SECONDS = 8, 2, 2.0
# A larger chunk, which needs more memory, has to be faster by more than this.
_WORTH = 0.02


class Plan(NamedTuple):
    """What a step takes for arrays of M models; printed, a table.

    Args:
        sizes: The numbers of models that were measured: those asked for that fit.
        seconds: Time of a step of each; in the place of one above that of more models, which was disturbed, theirs.
        peaks: Bytes that each step takes at most, beside the state and the batch.
        held: Bytes of one model's state.
        free: Bytes there are for states and steps.
        limit: Most models asked for.
        num_models: The largest number that fits, ``limit`` at most; 0 if not even one does.
        chunk_size: How many of them to run together, for ``make_train_step``; None is all. 1 where no more than one fits.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    peaks: tuple[int, ...]
    held: int
    free: int
    limit: int
    num_models: int
    chunk_size: int | None

    def time(self, num_models: int) -> float:
        """Seconds of a step of M models at once: measured, or on a line through the two nearest measurements."""
        return _line(self.sizes, self.seconds, num_models)

    def memory(self, num_models: int) -> float:
        """Bytes of M models' state and the most that a step takes beside it."""
        return num_models * self.held + _line(self.sizes, self.peaks, num_models)

    def __str__(self) -> str:
        shown = sorted({*self.sizes, self.num_models} - {0})
        head = f"{'models':>8}{'ms':>12}{'ms a model':>12}{'MiB':>12}"
        rows = [
            f"{size:8d}{1e3 * self.time(size):12.3f}{1e3 * self.time(size) / size:12.3f}{self.memory(size) / 2**20:12.1f}"
            + ("" if size in self.sizes else "  predicted")
            for size in shown
        ]
        chunk = "" if self.chunk_size is None else f" in chunks of {self.chunk_size}"
        return "\n".join([head, *rows, f"{self.num_models} of {self.limit} models fit{chunk}"])


def plan(
    step: Run,
    state: TrainState,
    batch: Tree,
    *,
    limit: int = 64,
    sizes: Sequence[int] = (1, 2, 4, 8),
    free: int | None = None,
) -> Plan:
    """Measure a step at few M, predict its time and memory at others, and recommend M and chunk size.

    Args:
        step: A training step without chunks, compiled or not; compiled, every size is compiled once.
        state: A state of any number of models, whose members are repeated as needed; it is not written.
        batch: A batch for it.
        limit: Most models that would be trained.
        sizes: What to measure, ascending; two at least. Sizes that run out of memory are left out, and on a CPU, where the
            system would end the process, those that will by what smaller ones took.
        free: Bytes there are; by default what the device has free now.

    Returns:
        What was found; where only one size fits, predictions are in proportion to it. The device's memory is left as it was.

    Raises:
        ValueError: if there are fewer than two sizes, or they are not ascending and positive.
        StateError: if the tensors are on a device whose memory cannot be read.
        MemoryError: if the smallest size does not fit.
        Exception: whatever a step raises besides running out of memory.

    Example:
        >>> factory = lambda: torch.nn.Linear(4, 1)
        >>> step = make_train_step(factory(), lambda model, batch: model(batch).square().mean(), sgd(lr=0.1))
        >>> state = step.init(*init_params(factory, seeds=[0]), seeds=[0])
        >>> found = plan(step, state, torch.randn(1, 8, 4), limit=100, sizes=[1, 4])
        >>> found.num_models, found.time(50) > 0
        (100, True)
    """
    sizes = tuple(sizes)
    if len(sizes) < 2 or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"sizes are {list(sizes)}; give at least two numbers of models, ascending from 1 or more")
    device = state.keys.device
    free = _free(device) if free is None else free
    held = sum(leaf.nbytes for leaf in leaves(state)) // num_models(state)
    times: dict[int, list[float]] = {}
    peaks: dict[int, int] = {}
    failed = max(limit, *sizes) + 1

    def measure(array: _Array) -> tuple[list[float], int]:
        taken = _times(array.step, device, _SECONDS / (_MOST * len(sizes)))
        return taken, peaks[size] if size in peaks else _peak(array.step, device)

    for turn in range(_MOST):
        if turn >= _LEAST and sum(map(sum, times.values())) > _SECONDS:
            break
        # Each array is gone before the next one is made.
        for size in sizes:
            if size >= failed:
                break
            risky = device.type == "cpu" and peaks and size not in peaks
            if risky and size * held + _line(list(peaks), list(peaks.values()), size) > free:
                failed = size
            elif (measured := _attempt(step, state, batch, size, measure)) is None:
                failed = size
            else:
                times.setdefault(size, []).extend(measured[0])
                peaks[size] = measured[1]
    fits = tuple(size for size in peaks if size < failed)
    if not fits:
        raise MemoryError(
            f"a step ran out of memory with M = {sizes[0]}, the smallest of sizes; give smaller sizes or batches, or make "
            f"the step with checkpoint=True"
        )
    # Fewer models take no longer. Disturbed times would bend lines downwards, to times below zero.
    seconds = [*itertools.accumulate((statistics.median(times[size]) for size in reversed(fits)), min)]
    found = Plan(fits, tuple(reversed(seconds)), tuple(peaks[size] for size in fits), held, free, limit, 0, None)
    fitting = [count for count in range(1, min(limit + 1, failed)) if found.memory(count) <= free]
    count = max(fitting, default=0)
    smaller = [size for size in fits if size < count]
    best = min(smaller, key=lambda size: found.time(size) / size, default=count)
    chunked = best < count and found.time(best) / best < (1 - _WORTH) * found.time(count) / count
    return found._replace(num_models=count, chunk_size=best if chunked or count == 1 < limit else None)


def max_models(step: Run, state: TrainState, batch: Tree, *, limit: int = 1024, free: int | None = None) -> int:
    """The largest number of models whose step runs without running out of memory, found by doubling and bisection.

    On a GPU steps are run until one fails. On a CPU, where the system would end the process, a size is run only if it will
    fit by what smaller ones took.

    Args:
        step: A training step.
        state: A state of any number of models, whose members are repeated as needed; it is not written.
        batch: A batch for it.
        limit: Where to stop.
        free: Bytes that states and steps may take; by default what the device has free now.

    Returns:
        At most ``limit``; 0 if not even one model fits. The device's memory is left as it was.

    Raises:
        Exception: whatever a step raises besides running out of memory.
    """
    device = state.keys.device
    free = _free(device) if free is None else free
    held = sum(leaf.nbytes for leaf in leaves(state)) // num_models(state)
    peaks: dict[int, int] = {}

    def warm_peak(array: _Array) -> int:
        array.step()
        return _peak(array.step, device)

    def fits(count: int) -> bool:
        expected = max((count * held + peak * count / size for size, peak in peaks.items()), default=0.0)
        if device.type == "cpu" and expected > free:
            return False
        peak = _attempt(step, state, batch, count, warm_peak)
        if peak is None:
            return False
        peaks[count] = peak
        return count * held + peak <= free

    good, bad = 0, limit + 1
    while bad - good > 1:
        count = min(max(1, 2 * good), limit) if bad > limit and good < limit else (good + bad) // 2
        if fits(count):
            good = count
        else:
            bad = count
    return good


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
_PROC, _CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


class _Array:
    """An array of some size, made of a given array's members, that is trained on one batch."""

    def __init__(self, step: Run, state: TrainState, batch: Tree, size: int):
        count, dims = num_models(state), getattr(step, "batch_dims", 0)
        check_batch(dims, batch, count)
        members = torch.arange(size, device=state.keys.device) % count
        self._run, self._state, self._batch = step, take(state, members), take_batch(dims, batch, members)

    def step(self) -> None:
        self._state, _ = self._run(self._state, self._batch)


def _attempt(step: Run, state: TrainState, batch: Tree, size: int, work: Callable[[_Array], T]) -> T | None:
    """What ``work`` makes of an array of some size, or None if the device ran out of memory; then the array is gone."""
    array = None
    try:
        array = _Array(step, state, batch, size)
        return work(array)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The traceback holds on to tensors.
        error.__traceback__ = None
        return None
    finally:
        array = None
        _release(state.keys.device)


def _times(work: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Seconds of each run of about so many in all, after runs that are not counted."""
    times = []
    begin = start = now(device)
    while len(times) < _WARMUP + _STEPS or start - begin < seconds:
        work()
        end = now(device)
        times.append(end - start)
        start = end
    return times[_WARMUP:]


def _line(sizes: Sequence[int], values: Sequence[float], at: int) -> float:
    """On the line through the two measurements around ``at``, or through the last two; in proportion to a single one."""
    if len(sizes) == 1:
        return values[0] * at / sizes[0]
    place = next((i for i, size in enumerate(sizes[1:-1]) if at <= size), len(sizes) - 2)
    (x0, x1), (y0, y1) = sizes[place : place + 2], values[place : place + 2]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _free(device: torch.device) -> int:
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


def _peak(work: Callable[[], object], device: torch.device) -> int:
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


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
