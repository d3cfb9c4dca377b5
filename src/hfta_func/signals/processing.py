"""Functions from signals to signals."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfta_func.errors import BatchError
from hfta_func.signals.signal import Signal, for_each, numbers


def _blocks(leaf: Tensor, size: int) -> list[Tensor]:
    """Views of a leaf ``[C, T]``: ``[C, T // size, size]`` and, if samples are left, ``[C, 1, T % size]``."""
    rest = leaf.shape[-1] % size
    whole, behind = leaf.split([leaf.shape[-1] - rest, rest], -1)
    return [whole.unflatten(-1, (-1 if len(whole.T) else 0, size)), *([behind.unsqueeze(-2)] if rest else [])]


def _sums(leaf: Tensor, size: int) -> Tensor:
    """The sum of each block, ``[C, T] -> [C, ceil(T / size)]``."""
    # Sums of a few numbers are slow, products are not.
    parts = (part @ part.new_ones(part.shape[-1]) if size <= 16 else part.sum(-1) for part in _blocks(leaf, size))
    return torch.cat([*parts], -1)


def _counts(signal: Signal, size: int) -> Tensor:
    """The number of samples in each block, in the signal's precision."""
    counts = signal.values.new_full((-(-len(signal) // size),), size)
    counts[-1] -= -len(signal) % size
    blocks, missing = torch.unique_consecutive(signal.gaps // size, return_counts=True)
    counts[blocks] -= missing
    return counts


@for_each
def resample(signal: Any, rate: float) -> Any:
    """A signal at another rate that starts at the same time.

    At a lower rate a sample is the mean of the samples in its period, or a gap if there is none. At a higher rate samples lie
    on lines between their neighbours, and are gaps where one of these is missing.

    Args:
        signal: A :class:`Signal`, or a list of them.
        rate: Samples per second.

    Raises:
        BatchError: if the rate is not positive and finite.

    Example:
        >>> resample(Signal([1.0, 3.0, 5.0, 7.0], rate=2), 1).values
        tensor([[2., 6.]])
    """
    if not (math.isfinite(rate) and rate > 0):
        raise BatchError(f"rate is {rate}; give a positive number of samples per second")
    ratio = signal.rate / rate
    count = math.floor((len(signal) - 1) / ratio + 1e-6) + 1
    if ratio < 1:
        at = torch.arange(count, dtype=torch.float64, device=signal.values.device) * ratio
        low = (at + 1e-6).long()
        high = torch.where(at - low > 1e-6, low + 1, low).clamp(max=len(signal) - 1)
        values = torch.lerp(signal.values[:, low], signal.values[:, high], (at - low).to(signal.values.dtype))
        missing = signal.values.new_zeros(len(signal), dtype=torch.bool).index_fill_(0, signal.gaps, True)
        gaps = numbers(missing[low] | missing[high])
        return signal.made(values.index_fill_(1, gaps, 0), gaps, rate=rate)
    whole = round(ratio)
    if abs(ratio - whole) < 1e-9 * ratio:
        if whole == 1:
            return signal
        sums, counts = _sums(signal.values, whole), _counts(signal, whole)
        gaps = torch.unique_consecutive(signal.gaps // whole)
        gaps = gaps[counts[gaps] == 0]
    else:
        # Sample i is in period floor(i / ratio).
        edges = (torch.arange(count + 1, dtype=torch.float64, device=signal.values.device) * ratio - 1e-6).ceil().long()
        edges = edges.clamp(max=len(signal))
        totals = nn.functional.pad(signal.values.cumsum(-1, dtype=torch.float64), (1, 0))
        sums = totals[:, edges].diff().to(signal.values.dtype)
        counts = (edges - torch.searchsorted(signal.gaps, edges)).diff()
        gaps = numbers(counts == 0)
    return signal.made(sums.div_(counts.clamp_(min=1)), gaps, rate=rate)


@for_each
def join(first: Any, *others: Any) -> Any:
    """Signals of any rates as channels of one, at the first one's times, over the time that all of them have.

    A sample of a signal holds until its next one. What is a gap in one of them is a gap in the result.

    Args:
        first: A :class:`Signal`, or a list with one a person.
        others: Further ones, or lists.

    Raises:
        BatchError: if signals have no time in common, or lists are of different lengths.

    Example:
        >>> join(Signal([1.0, 2.0, 3.0, 4.0], rate=2), Signal([5.0, 6.0], rate=1)).values
        tensor([[1., 2., 3., 4.],
                [5., 5., 6., 6.]])
    """
    begin, end = max(each.start for each in (first, *others)), min(each.end for each in (first, *others))
    low, high = first.place(begin), first.place(end)
    if low >= high:
        spans = ", ".join(f"{each.start:g} to {each.end:g} s" for each in (first, *others))
        raise BatchError(f"signals have no time in common: {spans}; give times by one clock")
    first = first.samples(low, high)
    values, gaps = zip((first.values, first.gaps), *(_held(other, first) for other in others), strict=True)
    missing = first.values.new_zeros(len(first), dtype=torch.bool).index_fill_(0, torch.cat(gaps), True)
    gaps = numbers(missing)
    return first.made(torch.cat(values).index_fill_(1, gaps, 0), gaps)


def _held(signal: Signal, at: Signal) -> tuple[Tensor, Tensor]:
    """The latest samples of a signal at the times of another, which lie inside of it, and which of them are missing."""
    ratio, offset = at.rate / signal.rate, (at.start - signal.start) * at.rate
    whole, skipped = round(ratio), round(offset)
    if whole and abs(ratio - whole) < 1e-9 and abs(offset - skipped) < 1e-3:
        values = signal.values[..., None].expand(-1, -1, whole).flatten(1)[:, skipped : skipped + len(at)]
        gaps = (signal.gaps[:, None] * whole + torch.arange(whole, device=values.device)).flatten() - skipped
        return values, gaps[(gaps >= 0) & (gaps < len(at))]
    latest = ((at.times - signal.start) * signal.rate + 1e-3).long().clamp(max=len(signal) - 1)
    return signal.values[:, latest], numbers(torch.isin(latest, signal.gaps))


@for_each
def fill(
    signal: Any, value: float | Literal["mean"] = "mean", *, within: float | None = None, window: float | None = None
) -> Any:
    """A signal whose gaps are filled.

    Args:
        signal: A :class:`Signal`, or a list of them.
        value: What each channel gets: a number, or ``"mean"`` for the mean of its samples.
        within: Seconds; longer gaps stay. None fills all.
        window: Seconds of the windows, one after another from the start, whose means are used; a window without samples
            stays a gap. None uses the mean of the whole signal.

    Raises:
        BatchError: if all is gaps, or the window is no whole number of samples.

    Example:
        >>> fill(Signal([1.0, float("nan"), 3.0], rate=1)).values
        tensor([[1., 2., 3.]])
    """
    if not (value == "mean" or (isinstance(value, int | float) and math.isfinite(value))):
        raise BatchError(f"value is {value!r}; give a number, or 'mean'")
    gaps = signal.gaps
    if not len(gaps):
        return signal
    if value == "mean" and window is None and len(gaps) == len(signal):
        raise BatchError(f"all of {signal!r} is gaps, which have no mean; leave it out, or fill by a number")
    filled, values = torch.ones_like(gaps, dtype=torch.bool), signal.values.clone()
    if within is not None:
        # Of each gap the number of its samples.
        lengths = torch.unique_consecutive(gaps - torch.arange(len(gaps), device=gaps.device), return_counts=True)[1]
        filled &= (lengths <= within * signal.rate + 1e-6).repeat_interleave(lengths)
    if value == "mean":
        size = len(signal) if window is None else signal.whole(window, "window")
        counts, block = _counts(signal, size), gaps // size
        if not bool(counts.all()):
            filled &= counts[block] > 0
        at = numbers(filled)
        values[:, gaps[at]] = (_sums(signal.values, size) / counts).index_select(1, block[at])
    else:
        values[:, gaps[filled]] = value
    return signal.made(values, gaps[~filled])


@for_each
def normalise(signal: Any, window: float | None = None) -> Any:
    """A signal whose channels have mean 0 and standard deviation 1 in every window.

    Where a channel is constant in a window it becomes 0.

    Args:
        signal: A :class:`Signal`, or a list of them.
        window: Seconds of the windows, one after another from the start; None for one over all.

    Raises:
        BatchError: if the window is no whole number of samples.

    Example:
        >>> normalise(Signal([1.0, 3.0, 10.0, 30.0], rate=1), window=2).values
        tensor([[-1.,  1., -1.,  1.]])
    """
    size = len(signal) if window is None else signal.whole(window, "window")
    counts = _counts(signal, size).clamp(min=1)
    mean, values = _sums(signal.values, size) / counts, torch.empty_like(signal.values)
    parts = _blocks(values, size)
    numbers_of = [part.shape[-2] for part in parts]
    for part, blocks, of_each in zip(parts, _blocks(signal.values, size), mean.split(numbers_of, -1), strict=True):
        torch.sub(blocks, of_each[..., None], out=part)
    values.index_fill_(1, signal.gaps, 0)
    std = torch.cat([torch.linalg.vector_norm(part, dim=-1) for part in parts], -1) / counts.sqrt()
    # What rounding leaves of a constant is no deviation.
    flat = std <= 8 * torch.finfo(std.dtype).eps * mean.abs()
    for part, of_each in zip(parts, torch.where(flat, 0, 1 / std).split(numbers_of, -1), strict=True):
        part.mul_(of_each[..., None])
    return signal.made(values, signal.gaps)


@for_each
def bandpass(signal: Any, low: float, high: float, *, taps: int | None = None) -> Any:
    """A signal with the frequencies from ``low`` to ``high``, without delay.

    The filter is a finite one, of a windowed sinc (Hamming). Samples within half its length of a gap or an end become gaps;
    of a signal that is shorter than the filter these are all.

    Args:
        signal: A :class:`Signal`, or a list of them.
        low: Hz; 0 lets low frequencies pass.
        high: Hz; half the rate lets high frequencies pass.
        taps: Length of the filter in samples, odd; by default 3.3 periods of ``low``, or of ``high`` if ``low`` is 0.

    Raises:
        BatchError: if frequencies or taps are out of range.

    Example:
        >>> times = torch.arange(1000) / 100
        >>> mixed = Signal((times * 2 * torch.pi * 10).sin() + 5, rate=100)
        >>> bandpass(mixed, 5, 20).between(3, 7).values.abs().max() < 1.1
        tensor(True)
    """
    nyquist = signal.rate / 2
    if not 0 <= low < high <= nyquist:
        raise BatchError(f"low is {low} and high {high} Hz; give 0 <= low < high <= {nyquist:g}, half of the rate")
    size = 2 * math.ceil(1.65 * signal.rate / (low or high)) + 1 if taps is None else taps
    half = size // 2
    if size < 3 or size % 2 == 0:
        raise BatchError(f"taps is {size}; give an odd number from 3")
    if size > len(signal):
        return signal.made(torch.zeros_like(signal.values), torch.arange(len(signal), device=signal.values.device))
    at = torch.arange(-(half), half + 1, dtype=torch.float64)
    hamming = torch.hamming_window(size, periodic=False, dtype=torch.float64)
    left, right = low / nyquist, high / nyquist
    filter = (right * torch.sinc(right * at) - left * torch.sinc(left * at)) * hamming
    # Of gain 1 in the middle of the band, or at its open end.
    centre = 0.0 if left == 0 else 1.0 if right == 1 else (left + right) / 2
    filter = (filter / (filter * (math.pi * centre * at).cos()).sum()).to(signal.values.device)
    padded = len(signal) + size - 1
    spectrum = torch.fft.rfft(signal.values.double(), padded) * torch.fft.rfft(filter, padded)
    values = torch.fft.irfft(spectrum, padded)[:, half : half + len(signal)]
    # A sample at less than half a filter from a gap or an end.
    missing = values.new_zeros(len(signal) + 1, dtype=torch.int64)
    begins, ends = (signal.gaps - half).clamp(min=0), (signal.gaps + half + 1).clamp(max=len(signal))
    missing.index_add_(0, begins, torch.ones_like(begins)).index_add_(0, ends, -torch.ones_like(ends))
    missing = missing.cumsum(0)[:-1]
    missing[:half] = missing[len(signal) - half :] = 1
    gaps = numbers(missing > 0)
    return signal.made(values.to(signal.values.dtype).index_fill_(1, gaps, 0), gaps)


@for_each
def chop(signal: Any, period: float) -> Any:
    """A signal as pieces of ``period`` seconds, without copies; the last piece may be shorter.

    Raises:
        BatchError: if the period is no whole number of samples.

    Example:
        >>> [len(piece) for piece in chop(Signal(torch.ones(5), rate=1), 2)]
        [2, 2, 1]
    """
    size = signal.whole(period, "period")
    return [signal.samples(low, min(low + size, len(signal))) for low in range(0, len(signal), size)]
