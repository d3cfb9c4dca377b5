"""Functions from signals to signals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfta_func._types import BatchError
from hfta_func.signals.signal import Signal, for_each, naming, zeroed


def _blocks(leaf: Tensor, size: int) -> Tensor:
    """``[..., T] -> [..., ceil(T / size), size]``, with zeros behind the last sample; a view if no zero is needed."""
    padding = -leaf.shape[-1] % size
    return (nn.functional.pad(leaf, (0, padding)) if padding else leaf).unflatten(-1, (-1, size))


def _sums(leaf: Tensor, size: int) -> Tensor:
    """The sum of each block, ``[..., T] -> [..., ceil(T / size)]``."""
    blocks = _blocks(leaf, size)
    # Sums of a few numbers are slow, products are not.
    return blocks @ blocks.new_ones(size) if size <= 64 else blocks.sum(-1)


def _counts(signal: Signal, size: int) -> Tensor:
    """The number of samples in each block, in the signal's precision."""
    if signal.valid is not None:
        known = signal.valid.to(signal.values.dtype) if size <= 64 else signal.valid
        return _sums(known, size).to(signal.values.dtype)
    counts = signal.values.new_full((-(-len(signal) // size),), size)
    counts[-1] -= -len(signal) % size
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
    if ratio < 1:
        count = math.floor((len(signal) - 1) / ratio + 1e-6) + 1
        at = torch.arange(count, dtype=torch.float64, device=signal.values.device) * ratio
        low = (at + 1e-6).long()
        high = torch.where(at - low > 1e-6, low + 1, low).clamp(max=len(signal) - 1)
        values = torch.lerp(signal.values[:, low], signal.values[:, high], (at - low).to(signal.values.dtype))
        valid = None if signal.valid is None else signal.valid[low] & signal.valid[high]
        return signal.made(zeroed(values, valid), valid, rate=rate)
    whole = round(ratio)
    if abs(ratio - whole) < 1e-9 * ratio:
        sums, counts = _sums(signal.values, whole), _counts(signal, whole)
    else:
        # Sample i is in period floor(i / ratio).
        count = math.floor((len(signal) - 1) / ratio + 1e-6) + 1
        edges = (torch.arange(count + 1, dtype=torch.float64, device=signal.values.device) * ratio - 1e-6).ceil().long()
        edges = edges.clamp(max=len(signal))
        totals = nn.functional.pad(signal.values.cumsum(-1, dtype=torch.float64), (1, 0))
        sums = totals[:, edges].diff().to(signal.values.dtype)
        known = edges if signal.valid is None else nn.functional.pad(signal.valid.cumsum(0), (1, 0))[edges]
        counts = known.diff()
    return signal.made(sums / counts.clamp(min=1), counts > 0, rate=rate)


def join(*signals: Any) -> Any:
    """Signals of any rates as channels of one, at the first one's times, over the time that all of them have.

    A sample of a signal holds until its next one. What is a gap in one of them is a gap in the result.

    Args:
        signals: Several :class:`Signal`, or lists with one a person each.

    Raises:
        BatchError: if signals have no time in common, or lists are of different lengths.

    Example:
        >>> join(Signal([1.0, 2.0, 3.0, 4.0], rate=2), Signal([5.0, 6.0], rate=1)).values
        tensor([[1., 2., 3., 4.],
                [5., 5., 6., 6.]])
    """
    if not signals:
        raise BatchError("there is no signal to join; pass at least one")
    if not isinstance(signals[0], Signal):
        if len({len(persons) if isinstance(persons, Sequence) else -1 for persons in signals}) > 1:
            raise BatchError("lists of signals to join must have one signal a person each")
        joined = []
        for person, each in enumerate(zip(*signals, strict=True)):
            with naming(person):
                joined.append(_joined(*each))
        return joined
    return _joined(*signals)


def _joined(first: Signal, *others: Signal) -> Signal:
    begin, end = max(each.start for each in (first, *others)), min(each.end for each in (first, *others))
    low, high = first.place(begin), first.place(end)
    if low >= high:
        spans = ", ".join(f"{each.start:g} to {each.end:g} s" for each in (first, *others))
        raise BatchError(f"signals have no time in common: {spans}; give times by one clock")
    first = first.samples(low, high)
    parts = [(first.values, first.valid), *(_held(other, first) for other in others)]
    masks = [valid for _, valid in parts if valid is not None]
    valid = torch.stack(masks).all(0) if masks else None
    values = torch.cat([values for values, _ in parts])
    return first.made(zeroed(values, valid), valid)


def _held(signal: Signal, at: Signal) -> tuple[Tensor, Tensor | None]:
    """The latest samples of a signal at the times of another, which lie inside of it."""
    ratio, offset = at.rate / signal.rate, (at.start - signal.start) * at.rate
    whole, skipped = round(ratio), round(offset)
    tensors = signal.values if signal.valid is None else torch.cat([signal.values, signal.valid[None]])
    if whole and abs(ratio - whole) < 1e-9 and abs(offset - skipped) < 1e-3:
        held = tensors[..., None].expand(-1, -1, whole).flatten(1)[:, skipped : skipped + len(at)]
    else:
        held = tensors[:, ((at.times - signal.start) * signal.rate + 1e-3).long().clamp(max=len(signal) - 1)]
    return (held, None) if signal.valid is None else (held[:-1], held[-1].bool())


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
    if not (value == "mean" or isinstance(value, int | float)):
        raise BatchError(f"value is {value!r}; give a number, or 'mean'")
    if signal.valid is None:
        return signal
    if value == "mean" and not bool(signal.valid.any()):
        raise BatchError(f"all of {signal!r} is gaps, which have no mean; leave it out, or fill by a number")
    missing = ~signal.valid
    if within is not None:
        # Stretches of gaps and of samples by turns.
        edges = (missing[1:] != missing[:-1]).nonzero().flatten() + 1
        edges = nn.functional.pad(nn.functional.pad(edges, (1, 0)), (0, 1), value=len(signal))
        begins, ends = edges[:-1], edges[1:]
        for begin, end in torch.stack([begins, ends], 1)[ends - begins > within * signal.rate + 1e-6].tolist():
            missing[begin:end] = False
    at, values = missing.nonzero().flatten(), signal.values.clone()
    if value == "mean":
        size = len(signal) if window is None else signal.whole(window, "window")
        counts = _counts(signal, size)
        at = at[counts[at // size] > 0]
        values[:, at] = (_sums(signal.values, size) / counts)[:, at // size]
    else:
        values[:, at] = value
    return signal.made(values, signal.valid.index_fill(0, at, True))


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
    blocks, counts = _blocks(signal.values, size), _counts(signal, size)
    std, mean = torch.std_mean(blocks, -1, correction=0)
    gapped = (counts < size).nonzero().flatten()
    if len(gapped):
        known = signal.valid if signal.valid is not None else signal.values.new_ones(len(signal), dtype=torch.bool)
        count, some = counts[gapped].clamp(min=1), blocks[:, gapped]
        mean[:, gapped] = some.sum(-1) / count
        centred = (some - mean[:, gapped, None]) * _blocks(known, size)[gapped]
        std[:, gapped] = (centred.square().sum(-1) / count).sqrt()
    # What rounding leaves of a constant is no deviation.
    flat = std <= 8 * torch.finfo(std.dtype).eps * mean.abs()
    scale = torch.where(flat, 0, 1 / std)[..., None]
    values = torch.sub(blocks, mean[..., None]).mul_(scale).flatten(1)[:, : len(signal)]
    return signal.made(zeroed(values, signal.valid), signal.valid)


@for_each
def bandpass(signal: Any, low: float, high: float, *, taps: int | None = None) -> Any:
    """A signal with the frequencies from ``low`` to ``high``, without delay.

    The filter is a finite one, of a windowed sinc (Hamming). Samples within half its length of a gap or an end become gaps.

    Args:
        signal: A :class:`Signal`, or a list of them.
        low: Hz; 0 lets low frequencies pass.
        high: Hz; half the rate lets high frequencies pass.
        taps: Length of the filter in samples, odd; by default 3.3 periods of ``low``, or of ``high`` if ``low`` is 0.

    Raises:
        BatchError: if frequencies or taps are out of range, or the signal is shorter than the filter.

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
    if size < 3 or size % 2 == 0 or size > len(signal):
        raise BatchError(
            f"taps is {size} for {len(signal)} samples; give an odd number, from 3 to as many as there are"
        )
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
    known = torch.ones(len(signal), device=values.device) if signal.valid is None else signal.valid.float()
    reach = nn.functional.pad(known.double().cumsum(0), (1, 0))
    valid = torch.zeros(len(signal), dtype=torch.bool, device=values.device)
    valid[half : len(signal) - half] = reach[size:] - reach[:-size] == size
    return signal.made(zeroed(values.to(signal.values.dtype), valid), valid)


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
