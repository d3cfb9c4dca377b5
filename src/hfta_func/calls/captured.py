"""Arguments that hold tensors: modules, their methods, and closures.

What is called later, as in a backward pass, must find the tensors of its call in them, and those of its member.
"""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import Tensor, nn

from hfta_func._torch import pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors that arguments are or hold."""
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        owner = getattr(leaf, "__self__", leaf)
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(owner, nn.Module):
            tensors += [*owner.parameters(), *owner.buffers()]
        elif isinstance(leaf, types.FunctionType):
            tensors += tensors_in([cell.cell_contents for cell in leaf.__closure__ or ()])
    return tensors


def with_tensors(tree: Any, tensors: dict[int, Any]) -> Any:
    """Arguments with other tensors, by the identity of those that they hold; what holds tensors is copied."""

    def copied(leaf: Any) -> Any:
        if id(leaf) in tensors:
            return tensors[id(leaf)]
        if isinstance(getattr(leaf, "__self__", leaf), nn.Module):
            return copy.deepcopy(leaf, tensors)
        if not isinstance(leaf, types.FunctionType) or not leaf.__closure__:
            return leaf
        contents = with_tensors([cell.cell_contents for cell in leaf.__closure__], tensors)
        cells = tuple(types.CellType(value) for value in contents)
        return types.FunctionType(leaf.__code__, leaf.__globals__, leaf.__name__, leaf.__defaults__, cells)

    return pytree.tree_map(copied, tree)
