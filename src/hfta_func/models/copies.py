"""Copies of modules whose functions refer to the copy, where ``copy.deepcopy`` leaves them with the original.

A hook ``lambda module, args, output: self.outputs.append(output)`` or an attribute ``lambda x: self.layer(x)`` holds the
model that it was made for. In a copy it would go on to read and fill that one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import types
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor, nn

from hfta_func._torch import Places, outside_transforms
from hfta_func._types import StackError
from hfta_func.calls.body import Reference
from hfta_func.calls.captured import contents

T = TypeVar("T", bound=nn.Module)
_TENSORS = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
_UNCOPIED = torch.sparse_csr, torch.jagged


def copied_module(model: T, memo: dict[int, Any]) -> T:
    """``copy.deepcopy(model, memo)``, in which functions refer to the copies of what they refer to in the model."""
    held: Any = [vars(module) for module in model.modules()]
    for tensor in optree.tree_leaves(held):
        # PyTorch copies neither compressed sparse tensors nor results of earlier calls, and jagged ones not for gradients.
        if isinstance(tensor, Tensor) and (tensor.layout in _UNCOPIED or tensor.grad_fn is not None):
            memo.setdefault(id(tensor), tensor.detach())
    given = dict(memo)
    # Under vmap, a tensor that requires grad cannot be made.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else outside_transforms():
        try:
            made = copy.deepcopy(model, memo)
        except TypeError:
            # What Python cannot copy, such as a lock or an open file, is used as it is.
            parts = (part for part in optree.tree_leaves(held) if not isinstance(part, Tensor | nn.Module))
            memo.clear()
            memo |= given | {id(part): part for part in parts if not _is_copied(part)}
            made = copy.deepcopy(model, memo)
    seen: dict[int, Any] = {}
    for module in made.modules():
        names = vars(module)
        for name, value in names.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                names[name] = _referring(value, memo, seen)
    return made


def aliases(model: nn.Module, places: Places) -> list[tuple[Any, Any, Any]]:
    """Where plain attributes hold parameters or buffers of the model, too, as in ``self.penalised = [self.fc.weight]``.

    Each is a list, a dict, an object or a cell of a function, a key or name there, and a :class:`Reference` or a tuple
    with some.

    Raises:
        StackError: if a container holds one that cannot hold another.
    """
    tensors = {id(held[name]): Reference(held, name) for held, name in places.values() if held[name] is not None}
    entries: list[tuple[Any, Any, Any]] = []
    seen: dict[int, Any] = {}

    def visit(value: Any, holder: Any, key: Any) -> None:
        # A tuple is replaced in what holds it.
        if holder is not None and (source := _source(value, tensors)) is not value:
            entries.append((holder, key, source))
        if id(value) in seen or isinstance(value, Tensor | nn.Module | type | types.ModuleType):
            return
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                for content in contents(cell):
                    visit(content, cell, "")
        elif isinstance(value, dict | list | tuple | collections.deque):
            for part, content in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
                visit(content, None if isinstance(value, tuple) else value, part)
        elif isinstance(value, set | frozenset | functools.partial):
            fixed = value.args if isinstance(value, functools.partial) else tuple(value)
            if _source(fixed, tensors) is not fixed:
                raise StackError(
                    f"the model holds a parameter or a buffer in a {type(value).__name__}, where members cannot have their "
                    f"own; hold it in a list or a dict"
                )
            visit(getattr(value, "keywords", None), value, "keywords")
        elif hasattr(value, "__dict__"):
            for name, content in [*vars(value).items()]:
                visit(content, value, name)

    for module in model.modules():
        for name in vars(module).keys() - _TENSORS:
            visit(vars(module)[name], module, name)
    return entries


def _source(value: Any, tensors: dict[int, Reference]) -> Any:
    """A reference for a tensor, a tuple with references for one that holds such tensors, or the value itself."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, tuple):
        parts = [_source(part, tensors) for part in value]
        if any(map(operator.is_not, parts, value)):
            return getattr(value, "_make", tuple)(parts)
    return value


def _is_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except TypeError:
        return False
    return True


def _referring(value: Any, memo: dict[int, Any], seen: dict[int, Any]) -> Any:
    """A setting of a copied module, whose functions refer to what ``memo`` has copied; ``seen`` holds what was made."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, types.FunctionType) and _refers(value, memo, set()):
        return _function(value, memo, seen)
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    # Containers have been copied already.
    if isinstance(value, dict | list):
        seen[id(value)] = value
        for key, part in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            value[key] = _referring(part, memo, seen)
    return value


def _refers(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Whether a function, or one that it closes over, refers to what ``memo`` has copied."""
    if id(value) in memo or (isinstance(value, types.MethodType) and id(value.__self__) in memo):
        return True
    if not isinstance(value, types.FunctionType) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_refers(content, memo, seen) for cell in value.__closure__ or () for content in contents(cell))


def _function(func: types.FunctionType, memo: dict[int, Any], seen: dict[int, Any]) -> types.FunctionType:
    # Functions that share a variable go on to share it.
    cells = tuple(
        seen.setdefault(id(cell), types.CellType()) if any(_refers(x, memo, set()) for x in contents(cell)) else cell
        for cell in func.__closure__ or ()
    )
    made = types.FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, cells)
    made.__kwdefaults__, made.__dict__ = func.__kwdefaults__, func.__dict__
    seen[id(func)] = made
    for cell, old in zip(cells, func.__closure__ or (), strict=True):
        if cell is not old:
            (content,) = contents(old)
            cell.cell_contents = memo[id(content)] if id(content) in memo else _referring(content, memo, seen)
    return made
