"""Recorded calls of operators, and which of them a replay needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hfta_func._torch.levels import pytree

_aten = torch.ops.aten


class Slot(int):
    """The number of a tensor of a tape, where a recorded call has a tensor."""


class Call(NamedTuple):
    """A call of an operator."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # with a slot for every tensor
    writes: bool
    grad_mode: bool  # some kernels keep more for a backward pass if it is on


def slots_in(tree: Any) -> list[Slot]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Slot)]


def simplified(calls: Sequence[Call], outputs: Sequence[Slot], constants: Iterable[Slot]) -> list[Call]:
    """The calls without those whose results nobody needs, are constants, or are there already."""
    same: dict[Slot, Slot] = {}
    transposed: dict[Slot, Slot] = {}
    kept, fixed = [], {*constants}
    for call in calls:
        args, kwargs, result = pytree.tree_map(
            lambda leaf: same.get(leaf, leaf) if isinstance(leaf, Slot) else leaf, call[1:4]
        )
        if not call.writes and fixed.issuperset(slots_in(result)):
            continue
        if call.operator is _aten.detach.default and call.result not in outputs:
            same[call.result] = args[0]  # detach only tells autograd something
        elif call.operator is _aten.t.default and args[0] in transposed and call.result not in outputs:
            same[call.result] = transposed[args[0]]
        else:
            if call.operator is _aten.t.default:
                transposed[result] = args[0]
            kept.append(call._replace(args=args, kwargs=kwargs, result=result))
    # Those that write, or whose results are used.
    used, needed = set(outputs), []
    for call in reversed(kept):
        if call.writes or used.intersection(slots_in(call.result)):
            used.update(slots_in((call.args, call.kwargs)))
            needed.append(call)
    return needed[::-1]
