"""Recorded calls of operators, and which of them a replay needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hfta_func._torch.levels import pytree

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
    """The calls without those whose results nobody needs, or are constants."""
    used, needed, fixed = set(outputs), [], {*constants}
    for call in reversed(calls):
        results = slots_in(call.result)
        if call.writes or (used.intersection(results) and not fixed.issuperset(results)):
            used.update(slots_in((call.args, call.kwargs)))
            needed.append(call)
    return needed[::-1]
