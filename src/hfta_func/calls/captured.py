"""Arguments that hold tensors: containers, modules, methods, closures.

A function that runs later, such as a backward pass, must find in them the tensors of its call, and those of its member.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hfta_func._torch import pytree

_HOLDERS = (nn.Module, types.MethodType, types.FunctionType, functools.partial)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that an argument is or holds, each once."""
    reached: dict[int, Any] = {}
    left = [value]
    while left:
        value = left.pop()
        if id(value) not in reached:
            reached[id(value)] = value
            left.extend(_contents(value))
    return [value for value in reached.values() if isinstance(value, Tensor)]


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        # A function that refers to itself has an empty cell while it is made.
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    return ()


def with_tensors(value: Any, tensors: Mapping[int, Any]) -> Any:
    """An argument with other tensors, by the identity of those that it holds; modules and functions in it are copied."""
    memo = dict(tensors)
    return pytree.tree_map(lambda leaf: _copied(leaf, memo), value)


def _copied(leaf: Any, memo: dict[int, Any]) -> Any:
    if id(leaf) in memo:
        return memo[id(leaf)]
    if not isinstance(leaf, _HOLDERS) or not tensors_in(leaf):
        return leaf
    if not isinstance(leaf, types.FunctionType):
        return copy.deepcopy(leaf, memo)
    cells = tuple(types.CellType() for _ in leaf.__closure__ or ())
    memo[id(leaf)] = types.FunctionType(leaf.__code__, leaf.__globals__, leaf.__name__, leaf.__defaults__, cells)
    memo[id(leaf)].__kwdefaults__ = leaf.__kwdefaults__
    for cell, before in zip(cells, leaf.__closure__ or (), strict=True):
        if before != types.CellType():
            cell.cell_contents = pytree.tree_map(lambda inner: _copied(inner, memo), before.cell_contents)
    return memo[id(leaf)]
