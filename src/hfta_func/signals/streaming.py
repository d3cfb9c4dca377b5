"""Signals longer than memory, in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from hfta_func.errors import BatchError
from hfta_func.signals.signal import Signal


def stream(
    function: Callable[..., Signal],
    chunks: Iterable[Signal | tuple[Signal, ...]],
    *,
    block: float,
    context: float = 0.0,
) -> Iterator[Signal]:
    """What a function makes of a signal that arrives in chunks, block by block: together the same as of the whole.

    At most the chunk, a block and the context on both sides are in memory.

    Args:
        function: Of a :class:`Signal`, or of several, to a signal; such as a few functions of this module in a row.
        chunks: Signals of any lengths, one after another; tuples of them for several, which start together.
        block: Seconds of a result; a multiple of all windows in ``function``, and of whole samples at all rates.
        context: Seconds to either side that results depend on: half of a filter, the longest gap to fill and one sample;
            of functions in a row it is the sum.

    Raises:
        BatchError: if a chunk does not begin where the one before it ends, or a block is no whole number of samples.

    Example:
        >>> from hfta_func.signals import chop, normalise
        >>> whole = Signal(torch.randn(100), rate=10)
        >>> parts = stream(lambda part: normalise(part, 2.0), chop(whole, 0.7), block=2.0)
        >>> torch.equal(torch.cat([part.values for part in parts], 1), normalise(whole, 2.0).values)
        True
    """
    if not (0 < block < math.inf and 0 <= context < math.inf):
        raise BatchError(
            f"block is {block} and context {context} s; give a positive block, and a context of at least 0"
        )
    around = math.ceil(context / block - 1e-9)
    held: list[Signal] = []
    origin, done = 0.0, 0

    def results(has_ended: bool) -> Iterator[Signal]:
        """The results of all blocks whose context is there."""
        nonlocal done
        reached, is_last = min(part.end for part in held) - origin, False
        while not is_last and (has_ended or (done + 1 + around) * block < reached - 1e-6):
            is_last = has_ended and (done + 1) * block >= reached - 1e-6
            begin, end = origin + done * block, math.inf if is_last else origin + (done + 1) * block
            result = function(*(part.between(begin - around * block, end + around * block) for part in held))
            result.whole(block, "block")
            yield result.between(begin, end)
            done += 1
        if not is_last:
            held[:] = [part.between(origin + (done - around) * block, math.inf) for part in held]

    for chunk in chunks:
        given = chunk if isinstance(chunk, tuple) else (chunk,)
        kinds, before = ([(one.rate, len(one.values)) for one in parts] for parts in (given, held))
        if held and kinds != before:
            raise BatchError(f"chunks have rates and channels {before} and then {kinds}; give all the same")
        origin = origin if held else given[0].start
        for signal, expected in zip(given, [part.end for part in held] or [origin] * len(given), strict=True):
            signal.whole(block, "block")
            if abs(signal.start - expected) * signal.rate > 1e-3:
                raise BatchError(
                    f"a chunk begins at {signal.start:.9g} s, but {expected:.9g} s was expected; give chunks in order, "
                    f"and gaps as samples that are not valid"
                )
        held = [_behind(*pair) for pair in zip(held, given, strict=True)] if held else [*given]
        yield from results(False)
    if not held:
        raise BatchError("there is no chunk; give at least one")
    yield from results(True)


def _behind(signal: Signal, chunk: Signal) -> Signal:
    """A signal with a chunk behind it."""
    gaps = torch.cat([signal.gaps, chunk.gaps + len(signal)])
    return signal.made(torch.cat([signal.values, chunk.values], 1), gaps)
