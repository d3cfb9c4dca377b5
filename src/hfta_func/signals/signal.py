"""A signal: samples at a rate, with gaps."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import BatchError


@dataclass(frozen=True, eq=False, repr=False)
class Signal:
    """Samples at equal distances in time, some of which may be missing.

    Args:
        values: Samples ``[T]``, or ``[C, T]`` for several channels. NaN in any channel is a gap in all of them.
        rate: Samples per second.
        start: Time of the first sample in seconds.
        valid: Booleans ``[T]``, False in gaps, where the signal holds zeros. It becomes None if there is no gap.

    Raises:
        BatchError: if shapes do not fit, there is no sample, or the rate is not positive and finite.

    Example:
        >>> signal = Signal([1.0, 2.0, float("nan"), 4.0], rate=2, start=10)
        >>> signal, signal.valid.tolist()
        (Signal(1 channel, 4 samples at 2 Hz, 10 to 12 s, 25.0 % missing), [True, True, False, True])
    """

    values: Tensor
    rate: float
    start: float = 0.0
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        values = torch.as_tensor(self.values)
        values = values if values.is_floating_point() else values.float()
        values = values[None] if values.dim() == 1 else values
        valid = None if self.valid is None else torch.as_tensor(self.valid, device=values.device)
        if values.dim() != 2 or not values.numel():
            raise BatchError(f"values is {[*values.shape]}; a signal needs samples [T], or [C, T] for several channels")
        if valid is not None and (valid.dtype != torch.bool or valid.shape != values.shape[1:]):
            raise BatchError(
                f"valid is {[*valid.shape]} of {valid.dtype}; give [{values.shape[1]}] booleans, one per sample"
            )
        if not (math.isfinite(self.rate) and self.rate > 0 and math.isfinite(self.start)):
            raise BatchError(f"rate is {self.rate} and start {self.start}; give finite numbers, and a positive rate")
        # A sum is cheaper than a mask, and NaN wherever a sample is.
        if bool(values.sum().isnan()):
            known = ~values.isnan().any(0)
            valid = known if valid is None else valid & known
        if valid is not None:
            valid = without_gaps(valid)
        if valid is not None:
            values = values.masked_fill(~valid, 0)
        for name, value in {"values": values, "valid": valid}.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Number of samples."""
        return self.values.shape[1]

    def __repr__(self) -> str:
        channels = f"{len(self.values)} channel{'s' * (len(self.values) > 1)}"
        missing = (
            "" if self.valid is None else f", {1 - self.valid.float().mean().item():.1%} missing".replace("%", " %")
        )
        return f"Signal({channels}, {len(self)} samples at {self.rate:g} Hz, {self.start:g} to {self.end:g} s{missing})"

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
            raise BatchError(
                f"there is no sample from {begin:g} until {end:g} s in {self!r}; choose times inside of it"
            )
        return self.samples(low, high)

    def place(self, time: float) -> int:
        """The number of the first sample at a time or later; how many samples there are if there is none."""
        # Clocks that count from 1970 have no more digits.
        return math.ceil(min(max(0.0, (time - self.start) * self.rate - 1e-3), len(self)))

    def samples(self, low: int, high: int) -> Signal:
        """The samples ``low`` to ``high - 1``, without a copy."""
        valid = None if self.valid is None else self.valid[low:high]
        return self.made(self.values[:, low:high], valid, start=self.start + low / self.rate)

    def made(
        self, values: Tensor, valid: Tensor | None, *, rate: float | None = None, start: float | None = None
    ) -> Signal:
        """A signal of samples ``[C, T]`` that hold zeros in gaps, by default with this one's rate and start."""
        made = object.__new__(Signal)
        valid = None if valid is None else without_gaps(valid)
        fields = {"rate": self.rate if rate is None else rate, "start": self.start if start is None else start}
        for name, value in {"values": values, "valid": valid, **fields}.items():
            object.__setattr__(made, name, value)
        return made

    def whole(self, seconds: float, name: str) -> int:
        """A duration in samples, at least one; a BatchError if it isn't a whole number of them."""
        count = round(seconds * self.rate)
        if count < 1 or abs(count - seconds * self.rate) > 1e-6 * max(1, count):
            raise BatchError(
                f"{name} is {seconds:g} s, which is {seconds * self.rate:g} samples at {self.rate:g} Hz; give a whole number "
                f"of samples, at least one, such as {max(1, count) / self.rate:g} s"
            )
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
    times = torch.as_tensor(times, dtype=torch.float64, device=values.values.device)
    if times.shape != (len(values),):
        raise BatchError(f"times is {[*times.shape]} for {len(values)} samples; give one time per sample")
    if not bool(times.sum().isfinite()):
        raise BatchError("times must be finite; leave out samples without a time")
    steps = times.diff() * rate
    if len(steps) and not float(steps.min()) > 0.25:
        at = int(steps.argmin())
        first, second = times[at].item(), times[at + 1].item()
        cure = (
            "sort them" if second < first else "keep one sample of each time" if second == first else "give that rate"
        )
        said = "" if second <= first else f", which say {rate / float(steps.median()):.6g} Hz, not {rate:g}"
        raise BatchError(f"samples {at} and {at + 1} are at {first:.9g} and {second:.9g} s{said}; {cure}")
    # A stretch without gaps is copied as a whole, wherever its first sample is.
    breaks = (steps > 1.5).nonzero().flatten() + 1
    begins = torch.cat([breaks.new_zeros(1), breaks])
    ends = torch.cat([breaks, breaks.new_tensor([len(values)])])
    places = ((times[begins] - times[0]) * rate).round().long()
    drift = ((times[ends - 1] - times[0]) * rate - (places + ends - 1 - begins)).abs()
    if (
        len(breaks) * 2 > len(steps)
        or float(drift.max()) > 0.75
        or bool((places[1:] < (places + ends - begins)[:-1]).any())
    ):
        raise BatchError(
            f"times of samples say {rate / float(steps.median()):.6g} Hz, but rate is {rate:g}; give the "
            f"rate of the times, and resample afterwards"
        )
    if not len(breaks):
        return values.made(values.values, values.valid, start=times[0].item())
    size = int(places[-1] + ends[-1] - begins[-1])
    grid, valid = values.values.new_zeros(len(values.values), size), times.new_zeros(size, dtype=torch.bool)
    for begin, end, place in zip(begins.tolist(), ends.tolist(), places.tolist(), strict=True):
        grid[:, place : place + end - begin] = values.values[:, begin:end]
        valid[place : place + end - begin] = True if values.valid is None else values.valid[begin:end]
    return values.made(grid, valid, start=times[0].item())


def without_gaps(valid: Tensor) -> Tensor | None:
    """None if there is no gap."""
    # Many times as fast as `all`.
    return None if bool(valid.view(torch.uint8).min()) else valid


def zeroed(values: Tensor, valid: Tensor | None) -> Tensor:
    """Samples ``[C, T]``, into whose gaps zeros are written."""
    # Gaps are few, so that their places are written faster than a mask is read.
    return values if valid is None else values.index_fill_(1, (~valid).nonzero().flatten(), 0)


@contextlib.contextmanager
def naming(person: int | None) -> Iterator[None]:
    """Name the person in errors about a signal."""
    try:
        yield
    except BatchError as error:
        raise BatchError(f"{'' if person is None else f'person {person}: '}{error}") from None


def for_each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of a signal also take a list of them, one a person."""

    @functools.wraps(function)
    def call(signals: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(signals, Signal):
            return function(signals, *args, **kwargs)
        if not isinstance(signals, Sequence) or not all(isinstance(signal, Signal) for signal in signals):
            raise BatchError(f"expected a Signal, or a list of them, but got a {type(signals).__qualname__}")
        results = []
        for person, signal in enumerate(signals):
            with naming(person):
                results.append(function(signal, *args, **kwargs))
        return results

    return call
