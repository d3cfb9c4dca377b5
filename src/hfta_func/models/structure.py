"""Compares models beyond their parameters: classes, modes, ties, and settings that a stacked tensor cannot hold.

A stacked array runs the *first* model's code for every member, so whatever that code reads besides parameters and
buffers must be equal in all of them.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hfta_func._errors import StackError
from hfta_func._torch import MODULE_ATTRIBUTES, own_tensors

# Tensors and children are compared on their own; hooks are code.
_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks"))


def check_same_structure(model: nn.Module, first: nn.Module, member: int) -> None:
    """Raise a StackError that names the first difference between ``model`` (the given member) and member 0."""
    mine, theirs = dict(model.named_modules()), dict(first.named_modules())
    for path in [*theirs, *(path for path in mine if path not in theirs)]:
        if path not in mine or path not in theirs:
            missing, holder = (member, 0) if path not in mine else (0, member)
            raise StackError(
                f"model {missing} has no module '{path}' but model {holder} has one; build all models with one factory"
            )
        _check_module(mine[path], theirs[path], path, member)
    if _ties(model) != _ties(first):
        raise StackError(
            f"model {member} ties {_ties(model)} but model 0 ties {_ties(first)}; models in one array must share "
            f"the same parameters between the same modules"
        )


def check_materialised(model: nn.Module, member: int) -> None:
    """Raise a StackError if a lazy module of the model has not seen its first input."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise StackError(
                f"model {member}: '{path}' is lazy and has no shape yet; run the model once on an example input first"
            )


def _check_module(mine: nn.Module, theirs: nn.Module, path: str, member: int) -> None:
    where = f"'{path}'" if path else "the model"
    if _kind(mine) != _kind(theirs):
        raise StackError(
            f"model {member}: {where} is a {type(mine).__qualname__} but in model 0 it is a "
            f"{type(theirs).__qualname__}; models in one array must be of one class"
        )
    if mine.training != theirs.training:
        mode, other = ("train", "eval") if mine.training else ("eval", "train")
        raise StackError(
            f"model {member}: {where} is in {mode} mode but in model 0 it is in {other} mode; call .train() or .eval() "
            f"on all of them"
        )
    for name in _HOOKS:
        if len(getattr(mine, name, ())) != len(getattr(theirs, name, ())):
            raise StackError(
                f"model {member}: {where} has {len(getattr(mine, name))} {name.strip('_')} but model 0 has "
                f"{len(getattr(theirs, name))}; register the same hooks on all models or on none"
            )
    own = {id(tensor) for module in (mine, theirs) for tensor in own_tensors(module).values()}
    for name in sorted({*vars(mine), *vars(theirs)} - MODULE_ATTRIBUTES):
        missing = object()
        a, b = vars(mine).get(name, missing), vars(theirs).get(name, missing)
        if a is missing or b is missing or not _equal(a, b, own, {}):
            shown = [("unset" if value is missing else _show(value)) for value in (a, b)]
            raise StackError(
                f"model {member}: '{f'{path}.{name}' if path else name}' is {shown[0]} but in model 0 it is {shown[1]}; "
                f"models in one array must share every setting (a tensor that differs belongs in a buffer, and a "
                f"module in an attribute of its own or in nn.ModuleList)"
            )


def _kind(module: nn.Module) -> Any:
    # Parametrized modules get a class of their own per instance; what counts is the class they were made from.
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def _ties(model: nn.Module) -> list[tuple[str, ...]]:
    paths: dict[int, list[str]] = {}
    for path, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        paths.setdefault(id(tensor), []).append(path)
    return [tuple(group) for group in paths.values() if len(group) > 1]


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of other values"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _equal(a: Any, b: Any, own: set[int], seen: dict[tuple[int, int], Any]) -> bool:
    """Equality of settings; objects without an equality of their own are equal if all their attributes are."""
    if a is b or (id(a), id(b)) in seen or (id(a) in own and id(b) in own):
        return True
    # Kept alive here, because a later object could otherwise get the same id.
    seen[id(a), id(b)] = (a, b)
    if type(a) is not type(b):
        return False
    same = functools.partial(_equal, own=own, seen=seen)
    if isinstance(a, Tensor):
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and a.device == b.device
            and (a.is_meta or bool(torch.equal(a, b)))
        )
    if isinstance(a, nn.Module):
        return _kind(a) == _kind(b) and same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, weakref.ref):
        return same(a(), b())
    if isinstance(a, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and same(a.__self__, b.__self__)
    if isinstance(a, types.FunctionType):
        closures = tuple(tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b))
        return a.__code__ == b.__code__ and same(
            (a.__defaults__, a.__kwdefaults__, closures[0]), (b.__defaults__, b.__kwdefaults__, closures[1])
        )
    if type(a).__eq__ is not object.__eq__:
        return getattr(a, "shape", None) == getattr(b, "shape", None) and bool(_all((a == b) | ((a != a) & (b != b))))
    return hasattr(a, "__dict__") and same(vars(a), vars(b))


def _all(result: Any) -> Any:
    """Arrays compare element by element."""
    return result.all() if hasattr(result, "all") else result
