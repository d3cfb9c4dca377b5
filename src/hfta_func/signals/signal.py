"""A signal: samples at a rate, with gaps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func.errors import BatchError
from hfta_func.step.allocator import keep_memory_once


class Signal:
    """Samples at equal distances in time, some of which may be missing.

    Args:
        values: Samples ``[T]``, or ``[C, T]`` for several channels. NaN in any channel is a gap in all of them.
        rate: Samples per second.
        start: Time of the first sample in seconds.
        valid: Booleans ``[T]``, False in gaps, where the signal holds zeros.

    Raises:
        BatchError: if shapes do not fit, there is no sample, or the rate is not positive and finite.

    Example:
        >>> signal = Signal([1.0, 2.0, float("nan"), 4.0], rate=2, start=10)
        >>> signal, signal.valid.tolist()
        (Signal(1 channel, 4 samples at 2 Hz, 10 to 12 s, 25.0 % missing), [True, True, False, True])
    """

    values: Tensor
    rate: float
    start: float
    gaps: Tensor
    """The numbers of all missing samples, ascending; work on gaps takes time by their number, not by that of samples."""

    def __init__(self, values: Any, rate: float, start: float = 0.0, valid: Any | None = None) -> None:
        # Each function makes signals as large as those that were freed before.
        keep_memory_once()
        values = as_tensor(values, "values").detach()
        values = values if values.is_floating_point() else values.float()
        values = values[None] if values.dim() == 1 else values
        valid = None if valid is None else as_tensor(valid, "valid", device=values.device)
        if values.dim() != 2 or not values.numel():
            raise BatchError(f"values is {[*values.shape]}; a signal needs samples [T], or [C, T] for several channels")
        if valid is not None and (valid.dtype != torch.bool or valid.shape != values.shape[1:]):
            raise BatchError(f"valid is {[*valid.shape]} of {valid.dtype}; give one boolean per sample")
        if not (math.isfinite(rate) and rate > 0 and math.isfinite(start)):
            raise BatchError(f"rate is {rate!r} and start {start!r}; give finite numbers, and a positive rate")
        # A sum is cheaper than a mask, and NaN wherever a sample is.
        if bool(values.sum().isnan()):
            known = ~values.isnan().any(0)
            valid = known if valid is None else valid & known
        gaps = torch.empty(0, dtype=torch.int64, device=values.device) if valid is None else numbers(~valid)
        self.values = values.index_fill(1, gaps, 0) if len(gaps) else values
        self.rate, self.start, self.gaps = rate, start, gaps

    def __len__(self) -> int:
        """Number of samples."""
        return self.values.shape[1]

    def __repr__(self) -> str:
        channels = f"{len(self.values)} channel{'s' * (len(self.values) > 1)}"
        missing = f", {100 * len(self.gaps) / len(self):.1f} % missing" if len(self.gaps) else ""
        return f"Signal({channels}, {len(self)} samples at {self.rate:g} Hz, {self.start:g} to {self.end:g} s{missing})"

    @property
    def valid(self) -> Tensor | None:
        """Booleans ``[T]``, False in gaps; None if there is no gap."""
        if not len(self.gaps):
            return None
        return self.gaps.new_ones(len(self), dtype=torch.bool).index_fill_(0, self.gaps, False)

    @property
    def end(self) -> float:
        """The time in seconds at which the last sample's period ends."""
        return self.start + len(self) / self.rate

    @property
    def times(self) -> Tensor:
        """The time of every sample in seconds, in double precision."""
        return self.start + torch.arange(len(self), dtype=torch.float64, device=self.values.device) / self.rate

    def between(self, begin: float, end: float) -> Signal:
        """The samples from ``begin`` until before ``end``, in seconds, without a copy.

        Raises:
            BatchError: if there is none.
        """
        low, high = self.place(begin), self.place(end)
        if low >= high:
            raise BatchError(f"there is no sample from {begin:g} until {end:g} s in {self!r}; choose times in it")
        return self.samples(low, high)

    def place(self, time: float) -> int:
        """The number of the first sample at a time or later; how many samples there are if there is none."""
        # Clocks that count from 1970 have no more digits.
        return math.ceil(min(max(0.0, (time - self.start) * self.rate - 1e-3), len(self)))

    def samples(self, low: int, high: int) -> Signal:
        """The samples ``low`` to ``high - 1``, without a copy."""
        first, last = torch.searchsorted(self.gaps, self.gaps.new_tensor([low, high])).tolist()
        return self.made(self.values[:, low:high], self.gaps[first:last] - low, start=self.start + low / self.rate)

    def made(self, values: Tensor, gaps: Tensor, *, rate: float | None = None, start: float | None = None) -> Signal:
        """A signal of samples ``[C, T]`` that hold zeros in gaps, by default with this one's rate and start."""
        made = object.__new__(Signal)
        made.values, made.gaps = values, gaps
        made.rate, made.start = self.rate if rate is None else rate, self.start if start is None else start
        return made

    def whole(self, seconds: float, name: str) -> int:
        """A duration in samples, at least one; a BatchError if it isn't a whole number of them."""
        count = round(seconds * self.rate) if math.isfinite(seconds) else 0
        if count < 1 or abs(count - seconds * self.rate) > 1e-6 * max(1, count):
            text = f"{name} is {seconds:g} s, which is {seconds * self.rate:g} samples at {self.rate:g} Hz"
            raise BatchError(f"{text}; give a whole number of samples, such as {max(1, count) / self.rate:g} s")
        return count


def from_timestamps(times: Any, values: Any, rate: float) -> Signal:
    """A signal from samples with times, such as rows of a table; where samples are missing it has gaps.

    Times may deviate from the rate's grid by less than half a period.

    Args:
        times: Seconds, ascending, ``[n]``.
        values: Samples ``[n]`` or ``[C, n]``.
        rate: Samples per second.

    Raises:
        BatchError: if times are not ascending, or say another rate.

    Example:
        >>> from_timestamps([0.0, 0.5, 1.0, 2.5], [1.0, 2.0, 3.0, 4.0], rate=2)
        Signal(1 channel, 6 samples at 2 Hz, 0 to 3 s, 33.3 % missing)
    """
    values = Signal(values, rate)
    times = as_tensor(times, "times", dtype=torch.float64, device=values.values.device)
    if times.shape != (len(values),):
        raise BatchError(f"times is {[*times.shape]} for {len(values)} samples; give one time per sample")
    steps = times.diff()
    skips = (steps > 1.5 / rate).nonzero().flatten() + 1 if bool((steps > 0.25 / rate).all()) else None
    if not math.isfinite(times[0].item() + times[-1].item()) or (skips is None and bool(times.isnan().any())):
        raise BatchError("times must be finite; leave out samples without a time")
    if skips is None:
        at = int(times.diff().argmin())
        first, second = times[at].item(), times[at + 1].item()
        said = "" if second <= first else f" say {1 / float(times.diff().median()):.6g} Hz, not {rate:g};"
        cure = "sort them, keep one sample of each time, and give the rate of the times"
        raise BatchError(f"samples {at} and {at + 1} are at {first:.9g} and {second:.9g} s;{said} {cure}")
    # Stretches without gaps are copied as wholes, wherever their first samples are.
    begins = torch.cat([skips.new_zeros(1), skips])
    lengths = torch.cat([skips, skips.new_tensor([len(times)])]) - begins
    at = ((times[begins] - times[0]) * rate).round().long()
    drift = ((times[begins + lengths - 1] - times[0]) * rate - (at + lengths - 1)).abs()
    missing = at[1:] - (at + lengths)[:-1]
    if len(skips) * 2 > len(times) - 1 or float(drift.max()) > 0.75 or bool((missing < 0).any()):
        said = f"times of samples say {1 / float(times.diff().median()):.6g} Hz, but rate is {rate:g}"
        raise BatchError(f"{said}; give the rate of the times, and resample afterwards")
    if not len(skips):
        return values.made(values.values, values.gaps, start=times[0].item())
    zeros = values.values.new_zeros(len(values.values), int(missing.max()))
    first, *stretches = values.values.split(lengths.tolist(), 1)
    pairs = zip((zeros[:, :size] for size in missing.tolist()), stretches, strict=True)
    between = torch.arange(int(missing.sum()), device=times.device) + skips.repeat_interleave(missing)
    if len(values.gaps):
        moved = values.gaps + (at - begins)[torch.searchsorted(skips, values.gaps, right=True)]
        between = torch.cat([between, moved]).sort().values
    return values.made(torch.cat([first, *itertools.chain.from_iterable(pairs)], 1), between, start=times[0].item())


def as_tensor(values: Any, name: str, **options: Any) -> Tensor:
    """What a user gives as a tensor of real numbers."""
    array = values.to_numpy() if hasattr(values, "to_numpy") else values
    # Those of pandas cannot be written, which PyTorch warns of.
    array = array if getattr(getattr(array, "flags", None), "writeable", True) else array.copy()
    if hasattr(values, "columns"):
        raise BatchError(f"{name} is a table, whose rows are times; give frame.to_numpy().T")
    return torch.as_tensor(array, **options)


def numbers(mask: Tensor) -> Tensor:
    """Where a mask ``[T]`` is true."""
    return mask.nonzero().flatten()


@contextlib.contextmanager
def naming(person: int | None) -> Iterator[None]:
    """Name the person in errors about a signal."""
    try:
        yield
    except BatchError as error:
        raise BatchError(f"{'' if person is None else f'person {person}: '}{error}") from None


def for_each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of one or several signals also take lists of them, one a person."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        if not lists:
            return function(*args, **kwargs)
        if len({*map(len, lists)}) > 1:
            raise BatchError("lists of signals must have one signal a person each")
        results = []
        for person in range(len(lists[0])):
            with naming(person):
                each = (arg[person] if isinstance(arg, list | tuple) else arg for arg in args)
                results.append(function(*each, **kwargs))
        return results

    return call
