"""Windows of signals, as rows for the members of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func.errors import BatchError
from hfta_func.signals.signal import Signal, as_tensor, naming


class Windows(NamedTuple):
    """Windows of all persons.

    ``ArrayLoader((windows.values, windows.labels), 32, seeds=seeds, rows=windows.rows)`` trains one member per person.

    Args:
        values: ``[n, C, L]``, a strided view of all samples. Windows with a gap, or without a label, are in no row.
        labels: ``[n]``, or None.
        rows: For each person the numbers of its windows.
        times: When each window begins, ``[n]`` seconds.
    """

    values: Tensor
    labels: Tensor | None
    rows: list[Tensor]
    times: Tensor


def windows(
    signals: Signal | Sequence[Signal], length: float, hop: float, events: Any | Sequence[Any] | None = None
) -> Windows:
    """All windows without gaps, of one person or of several with signals of any lengths.

    Args:
        signals: A :class:`Signal`, or a list with one a person, of one rate and as many channels.
        length: Seconds of a window.
        hop: Seconds from the begin of a window to that of the next.
        events: ``(times, labels)``, or a list of them with one a person: a label holds from its time until the next one's. A
            window has the label that holds in all of it; windows without one are left out.

    Raises:
        BatchError: if a person has no window, rates or channels differ, durations are no whole numbers of samples, or events
            do not ascend or are outside of the signal.

    Example:
        >>> signals = [Signal(torch.arange(6.0), rate=1), Signal(torch.arange(10.0), rate=1)]
        >>> found = windows(signals, length=4, hop=2, events=[([0], [5]), ([0, 4], [6, 7])])
        >>> found.rows, found.labels[found.rows[1]]
        ([tensor([0, 1]), tensor([3, 5, 6])], tensor([6, 7, 7]))
        >>> found.values[found.rows[1], 0]
        tensor([[0., 1., 2., 3.],
                [4., 5., 6., 7.],
                [6., 7., 8., 9.]])
    """
    persons, events = ([signals], [events]) if isinstance(signals, Signal) else ([*signals], events)
    events = [None] * len(persons) if events is None else [*events]
    first = persons[0]
    for person, signal in enumerate(persons):
        if (signal.rate, len(signal.values)) != (first.rate, len(first.values)):
            one, other = (f"{len(each.values)} channels at {each.rate:g} Hz" for each in (signal, first))
            raise BatchError(f"person {person} has {one} but person 0 has {other}; resample and choose channels first")
    size, step = first.whole(length, "length"), first.whole(hop, "hop")
    # Every person begins on the grid of hops.
    zeros = first.values.new_zeros(len(first.values), max(size, step))
    parts = [part for each in persons for part in (each.values, zeros[:, : -len(each) % step])]
    joined = torch.cat([*parts, zeros[:, : max(0, size - sum(part.shape[1] for part in parts))]], 1)
    values = joined.unfold(1, size, step).transpose(0, 1)
    times, rows, labels, low = values.new_zeros(len(values), dtype=torch.float64), [], [], 0
    for person, (signal, given) in enumerate(zip(persons, events, strict=True)):
        with naming(person if len(persons) > 1 else None):
            begins = _without_gaps(signal, size, step)
            if given is not None:
                begins, named = _labelled(signal, given, begins, size)
                labels.append(named)
        slots = -(-len(signal) // step)
        part = times[low : low + slots]
        part += signal.start + torch.arange(len(part), device=part.device) * (step / signal.rate)
        rows.append(low + begins // step)
        low += slots
    if not labels:
        return Windows(values, None, rows, times)
    named = torch.cat(labels)
    by_window = named.new_zeros(len(values), *named.shape[1:]).index_put((torch.cat(rows),), named)
    return Windows(values, by_window, rows, times)


def _without_gaps(signal: Signal, size: int, step: int) -> Tensor:
    """The first samples of windows without gaps."""
    begins = torch.arange(0, max(0, len(signal) - size + 1), step, device=signal.values.device)
    begins = begins[torch.searchsorted(signal.gaps, begins) == torch.searchsorted(signal.gaps, begins + size)]
    if not len(begins):
        text = f"{signal!r} has no whole window of {size / signal.rate:g} s without a gap"
        raise BatchError(f"{text}; leave the person out, fill gaps, or cut shorter windows")
    return begins


def _labelled(signal: Signal, events: Any, begins: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of windows that begin at these samples, those with one label, and their labels."""
    at = as_tensor(events[0], "times of events", dtype=torch.float64, device=begins.device)
    labels = as_tensor(events[1], "labels of events", device=begins.device)
    if at.dim() != 1 or not len(at) or labels.dim() == 0 or len(labels) != len(at):
        raise BatchError(f"events have times {[*at.shape]} and labels {[*labels.shape]}; give one label per time")
    if not bool((at.diff() > 0).all()):
        raise BatchError("times of events must ascend; sort them, and give one label per time")
    outside = ~((at >= signal.start - 1e-3 / signal.rate) & (at < signal.end))
    if bool(outside.any()):
        event = int(outside.nonzero()[0])
        why = f"event {event} is at {at[event]:g} s, outside of {signal!r}"
        raise BatchError(f"{why}; give seconds by the signal's own clock")
    # An event between two samples concerns the later one.
    first = ((at - signal.start) * signal.rate - 1e-3).ceil().long()
    holding, ending = (torch.searchsorted(first, sample, right=True) - 1 for sample in (begins, begins + size - 1))
    same = (holding >= 0) & (holding == ending)
    if not bool(same.any()):
        raise BatchError(f"no window of {signal!r} has one label throughout; cut shorter windows, or give more labels")
    return begins[same], labels[holding[same]]
