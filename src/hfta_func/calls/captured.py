"""Arguments that hold tensors: modules, functions and objects.

What is called later, as in a backward pass, must find the tensors of its call in them, and those of its member.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors that arguments are or hold."""
    return [leaf for leaf in _held(tree) if isinstance(leaf, Tensor)]


def with_tensors(tree: Any, tensors: dict[int, Any]) -> Any:
    """Arguments with other tensors, by the identity of those that they hold; what holds tensors is copied."""

    def copied(leaf: Any) -> Any:
        if id(leaf) in tensors:
            return tensors[id(leaf)]
        held = _held(leaf)
        if not any(id(part) in tensors for part in held):
            return leaf
        # copy.deepcopy does not copy functions.
        functions = [part for part in held if isinstance(part, types.FunctionType) and id(part) not in tensors]
        functions = [func for func in functions if any(id(part) in tensors for part in _held(func))]
        made = [
            types.FunctionType(func.__code__, func.__globals__, func.__name__, None, _cells(func)) for func in functions
        ]
        tensors.update((id(func), new) for func, new in zip(functions, made, strict=True))
        for func, new in zip(functions, made, strict=True):
            new.__defaults__, new.__kwdefaults__ = with_tensors((func.__defaults__, func.__kwdefaults__), tensors)
            for cell, old in zip(new.__closure__ or (), func.__closure__ or (), strict=True):
                for content in contents(old):
                    cell.cell_contents = with_tensors(content, tensors)
        return copy.deepcopy(leaf, tensors)

    return pytree.tree_map(copied, tree)


def contents(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds; nothing if it has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _held(tree: Any) -> list[Any]:
    """The leaves of arguments, and all that they hold."""
    held: dict[int, Any] = {}
    leaves = pytree.tree_leaves(tree)
    # The list grows meanwhile.
    for leaf in leaves:
        if id(leaf) not in held:
            held[id(leaf)] = leaf
            leaves += pytree.tree_leaves(_parts(leaf))
    return [*held.values()]


def _parts(leaf: Any) -> Any:
    if isinstance(leaf, Tensor | type | types.ModuleType):
        return ()
    if isinstance(leaf, nn.Module):
        attributes = (
            vars(module)[name] for module in leaf.modules() for name in vars(module).keys() - MODULE_ATTRIBUTES
        )
        return [*leaf.parameters(), *leaf.buffers(), *attributes]
    if isinstance(leaf, types.MethodType):
        return leaf.__self__
    if isinstance(leaf, functools.partial):
        return leaf.func, leaf.args, leaf.keywords
    if isinstance(leaf, types.FunctionType):
        return leaf.__defaults__, leaf.__kwdefaults__, [contents(cell) for cell in leaf.__closure__ or ()]
    return [*getattr(leaf, "__dict__", {}).values()]


def _cells(func: types.FunctionType) -> tuple[types.CellType, ...]:
    return tuple(types.CellType() for _ in func.__closure__ or ())
