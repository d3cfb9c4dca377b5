"""Copies of modules whose functions refer to the copy, where ``copy.deepcopy`` leaves them with the original.

A hook ``lambda module, args, output: self.outputs.append(output)`` or an attribute ``lambda x: self.layer(x)`` holds the
model that it was made for. In a copy it would go on to read and fill that one.
"""

from __future__ import annotations

import copy
import types
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor, nn

from hfta_func.calls.captured import contents

T = TypeVar("T", bound=nn.Module)
_UNCOPIED = torch.sparse_csr, torch.jagged


def copied_module(model: T, memo: dict[int, Any]) -> T:
    """``copy.deepcopy(model, memo)``, in which functions refer to the copies of what they refer to in the model."""
    held: Any = [vars(module) for module in model.modules()]
    for tensor in optree.tree_leaves(held):
        # PyTorch copies neither compressed sparse tensors nor results of earlier calls, and jagged ones not for gradients.
        if isinstance(tensor, Tensor) and (tensor.layout in _UNCOPIED or tensor.grad_fn is not None):
            memo.setdefault(id(tensor), tensor.detach())
    made = copy.deepcopy(model, memo)
    seen: dict[int, Any] = {}
    for module in made.modules():
        names = vars(module)
        for name, value in names.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                names[name] = _referring(value, memo, seen)
    return made


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
