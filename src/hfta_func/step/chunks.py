"""Runs the members of an array in groups, of a given size or of the one that is fastest."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._torch import inside_transform
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.body import user_code_location
from hfta_func.calls.control_flow import Diverged
from hfta_func.errors import LoopWarning, TraceError
from hfta_func.step.batch import take_batch

_ROUNDS = 3

Run = Callable[[Any, Tree], Any]
"""``run(members, batch) -> results``, trees whose leaves are ``[M, ...]`` for any M; ``members`` begins with the keys."""


class Chunks:
    """``chunks(run, members, batch)`` is ``run(members, batch)``, computed in groups of ``size`` members.

    A size of None is all of them; ``"auto"`` times 1, 2, 4, ... and all, once for every shape of batch, and keeps the best.
    """

    def __init__(self, size: int | Literal["auto"] | None, batch_dims: Tree):
        self.size = size
        self.batch_dims = batch_dims
        self._alone = False
        self.sizes: dict[Any, int] = {}
        """What ``"auto"`` has found for each shape of batch."""

    def __call__(self, run: Run, members: tuple[Any, ...], batch: Tree, adds: bool = False, size: Any = None) -> Any:
        """The results of all members; with ``adds`` their first part has no model axis and is added up over the groups."""
        count = members[0].shape[0]
        size = size or (count if self.size is None else self.size)
        if isinstance(size, str):
            size = self._fastest(run, members, batch, count, adds)
        return self._grouped(run, members, batch, count, adds, size)

    def _grouped(self, run: Run, members: tuple[Any, ...], batch: Tree, count: int, adds: bool, size: int) -> Any:
        if size >= count:
            return self._together(run, members, batch, adds)
        return self._apart(run, members, batch, adds, [*range(0, count, size), count])

    def _together(self, run: Run, members: tuple[Any, ...], batch: Tree, adds: bool) -> Any:
        """The results of members that run as one, in smaller groups if they branch differently, or each alone."""
        count = members[0].shape[0]
        if self._alone and count > 1:
            return self._apart(run, members, batch, adds, [*range(count + 1)])
        try:
            return run(members, batch)
        except Diverged as error:
            where, sides, cause = user_code_location(error), error.sides, error.__cause__
            if count == 1 and sides is None and cause is not None:
                raise cause from None
            if count == 1:
                raise TraceError(
                    f"{where} branches on the value of a tensor below a vmap of the model's own, as vmap refuses alone; "
                    f"compute with tensors instead (torch.where, masks)"
                ) from error
        if sides is None:
            # For good: each step would fail first.
            self._alone = True
            turns, why = [*range(1, count)], f"members run one after another, because they cannot run as one: {cause}"
        else:
            turns = [i for i in range(1, count) if sides[i] != sides[i - 1]]
            why = (
                f"{where.rstrip(',')} branches on the value of a tensor, and members with different values run in groups; "
                f"compute with tensors instead (torch.where, masks)"
            )
        silence = "silence this with warnings.filterwarnings('ignore', category=hfta_func.errors.LoopWarning)"
        warnings.warn(f"{why}, or {silence}", LoopWarning, stacklevel=2)
        return self._apart(run, members, batch, adds, [0, *turns, count])

    def _apart(self, run: Run, members: tuple[Any, ...], batch: Tree, adds: bool, bounds: list[int]) -> Any:
        pieces, total = [], None
        for start, stop in itertools.pairwise(bounds):
            part = tree_map(lambda leaf, start=start, stop=stop: leaf[start:stop], members)
            piece = self._together(run, part, take_batch(self.batch_dims, batch, slice(start, stop)), adds)
            if adds:
                # At once, or there would be one for each group at a time.
                added, *piece = piece
                total = added if total is None else tree_map(torch.add, total, added)
            pieces.append(piece)
            del piece
        joined = tree_map(lambda *parts: torch.cat(parts), *pieces)
        return (total, *joined) if adds else joined

    def _fastest(self, run: Run, members: tuple[Any, ...], batch: Tree, count: int, adds: bool) -> int:
        device = members[0].device
        # Where nothing can be timed: while a compiler traces, inside transforms, and on XLA, which executes later.
        if torch.compiler.is_compiling() or inside_transform() or device.type == "xla":
            return count
        tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))
        key = (count, device, *((leaf.shape, leaf.dtype) for leaf in tensors))
        if key not in self.sizes:
            grouped = functools.partial(self._grouped, run, members, batch, count, adds)
            self.sizes[key] = fastest(grouped, count, device)
        return self.sizes[key]


def fastest(run: Callable[[int], object], count: int, device: torch.device) -> int:
    """The number of members per group, of 1, 2, 4, ... and all ``count``, whose ``run(size)`` takes the least time."""
    sizes = [1 << power for power in range(count.bit_length()) if 1 << power < count] + [count]
    best = dict.fromkeys(sizes, float("inf"))
    # Sizes take turns, so that a disturbance does not fall on one of them alone; the first round warms up.
    for turn in range(_ROUNDS + 1):
        for size in sizes:
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
