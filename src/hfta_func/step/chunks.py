"""Runs the members of an array in groups, of a given size or of the one that is fastest."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._torch import inside_transform
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.body import Diverged, user_code_location
from hfta_func.errors import LoopWarning, TraceError
from hfta_func.step.batch import take_batch

_ROUNDS = 3


class Chunks:
    """``chunks(run, members, batch, dims)`` is ``run(members, batch)``, computed in groups of ``size`` members.

    A size of None is all of them; ``"auto"`` times 1, 2, 4, ... and all, once for every shape of batch, and keeps the best.
    """

    def __init__(self, size: int | Literal["auto"] | None):
        self.size, self._alone = size, False
        self.sizes: dict[Any, int] = {}
        """What ``"auto"`` has found for each shape of batch."""

    def __call__(self, run: Any, members: Tree, batch: Tree, dims: Tree, adds: bool = False, size: Any = None) -> Any:
        """The results of all members, which begin with their keys; with ``adds`` the first of them are sums over members."""
        count, device = members[0].shape[0], members[0].device

        def part(start: int, stop: int) -> Any:
            if stop - start == count:
                return run(members, batch)
            return run(tree_map(lambda leaf: leaf[start:stop], members), take_batch(dims, batch, slice(start, stop)))

        def grouped(size: int) -> Any:
            return self._apart(part, [*range(0, count, size), count], adds)

        given: Any = size or self.size or count
        # Where nothing can be timed: while a compiler traces, inside transforms, and on XLA, which executes later.
        if given == "auto" and (torch.compiler.is_compiling() or inside_transform() or device.type == "xla"):
            given = count
        if given == "auto":
            key = (count, device, *((leaf.shape, leaf.dtype) for leaf in leaves(batch) if isinstance(leaf, Tensor)))
            if key not in self.sizes:
                self.sizes[key] = fastest(grouped, count, device)
            given = self.sizes[key]
        return grouped(given)

    def _together(self, part: Any, start: int, stop: int, adds: bool) -> Any:
        """The results of members that run as one, in smaller groups if they branch differently, or each alone."""
        if self._alone and stop - start > 1:
            return self._apart(part, [*range(start, stop + 1)], adds)
        try:
            return part(start, stop)
        except Diverged as error:
            where, sides, cause = user_code_location(error), error.sides, error.__cause__
            if stop - start == 1:
                why = f"{where} branches on the value of a tensor below a vmap of the model's own"
                nested = TraceError(f"{why}; use torch.where, masks")
                raise (nested if sides is not None or cause is None else cause) from None
        if sides is None:
            # For good: each step would fail first.
            self._alone = True
            turns: Sequence[int] = range(start + 1, stop)
            why = f"members run one after another, because they cannot run as one: {cause}"
        else:
            turns = [start + i for i in range(1, stop - start) if sides[i] != sides[i - 1]]
            cure = "members with different values run in groups; compute with tensors instead (torch.where, masks)"
            why = f"{where.rstrip(',')} branches on the value of a tensor, and {cure}"
        silence = "silence this with warnings.filterwarnings('ignore', category=hfta_func.errors.LoopWarning)"
        warnings.warn(f"{why}, or {silence}", LoopWarning, stacklevel=2)
        return self._apart(part, [start, *turns, stop], adds)

    def _apart(self, part: Any, bounds: list[int], adds: bool) -> Any:
        if len(bounds) == 2:
            return self._together(part, bounds[0], bounds[1], adds)
        pieces, total = [], None
        for start, stop in itertools.pairwise(bounds):
            piece = self._together(part, start, stop, adds)
            if adds:
                # At once, or there would be one for each group at a time.
                added, *piece = piece
                total = added if total is None else tree_map(torch.add, total, added)
            pieces.append(piece)
            del piece
        joined = tree_map(lambda *parts: torch.cat(parts), *pieces)
        return (total, *joined) if adds else joined


def fastest(run: Callable[[int], object], count: int, device: torch.device) -> int:
    """The number of members per group, of 1, 2, 4, ... and all ``count``, whose ``run(size)`` takes the least time."""
    sizes = [1 << power for power in range(count.bit_length()) if 1 << power < count] + [count]
    best = dict.fromkeys(sizes, float("inf"))
    # Sizes take turns, so that a disturbance does not fall on one of them alone; the first round warms up.
    for turn, size in itertools.product(range(_ROUNDS + 1), sizes):
        start = now(device)
        run(size)
        elapsed = now(device) - start
        if turn:
            best[size] = min(best[size], elapsed)
    return min(sizes, key=best.__getitem__)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
