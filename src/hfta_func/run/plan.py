"""How many models fit on a device, and how many to run together."""

from __future__ import annotations

import inspect
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from hfta_func._tree import leaves, num_models, take, without_shared
from hfta_func._types import Tree, text_table
from hfta_func.run.memory import free_bytes, is_out_of_memory, peak_bytes, release
from hfta_func.step.batch import check_batch, plain, take_batch
from hfta_func.step.chunks import now
from hfta_func.step.state import TrainState

T = TypeVar("T")
Run = Callable[[TrainState, Tree], tuple[TrainState, Any]]

_WARMUP, _STEPS = 2, 3
# All sizes are measured in every round, so that a disturbance does not hit only one of them. The most and fewest rounds, and
# the seconds that all rounds together should take.
_MOST, _LEAST, _SECONDS = 8, 2, 2.0
# Where the number of steps to come is known, measuring takes about this share of their time.
_SHARE = 0.005
# A larger chunk, which needs more memory, must be faster by this fraction.
_WORTH = 0.02


class Plan(NamedTuple):
    """Time and memory of a step for arrays of M models; printing it shows a table.

    Args:
        sizes: The numbers of models that were measured: the requested ones that fit.
        seconds: Time of a step for each size; a time above that of a larger size was disturbed and is replaced by it.
        peaks: Peak bytes of a step for each size, besides the state and the batch.
        held: Bytes of one model's state, without what members share.
        shared: Bytes of what members share and train, and of its optimizer's state, which an array has once.
        free: Bytes available for states and steps.
        limit: The largest number of models considered.
        num_models: The largest number of models that fits, at most ``limit``; 0 if none fits.
        chunk_size: The recommended ``chunk_size`` of ``make_train_step``; None runs all models together.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    peaks: tuple[int, ...]
    held: int
    shared: int
    free: int
    limit: int
    num_models: int
    chunk_size: int | None

    def time(self, num_models: int) -> float:
        """Seconds of a step of M models: measured, or interpolated linearly from the two nearest measurements."""
        return _line(self.sizes, self.seconds, num_models)

    def memory(self, num_models: int) -> float:
        """Bytes of M models' state plus the peak of a step; without a shared base, which is in memory already."""
        return self.shared + num_models * self.held + _line(self.sizes, self.peaks, num_models)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("models", "ms", "ms per model", "MiB", "")]
        for size in sorted({*self.sizes, self.num_models} - {0}):
            numbers = 1e3 * self.time(size), 1e3 * self.time(size) / size
            how = "" if size in self.sizes else "predicted"
            rows.append((str(size), *(f"{ms:.3f}" for ms in numbers), f"{self.memory(size) / 2**20:.1f}", how))
        chunk = "" if self.chunk_size is None else f" in chunks of {self.chunk_size}"
        return f"{text_table(rows, '>>>><')}\n{self.num_models} of {self.limit} models fit{chunk}"


def plan(
    step: Run,
    state: TrainState,
    batch: Tree,
    *,
    limit: int = 64,
    sizes: Sequence[int] = (1, 2, 4, 8),
    free: int | None = None,
    steps: int | None = None,
) -> Plan:
    """Measure a step at a few M, predict its time and memory at others, and recommend M and a chunk size.

    Args:
        step: A training step without chunks, compiled or not; a compiled step compiles once per size.
        state: A state of any number of models, whose members are repeated as needed; it is not written.
        batch: A batch for this state.
        limit: The largest number of models to consider.
        sizes: At least two numbers of models to measure, ascending. Those that run out of memory are left out; on a CPU,
            where the system would kill the process, those predicted to run out are not tried.
        free: Bytes available; by default those free on the device now.
        steps: Number of steps of ``limit`` models to come, of whose time measuring takes half a percent: where they are few,
            not all sizes are measured. By default it takes about two seconds.

    Returns:
        The measurements and the recommendation; if only one size fits, predictions are proportional to it.

    Raises:
        ValueError: if there are fewer than two sizes, they are not ascending and positive, or ``limit`` is less than 1.
        StateError: if the free memory of the device cannot be read.
        MemoryError: if the smallest size does not fit.
        Exception: any other error of the step.

    Example:
        >>> factory = lambda: torch.nn.Linear(4, 1)
        >>> step = make_train_step(factory(), lambda model, batch: model(batch).square().mean(), sgd(lr=0.1))
        >>> state = step.init(*init_params(factory, seeds=[0]), seeds=[0])
        >>> result = plan(step, state, torch.randn(1, 8, 4), limit=100, sizes=[1, 4])
        >>> result.num_models, result.time(50) > 0
        (100, True)
    """
    if len(sizes) < 2 or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)) or limit < 1:
        cure = "pass at least two numbers of models, ascending from 1 or more, and at least 1 model"
        raise ValueError(f"sizes are {list(sizes)} and limit is {limit}; {cure}")
    arrays = _Arrays(step, state, batch, free)
    times, failed = dict[int, list[float]](), max(limit, *sizes) + 1
    for turn in range(_MOST):
        # Each array is freed before the next one is made.
        for size in sizes:
            spent, budget = sum(map(sum, times.values())), _SECONDS
            if steps is not None and times:
                medians = [statistics.median(times[known]) for known in sorted(times)]
                budget = min(budget, _SHARE * steps * _line(sorted(times), medians, limit))
            # Few steps to come are not worth every size.
            is_due = turn >= _LEAST and size == sizes[0] if steps is None else bool(times)
            if size >= failed or (is_due and spent > budget):
                break
            measured = arrays.attempt(size, lambda step: _times(step, arrays.device))
            if measured is None:
                failed = size
            else:
                times.setdefault(size, []).extend(measured)
    fits = tuple(size for size in arrays.peaks if size < failed)
    if not fits:
        cure = "pass smaller sizes or batches, or make the step with save='less' or checkpoint=True"
        raise MemoryError(f"a step ran out of memory with M = {sizes[0]}, the smallest of sizes; {cure}")
    # Fewer models never take longer; a disturbed time would make extrapolated times negative.
    seconds = [*itertools.accumulate((statistics.median(times[size]) for size in reversed(fits)), min)]
    peaks = tuple(arrays.peaks[size] for size in fits)
    result = Plan(fits, (*reversed(seconds),), peaks, arrays.held, arrays.shared, arrays.free, limit, 0, None)
    count = max((count for count in range(1, min(limit + 1, failed)) if result.memory(count) <= result.free), default=0)
    smaller = [size for size in fits if size < count]
    best = min(smaller, key=lambda size: result.time(size) / size, default=count)
    chunked = best < count and result.time(best) / best < (1 - _WORTH) * result.time(count) / count
    return result._replace(num_models=count, chunk_size=best if chunked or count == 1 < limit else None)


def max_models(step: Run, state: TrainState, batch: Tree, *, limit: int = 1024, free: int | None = None) -> int:
    """Find the largest number of models whose step does not run out of memory, by doubling and bisection.

    On a GPU steps run until one fails. On a CPU, where the system would kill the process, a size is tried only if the
    measurements of smaller ones predict that it fits.

    Args:
        step: A training step.
        state: A state of any number of models, whose members are repeated as needed; it is not written.
        batch: A batch for this state.
        limit: The largest number to try.
        free: Bytes available for states and steps; by default those free on the device now.

    Returns:
        At most ``limit``; 0 if not even one model fits.

    Raises:
        StateError: if the free memory of the device cannot be read.
        Exception: any error of a step except running out of memory.
    """
    arrays = _Arrays(step, state, batch, free)
    good, bad = 0, limit + 1
    while bad - good > 1:
        count = min(max(1, 2 * good), limit) if bad > limit and good < limit else (good + bad) // 2
        # The peak of the second step is noted.
        fits = arrays.attempt(count, lambda step: (step(),)) is not None and arrays.memory(count) <= arrays.free
        good, bad = (count, bad) if fits else (good, count)
    return good


class _Arrays:
    """Arrays of any size, of members taken repeatedly from a given array, that train on one batch."""

    def __init__(self, step: Run, state: TrainState, batch: Tree, free: int | None):
        self.step, self._state, self._batch = step, state, batch
        self._dims, count = getattr(inspect.unwrap(step), "batch_dims", 0), num_models(state)
        check_batch(self._dims, plain(batch), count)
        self.device = state.keys.device
        self.free = free_bytes(self.device) if free is None else free
        members, whole = (sum(leaf.nbytes for leaf in leaves(tree)) for tree in (without_shared(state), state))
        # Bytes of one member's state, and of what all members share.
        self.held, self.shared = members // count, whole - members
        self.peaks: dict[int, int] = {}

    def attempt(self, size: int, work: Callable[[Callable[[], None]], T]) -> T | None:
        """The result of ``work`` with the step of ``size`` members, whose peak is noted; None if they do not fit."""
        # A CPU's system would kill the process.
        if self.device.type == "cpu" and self.peaks and size not in self.peaks and self.memory(size) > self.free:
            return None
        held: list[Any] = []

        def step() -> None:
            held[0], _ = self.step(*held)

        try:
            members = torch.arange(size, device=self.device) % num_models(self._state)
            held += take(self._state, members), take_batch(self._dims, self._batch, members)
            result = work(step)
            if size not in self.peaks:
                # Of memory that is freed and that it has not seen allocated, a CPU's profiler would tell the terminal.
                before = [*held] if self.device.type == "cpu" else []
                self.peaks[size] = peak_bytes(step, self.device)
                before.clear()
            return result
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The traceback keeps tensors alive.
            error.__traceback__ = None
            return None
        finally:
            held.clear()
            release(self.device)

    def memory(self, size: int) -> float:
        """Bytes of the state and of a step of ``size`` members, predicted from the peaks of fewer if it is not measured."""
        sizes = sorted(self.peaks)
        # Of what members share a step makes one new state, however many there are.
        once = min(self.shared, *self.peaks.values())
        return self.shared + size * self.held + once + _line(sizes, [self.peaks[known] - once for known in sizes], size)


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of each of some calls, after some that are not counted."""
    times, start = [], now(device)
    for _ in range(_WARMUP + _STEPS):
        work()
        times.append(now(device) - start)
        start += times[-1]
    return times[_WARMUP:]


def _line(sizes: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear inter- or extrapolation from the two measurements nearest to ``at``; proportional to a single one."""
    if len(sizes) == 1:
        return values[0] * at / sizes[0]
    index = next((i for i, size in enumerate(sizes[1:-1]) if at <= size), len(sizes) - 2)
    (x0, x1), (y0, y1) = sizes[index : index + 2], values[index : index + 2]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
