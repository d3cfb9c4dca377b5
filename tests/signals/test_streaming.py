"""Streams in blocks that are shorter than what functions look at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hfta_func import signals
from hfta_func.signals import Signal


def whole() -> Signal:
    """A noisy signal with gaps in it, and a longer one at its end."""
    values = torch.randn(2, 233, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gaps = torch.tensor([3, 4, 50, *range(90, 99), *range(200, 233)])
    return Signal(values.index_fill(1, gaps, torch.nan), 10)


@pytest.mark.parametrize(
    ("function", "block", "context"),
    [
        (lambda part: signals.bandpass(part, 1.0, 3.0, taps=21), 0.3, 1.0),
        (lambda part: signals.bandpass(part, 1.0, 3.0, taps=21), 1.0, 1.0),
        (lambda part: signals.fill(part, window=1.0), 1.0, 0.0),
    ],
)
def test_short_blocks_give_the_same_as_the_whole(
    function: Callable[[Signal], Signal], block: float, context: float
) -> None:
    expected = function(whole())
    parts = list(signals.stream(function, signals.chop(whole(), 0.7), block=block, context=context))
    torch.testing.assert_close(torch.cat([part.values for part in parts], 1), expected.values, rtol=1e-9, atol=1e-9)
    lows = [round(part.start * 10) for part in parts]
    assert torch.cat([part.gaps + low for part, low in zip(parts, lows, strict=True)]).equal(expected.gaps)


def test_a_signal_that_is_shorter_than_the_filter_is_all_gaps() -> None:
    assert len(signals.bandpass(whole().samples(0, 20), 1.0, 3.0, taps=21).gaps) == 20
