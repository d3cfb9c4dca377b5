"""Copies of modules whose functions refer to the copy, where ``copy.deepcopy`` leaves them with the original.

A hook ``lambda module, args, output: self.outputs.append(output)`` or an attribute ``lambda x: self.layer(x)`` holds the
model that it was made for. In a copy it would go on to read and fill that one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import threading
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hfta_func._torch import outside_transforms, pytree
from hfta_func.calls.body import contents

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
_UNCOPIED = torch.sparse_csr, torch.jagged
_lock = threading.RLock()


def copied_module(model: M, memo: dict[int, Any]) -> M:
    """``copy.deepcopy(model, memo)``, in which functions refer to the copies of what they refer to in the model."""
    held: Any = [vars(module) for module in model.modules()]
    reached = _reached(held, through_functions=False)
    # Modules have a dozen empty containers, of which Python would make a description first.
    empty = (each for each in reached.values() if type(each) in (collections.OrderedDict, set) and not each)
    memo |= {id(each): type(each)() for each in empty if id(each) not in memo}
    for tensor in reached.values():
        # PyTorch copies neither compressed sparse tensors nor results of earlier calls, and jagged ones not for gradients.
        if isinstance(tensor, Tensor) and (tensor.layout in _UNCOPIED or tensor.grad_fn is not None):
            memo.setdefault(id(tensor), tensor.detach())
    given = dict(memo)
    # Under vmap, a tensor that requires grad cannot be made.
    outside = contextlib.nullcontext() if torch.compiler.is_compiling() else outside_transforms()
    with outside, _copying_functions(reached):
        try:
            return copy.deepcopy(model, memo)
        except (TypeError, RuntimeError):
            # What Python cannot copy, such as a lock or an open file, is used as it is.
            parts = pytree.tree_leaves(held)
            uncopied = (part for part in parts if not isinstance(part, nn.Module) and not _is_copied(part))
            return copy.deepcopy(model, {id(part): part for part in uncopied} | given)


def copied_with_tensors(value: T) -> T:
    """What holds a module as a copy that goes on to hold the tensors that it holds now; anything else as it is."""
    held = {} if isinstance(value, Tensor) else _reached(value)
    if not any(isinstance(each, nn.Module) for each in held.values()):
        return value
    with _copying_functions(held):
        return copy.deepcopy(value, {at: each for at, each in held.items() if isinstance(each, Tensor)})


def mark(tensor: Tensor, like: Tensor) -> None:
    """Give a tensor the attributes of another one that are no tensors, such as ``weight.no_decay = True``."""
    vars(tensor).update((name, held) for name, held in vars(like).items() if not isinstance(held, Tensor | nn.Module))


@contextlib.contextmanager
def _copying_functions(of_model: dict[int, Any]) -> Iterator[None]:
    """A block in which ``copy.deepcopy`` also copies functions that reach something of a model."""
    table = vars(copy)["_deepcopy_dispatch"]

    def function(func: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        if of_model.keys().isdisjoint(_reached(func.__closure__ or ())):
            return func
        # Functions that share a variable go on to share it.
        cells = [memo.setdefault(id(cell), types.CellType()) for cell in func.__closure__ or ()]
        made = types.FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, tuple(cells))
        made.__kwdefaults__, made.__dict__, memo[id(func)] = func.__kwdefaults__, func.__dict__, made
        for cell, old in zip(cells, func.__closure__ or (), strict=True):
            for content in contents(old) if not contents(cell) else ():
                cell.cell_contents = copy.deepcopy(content, memo)
        return made

    with _lock:
        before = table[types.FunctionType]
        table[types.FunctionType] = function
        try:
            yield
        finally:
            table[types.FunctionType] = before


def _reached(value: Any, through_functions: bool = True) -> dict[int, Any]:
    """What an object holds, directly or not, by identity; only what may hold something itself."""
    reached: dict[int, Any] = {}
    rest = [value]
    while rest:
        each = rest.pop()
        if id(each) not in reached and gc.is_tracked(each) and not isinstance(each, type | types.ModuleType):
            reached[id(each)] = each
            if isinstance(each, types.FunctionType):
                rest += each.__closure__ or () if through_functions else ()
            elif not isinstance(each, Tensor):
                rest += gc.get_referents(each)
    return reached


def _is_copied(value: Any) -> bool:
    with contextlib.suppress(TypeError, RuntimeError):
        copy.deepcopy(value)
        return True
    return False
