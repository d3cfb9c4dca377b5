"""Compares models beyond the values of their parameters: classes, modes, ties, and settings outside the tensors.

An array runs the *first* model's code for every member, so whatever that code reads besides parameters and buffers must
be equal in all models.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hfta_func._errors import StackError
from hfta_func._torch import MODULE_ATTRIBUTES, own_tensors

T = TypeVar("T")

# Tensors and children are compared separately; hooks are code, of which only the number is compared.
_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks"))


def check_same_structure(model: nn.Module, first: nn.Module, member: int) -> None:
    """Raise a StackError that names the first difference between ``model`` (the given member) and member 0."""
    for path, mine, theirs in pairs(dict(model.named_modules()), dict(first.named_modules()), member, "module "):
        _check_module(mine, theirs, path, member)
    mine, theirs = ties(model), ties(first)
    for path in {**theirs, **mine}:
        if mine.get(path) != theirs.get(path):
            holder, other, target = (member, 0, mine[path]) if path in mine else (0, member, theirs[path])
            raise StackError(
                f"model {holder} ties '{path}' to '{target}' but model {other} does not; tie the same parameters in all "
                f"models"
            )


def check_materialised(model: nn.Module, owner: str = "") -> None:
    """Raise a StackError if a lazy module of the model has not seen its first input."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise StackError(
                f"{owner}'{path}' is lazy and has no shape yet; run the model once on an example input first"
            )


def pairs(mine: Mapping[str, T], theirs: Mapping[str, T], member: int, kind: str = "") -> Iterator[tuple[str, T, T]]:
    """What a model and model 0 have under each path; a StackError names a path that only one of them has."""
    for path in {**theirs, **mine}:
        if path not in mine or path not in theirs:
            missing, holder = (member, 0) if path not in mine else (0, member)
            raise StackError(
                f"model {missing} has no {kind}'{path}' but model {holder} has one; models in one array must have the same "
                f"modules, parameters and buffers"
            )
        yield path, mine[path], theirs[path]


def ties(model: nn.Module) -> dict[str, str]:
    """The first path of every parameter or buffer with several paths, by each of the others."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {path: found for path, tensor in named if (found := first.setdefault(id(tensor), path)) != path}


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
        count, other = len(getattr(mine, name, ())), len(getattr(theirs, name, ()))
        if count != other:
            raise StackError(
                f"model {member}: {where} has {count} {name.strip('_')} but model 0 has {other}; register the same hooks "
                f"on all models or on none"
            )
    own = {id(tensor) for module in (mine, theirs) for tensor in own_tensors(module).values()}
    for name in sorted({*vars(mine), *vars(theirs)} - MODULE_ATTRIBUTES):
        a, b = vars(mine).get(name, _UNSET), vars(theirs).get(name, _UNSET)
        if not _equal(a, b, own, {}):
            raise StackError(f"model {member}: {_setting_difference(a, b, f'{path}.{name}'.lstrip('.'), own, {})}")


_UNSET = object()


def _setting_difference(a: Any, b: Any, path: str, own: set[int], seen: dict[tuple[int, int], Any]) -> str:
    """Describe the first part in which two settings differ, and the cure; ``b`` is model 0's."""
    # A container may hold itself.
    seen = {**seen, (id(a), id(b)): (a, b)}
    parts: list[tuple[str, Any, Any]] = []
    if type(a) is type(b):
        if isinstance(a, dict) and a.keys() == b.keys():
            parts = [(f"{path}[{key!r}]", a[key], b[key]) for key in a]
        elif isinstance(a, list | tuple) and len(a) == len(b) and not _is_short(a):
            parts = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(a, b, strict=True))]
        elif _is_plain(a) and vars(a).keys() == vars(b).keys():
            parts = [(f"{path}.{name}", value, vars(b)[name]) for name, value in vars(a).items()]
    for part, x, y in parts:
        if not _equal(x, y, own, dict(seen)):
            return _setting_difference(x, y, part, own, seen)
    shown, other = _show(a), _show(b)
    cure = "models in one array must share every setting"
    if shown != other:
        return f"'{path}' is {shown} but in model 0 it is {other}; {cure}"
    if isinstance(a, Tensor):
        cure = "a tensor that differs between models must be a parameter or a buffer"
    elif isinstance(a, nn.Module):
        cure = "assign the module to an attribute of its own or put it into an nn.ModuleList"
    return f"'{path}' ({shown}) differs from that of model 0; {cure}"


def _is_short(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list such as a kernel size is best shown as a whole."""
    return len(values) <= 4 and all(isinstance(value, int | float | str | None) for value in values)


def _is_plain(value: Any) -> bool:
    """Whether an object is compared by its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module) and type(value).__eq__ is object.__eq__


def _kind(module: nn.Module) -> Any:
    # Each parametrized module has a class of its own, derived from the class to compare.
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def _show(value: Any) -> str:
    """A setting in a few words, without the values of arrays and without addresses."""
    if value is _UNSET:
        return "unset"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__qualname__}"
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {list(value.shape)} on {value.device}"
    if getattr(value, "shape", ()):
        return f"an array {list(value.shape)} of {getattr(value, 'dtype', 'numbers')}"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _equal(a: Any, b: Any, own: set[int], seen: dict[tuple[int, int], Any]) -> bool:
    """Equality of settings; objects whose class does not define equality are equal if all their attributes are."""
    if a is b or (id(a), id(b)) in seen or (id(a) in own and id(b) in own):
        return True
    # Both are kept alive here, because a later object could otherwise get the same id.
    seen[id(a), id(b)] = (a, b)
    if type(a) is not type(b):
        return False
    same = functools.partial(_equal, own=own, seen=seen)
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and (a.is_meta or bool(torch.equal(a, b)))
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
        held = [
            (f.__defaults__, f.__kwdefaults__, tuple(cell.cell_contents for cell in f.__closure__ or ()))
            for f in (a, b)
        ]
        return a.__code__ == b.__code__ and same(held[0], held[1])
    if type(a).__eq__ is not object.__eq__:
        if getattr(a, "shape", None) != getattr(b, "shape", None):
            return False
        equal = (a == b) | ((a != a) & (b != b))
        # Arrays compare element by element.
        return bool(equal.all() if hasattr(equal, "all") else equal)
    return hasattr(a, "__dict__") and same(vars(a), vars(b))
