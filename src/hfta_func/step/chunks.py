"""Runs the members of an array in groups, of a given size or of the one that is fastest."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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


class _Job(NamedTuple):
    """What members compute: ``run(members, batch) -> results``, trees of ``[M, ...]``; ``members`` begins with the keys."""

    run: Callable[[Any, Tree], Any]
    members: tuple[Any, ...]
    batch: Tree
    dims: Tree
    adds: bool

    def num_models(self) -> int:
        return self.members[0].shape[0]

    def part(self, start: int, stop: int) -> _Job:
        members = tree_map(lambda leaf: leaf[start:stop], self.members)
        return self._replace(members=members, batch=take_batch(self.dims, self.batch, slice(start, stop)))


class Chunks:
    """``chunks(run, members, batch, dims)`` is ``run(members, batch)``, computed in groups of ``size`` members.

    A size of None is all of them; ``"auto"`` times 1, 2, 4, ... and all, once for every shape of batch, and keeps the best.
    """

    def __init__(self, size: int | Literal["auto"] | None):
        self.size = size
        self._alone = False
        self.sizes: dict[Any, int] = {}
        """What ``"auto"`` has found for each shape of batch."""

    def __call__(
        self, run: Any, members: tuple[Any, ...], batch: Tree, dims: Tree, adds: bool = False, size: Any = None
    ) -> Any:
        """The results of all members; with ``adds`` their first part has no model axis and is added up over the groups."""
        job = _Job(run, members, batch, dims, adds)
        given: Any = size or self.size
        return self._grouped(job, self._fastest(job) if given == "auto" else given or job.num_models())

    def _grouped(self, job: _Job, size: int) -> Any:
        count = job.num_models()
        return self._together(job) if size >= count else self._apart(job, [*range(0, count, size), count])

    def _together(self, job: _Job) -> Any:
        """The results of members that run as one, in smaller groups if they branch differently, or each alone."""
        count = job.num_models()
        if self._alone and count > 1:
            return self._apart(job, [*range(count + 1)])
        try:
            return job.run(job.members, job.batch)
        except Diverged as error:
            where, sides, cause = user_code_location(error), error.sides, error.__cause__
            if count == 1:
                nested = (
                    f"{where} branches on the value of a tensor below a vmap of the model's own; use torch.where, masks"
                )
                raise (TraceError(nested) if sides is not None or cause is None else cause) from None
        if sides is None:
            # For good: each step would fail first.
            self._alone = True
            turns, why = [*range(1, count)], f"members run one after another, because they cannot run as one: {cause}"
        else:
            turns = [i for i in range(1, count) if sides[i] != sides[i - 1]]
            cure = "members with different values run in groups; compute with tensors instead (torch.where, masks)"
            why = f"{where.rstrip(',')} branches on the value of a tensor, and {cure}"
        silence = "silence this with warnings.filterwarnings('ignore', category=hfta_func.errors.LoopWarning)"
        warnings.warn(f"{why}, or {silence}", LoopWarning, stacklevel=2)
        return self._apart(job, [0, *turns, count])

    def _apart(self, job: _Job, bounds: list[int]) -> Any:
        pieces, total = [], None
        for start, stop in itertools.pairwise(bounds):
            piece = self._together(job.part(start, stop))
            if job.adds:
                # At once, or there would be one for each group at a time.
                added, *piece = piece
                total = added if total is None else tree_map(torch.add, total, added)
            pieces.append(piece)
            del piece
        joined = tree_map(lambda *parts: torch.cat(parts), *pieces)
        return (total, *joined) if job.adds else joined

    def _fastest(self, job: _Job) -> int:
        count, device = job.num_models(), job.members[0].device
        # Where nothing can be timed: while a compiler traces, inside transforms, and on XLA, which executes later.
        if torch.compiler.is_compiling() or inside_transform() or device.type == "xla":
            return count
        tensors = (leaf for leaf in leaves(job.batch) if isinstance(leaf, Tensor))
        key = (count, device, *((leaf.shape, leaf.dtype) for leaf in tensors))
        if key not in self.sizes:
            self.sizes[key] = fastest(functools.partial(self._grouped, job), count, device)
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
