"""Compares models beyond the values of their parameters: classes, modes, ties, and settings outside the tensors.

An array runs the *first* model's code for every member, so whatever that code reads besides parameters and buffers must
be equal in all models.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hfta_func._torch import MODULE_ATTRIBUTES, has_hooks, own_tensors, weight_hooks
from hfta_func._types import StackError
from hfta_func.models.scalar_attributes import is_own

T = TypeVar("T")

# Tensors and children are compared separately.
_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks"))
_BACKWARD_HOOKS = tuple(name for name in _HOOKS if "backward" in name)


def check_same_structure(
    model: nn.Module, first: nn.Module, member: int, varied: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Compare ``model``, the given member, with member 0.

    Args:
        model: The member.
        first: Member 0.
        member: Its place.
        varied: Numbers in which other members differ.

    Returns:
        The numbers in which the two differ, by path: the member's and member 0's.

    Raises:
        StackError: It names the first other difference. Integers count as such, unless another member has a float there.
    """
    numbers: dict[str, tuple[float, float]] = {}
    own, others = dict(model.named_modules()), dict(first.named_modules())
    # Hooks may be methods of any module; modules of one path are compared here.
    known = {(id(own[path]), id(others[path])): (own[path], others[path]) for path in own.keys() & others.keys()}
    for path, mine, theirs in pairs(own, others, member, "module "):
        numbers |= _check_module(mine, theirs, path, member, known, varied)
    mine, theirs = ties(model), ties(first)
    for path in {**theirs, **mine}:
        if mine.get(path) != theirs.get(path):
            holder, other, target = (member, 0, mine[path]) if path in mine else (0, member, theirs[path])
            raise StackError(
                f"model {holder} ties '{path}' to '{target}' but model {other} does not; tie the same parameters in all "
                f"models"
            )
    return numbers


def check_materialised(model: nn.Module, owner: str = "") -> None:
    """Raise a StackError if this is no module, or a lazy module of it has not seen its first input."""
    if not isinstance(model, nn.Module):
        what = getattr(model, "__qualname__", type(model).__qualname__)
        raise StackError(f"{what} is not a torch.nn.Module; pass a model, such as a factory makes when it is called")
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


def computed(module: nn.Module) -> dict[str, Tensor]:
    """The plain attributes that were computed from parameters, by hooks of PyTorch's or in a forward pass."""
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.grad_fn is not None or name in weight_hooks(module)}


def check_no_backward_hooks(model: nn.Module) -> None:
    """Raise a StackError if the backward pass of one model would call hooks, which an array has nobody to call for."""
    hooked = [(f"parameter '{path}'", has_hooks(parameter)) for path, parameter in model.named_parameters()]
    for path, module in model.named_modules():
        where = f"module '{path}'" if path else "the model"
        hooked.append((where, any(getattr(module, name, None) for name in _BACKWARD_HOOKS)))
    for where, found in hooked:
        if found:
            raise StackError(
                f"{where} has a hook for the backward pass, which members that run as one do not have one by one; remove it, "
                f"and change gradients in the optimizer: chain(...)"
            )


def _check_module(
    mine: nn.Module,
    theirs: nn.Module,
    path: str,
    member: int,
    known: dict[tuple[int, int], Any],
    varied: Collection[str],
) -> dict[str, tuple[float, float]]:
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
    own = {id(tensor) for module in (mine, theirs) for tensor in own_tensors(module).values()}
    for name in _HOOKS:
        count, other = len(getattr(mine, name, ())), len(getattr(theirs, name, ()))
        if count != other:
            raise StackError(
                f"model {member}: {where} has {count} {name.strip('_')} but model 0 has {other}; register the same hooks "
                f"on all models or on none"
            )
        hooks = [tuple(getattr(module, name, {}).values()) for module in (mine, theirs)]
        if not equal(hooks[0], hooks[1], own, dict(known)):
            raise StackError(
                f"model {member}: the {name.strip('_')} of {where} are not those of model 0, whose code runs for all "
                f"members; register hooks that hold the same values"
            )
    numbers: dict[str, tuple[float, float]] = {}
    made = computed(mine).keys() | computed(theirs).keys()
    for name in sorted({*vars(mine), *vars(theirs)} - MODULE_ATTRIBUTES - made):
        a, b, label = vars(mine).get(name, UNSET), vars(theirs).get(name, UNSET), f"{path}.{name}".lstrip(".")
        if equal(a, b, own, dict(known)):
            continue
        # Integers may be sizes.
        is_real = isinstance(a, float) or isinstance(b, float) or label in varied
        if is_real and is_own(mine, name) and is_own(theirs, name):
            numbers[label] = a, b
            continue
        free = "; if this is no size, write it as a float" if type(a) is int and type(b) is int else ""
        raise StackError(f"model {member}: {_setting_difference(a, b, label, own, {})}{free}")
    return numbers


UNSET = object()


def _setting_difference(a: Any, b: Any, path: str, own: set[int], seen: dict[tuple[int, int], Any]) -> str:
    """Describe the first part in which two settings differ, and the cure; ``b`` is model 0's."""
    # A container may hold itself.
    seen = {**seen, (id(a), id(b)): (a, b)}
    parts, others = (_parts(a), _parts(b)) if type(a) is type(b) and not isinstance(a, nn.Module) else ({}, {})
    sequence = isinstance(a, list | tuple)
    # Short ones, such as kernel sizes, are best shown whole.
    whole = sequence and len(a) <= 4 and all(isinstance(value, int | float | str) for value in a)
    if parts and others and not whole and parts.keys() == others.keys():
        for key, part in parts.items():
            if not equal(part, others[key], own, dict(seen)):
                label = f"{path}[{key!r}]" if sequence or isinstance(a, dict) else f"{path}.{key}"
                return _setting_difference(part, others[key], label, own, seen)
    shown, other = _show(a), _show(b)
    cure = "models in one array must share every setting"
    if shown != other:
        return f"'{path}' is {shown} but in model 0 it is {other}; {cure}"
    if isinstance(a, Tensor):
        cure = "a tensor that differs between models must be a parameter or a buffer"
    elif isinstance(a, nn.Module):
        cure = "assign the module to an attribute of its own or put it into an nn.ModuleList"
    return f"'{path}' ({shown}) differs from that of model 0; {cure}"


def _kind(module: nn.Module) -> Any:
    # Each parametrized module has a class of its own, derived from the class to compare.
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def _show(value: Any) -> str:
    """A setting in a few words, without the values of arrays and without addresses."""
    if value is UNSET:
        return "unset"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__qualname__}"
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {list(value.shape)} on {value.device}"
    if getattr(value, "shape", ()):
        return f"an array {list(value.shape)} of {getattr(value, 'dtype', 'numbers')}"
    if isinstance(value, types.CodeType):
        return f"the code of {value.co_name} ({value.co_filename}:{value.co_firstlineno})"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def equal(a: Any, b: Any, own: set[int], seen: dict[tuple[int, int], Any]) -> bool:
    """Equality of settings; what has parts is equal if all its parts are."""
    if a is b or (id(a), id(b)) in seen or (id(a) in own and id(b) in own):
        return True
    # Both are kept alive here, because a later object could otherwise get the same id.
    seen[id(a), id(b)] = (a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and (a.is_meta or bool(torch.equal(a, b)))
    parts, others = _parts(a), _parts(b)
    if parts is not None and others is not None:
        return parts.keys() == others.keys() and all(equal(parts[key], others[key], own, seen) for key in parts)
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    same = (a == b) | ((a != a) & (b != b))
    # Arrays compare element by element.
    return bool(same.all() if hasattr(same, "all") else same)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a setting by name; None if it is compared as a whole."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, RemovableHandle):
        # A number by which a hook can be removed; the hooks themselves are compared.
        return {}
    if isinstance(value, weakref.ref):
        return {"referent": value()}
    if isinstance(value, functools.partial):
        return {name: getattr(value, name) for name in ("func", "args", "keywords")}
    if isinstance(value, types.MethodType):
        return {name: getattr(value, name) for name in ("__func__", "__self__")}
    if isinstance(value, types.FunctionType):
        held = {name: getattr(value, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
        return {**held, "__closure__": tuple(cell.cell_contents for cell in value.__closure__ or ())}
    plain = type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__")
    return vars(value) if plain else None
