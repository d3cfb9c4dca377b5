"""How many models fit, and how many pay.

Public: :func:`plan`, :class:`Plan`, :func:`max_models`.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hfta_func._batch import check_batch, take_batch
from hfta_func._chunks import now
from hfta_func._errors import StateError
from hfta_func._tree import leaves, num_models, take
from hfta_func._types import Tree
from hfta_func.train import TrainState

Run = Callable[[TrainState, Tree], tuple[TrainState, Any]]

_WARMUP = 2
# Rounds go on until they have taken some seconds in all, as far as these bounds let them: short steps vary more.
_LEAST, _MOST, _SECONDS = 5, 30, 2.0
# A larger chunk, which needs more memory, has to be faster by more than this.
_WORTH = 0.02


class Plan(NamedTuple):
    """What a step takes for arrays of M models; printed, a table.

    Args:
        sizes: The numbers of models that were measured.
        seconds: Time of a step of each.
        peaks: Bytes that each step takes at most, beside the state and the batch.
        held: Bytes of one model's state.
        free: Bytes there are for states and steps.
        limit: Most models asked for.
        num_models: The largest number that fits, ``limit`` at most; 0 if not even one does.
        chunk_size: How many of them to run together, for ``make_train_step``; None is all.
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
        sizes: What to measure, ascending; two at least.
        free: Bytes there are; by default what the device has free now.

    Raises:
        ValueError: if there are fewer than two sizes, or they are not ascending and positive.
        StateError: if the tensors are on a device whose memory cannot be read.

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
    arrays = {size: _Array(step, state, batch, size) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    begin = now(device)
    for turn in range(_WARMUP + _MOST):
        if turn >= _WARMUP + _LEAST and now(device) - begin > _SECONDS:
            break
        # In turns, so that a disturbance does not fall on one size alone.
        for size, array in arrays.items():
            start = now(device)
            array.step()
            if turn >= _WARMUP:
                times[size].append(now(device) - start)
    seconds = tuple(statistics.median(values) for values in times.values())
    peaks = tuple(_peak(array.step, device) for array in arrays.values())
    found = Plan(sizes, seconds, peaks, held, free, limit, 0, None)
    fitting = [count for count in range(1, limit + 1) if found.memory(count) <= free]
    count = max(fitting, default=0)
    smaller = [size for size in sizes if size < count]
    best = min(smaller, key=lambda size: found.time(size) / size, default=count)
    chunked = best < count and found.time(best) / best < (1 - _WORTH) * found.time(count) / count
    return found._replace(num_models=count, chunk_size=best if chunked else None)


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

    def fits(count: int) -> bool:
        expected = max((count * held + peak * count / size for size, peak in peaks.items()), default=0.0)
        if device.type == "cpu" and expected > free:
            return False
        try:
            array = _Array(step, state, batch, count)
            array.step()
            peaks[count] = _peak(array.step, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The traceback holds on to tensors.
            error.__traceback__ = None
            return False
        finally:
            array = None
            _release(device)
        return count * held + peaks[count] <= free

    good, bad = 0, limit + 1
    while bad - good > 1:
        count = min(max(1, 2 * good), limit) if bad > limit and good < limit else (good + bad) // 2
        if fits(count):
            good = count
        else:
            bad = count
    return good


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, in the words of CUDA, the CPU's allocator or XLA."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


_MEMINFO = pathlib.Path("/proc/meminfo")
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")


class _Array:
    """An array of some size, made of a given array's members, that is trained on one batch."""

    def __init__(self, step: Run, state: TrainState, batch: Tree, size: int):
        count, dims = num_models(state), getattr(step, "batch_dims", 0)
        check_batch(dims, batch, count)
        members = torch.arange(size, device=state.keys.device) % count
        self._run, self._state, self._batch = step, take(state, members), take_batch(dims, batch, members)

    def step(self) -> None:
        self._state, _ = self._run(self._state, self._batch)


def _line(sizes: Sequence[int], values: Sequence[float], at: int) -> float:
    """On the line through the two measurements around ``at``, or through the last two."""
    place = next((i for i, size in enumerate(sizes[1:-1]) if at <= size), len(sizes) - 2)
    (x0, x1), (y0, y1) = sizes[place : place + 2], values[place : place + 2]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch holds on to is free for tensors.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and _MEMINFO.exists():
        (line,) = (line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
        return 1024 * int(line.split()[1])
    raise StateError(f"the free memory of {device} cannot be read; pass free=, a number of bytes")


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
