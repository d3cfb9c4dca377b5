"""Compares models beyond the values of their parameters: classes, ties and plain settings.

An array runs the *first* model's code for every member. So plain values, such as a stride or the name of an activation,
constant tensors, functions, and what forward hooks hold, must be equal in all of them. Other objects are those of the first.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import sys
import sysconfig
import textwrap
import types
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hfta_func._torch import MODULE_ATTRIBUTES, has_hooks, is_compiled, tensors_of, weight_hooks
from hfta_func.calls.body import contents
from hfta_func.errors import StackError
from hfta_func.models.scalar_attributes import may_differ

T = TypeVar("T")

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_PLAIN = (
    *(bool, int, float, complex, str, bytes, enum.Enum, type, type(None)),
    *(torch.dtype, types.BuiltinFunctionType, types.CodeType),
)


def check_same_structure(
    model: nn.Module, first: nn.Module, member: int, varied: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Compare ``model``, a member, with member 0; ``varied`` are paths of numbers in which other members differ.

    Returns:
        The numbers in which the two differ, by path: the member's and member 0's number.

    Raises:
        StackError: if there is another difference; it names the first one. Integers must be equal, unless another member
            has a float there.
    """
    numbers: dict[str, tuple[float, float]] = {}
    known = functools.cache(lambda: tensors_of_both(model, first))
    modules, first_modules = dict(model.named_modules()), dict(first.named_modules())
    for path, module, other in pairs(modules, first_modules, member, "module "):
        check_same_class(module, other, path, f"model {member}", "model 0")
        for name, a, b in () if is_compiled(module) else settings_of_both(module, other):
            label = f"{path}.{name}".lstrip(".")
            different = None if a is b else setting_difference(a, b, label, known())
            # Integers may be sizes, which must be equal.
            is_real = isinstance(a, float) or isinstance(b, float) or label in varied
            if different and is_real and may_differ(module, name) and may_differ(other, name):
                numbers[label] = a, b
            elif different:
                where, one, first_one = different
                free = "; pad=True pads sizes, and other numbers must be floats" if type(a) is type(b) is int else ""
                raise StackError(
                    f"model {member}: '{where}' is {_shown(one)} but in model 0 it is {_shown(first_one)}; models in one "
                    f"array must share every setting, but for floats that are attributes of a module (self.lr){free}"
                )
    tied, first_tied = ties(model), ties(first)
    for path in {**first_tied, **tied}:
        if tied.get(path) != first_tied.get(path):
            holder, other, target = (member, 0, tied[path]) if path in tied else (0, member, first_tied[path])
            raise StackError(
                f"model {holder} ties '{path}' to '{target}' but model {other} does not; tie the same parameters in all "
                f"models"
            )
    return numbers


def check_same_class(module: nn.Module, like: nn.Module, path: str, name: str, other: str) -> None:
    """Raise a StackError unless two modules are of one class."""
    where = f"'{path}'" if path else "the model"
    if _class_of(module) != _class_of(like):
        raise StackError(
            f"{name}: {where} is a {type(module).__qualname__} but in {other} it is a {type(like).__qualname__}; models in "
            f"one array must be of one class"
        )


def _class_of(module: nn.Module) -> Any:
    # PyTorch derives a new class for each parametrized or traced module; its base is the class to compare.
    if isinstance(module, torch.fx.GraphModule):
        return type(module).__bases__, module.code
    return type(module).__bases__ if parametrize.is_parametrized(module) else type(module)


def settings_of_both(module: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The name and both values of each plain attribute of two modules, and their hooks.

    Left out is what calls leave there, such as counters and attention maps.
    """
    names = vars(module).keys() & vars(other).keys() - MODULE_ATTRIBUTES - _assigned_in_calls(type(module))
    for name in sorted(names - computed(module).keys() - computed(other).keys()):
        yield name, vars(module)[name], vars(other)[name]
    for name in (name for name in _FORWARD_HOOKS if vars(module)[name] or vars(other)[name]):
        hooks, others = ([_held(x) for x in vars(each)[name].values() if _is_users(x)] for each in (module, other))
        same = len(hooks) == len(others)
        yield name, hooks if same else len(hooks), others if same else len(others)


def _is_users(hook: Any) -> bool:
    # Those of libraries, such as PyTorch's for pruning, work on buffers, which are each member's own.
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return not (getattr(sys.modules.get(hook.__module__), "__file__", None) or "").startswith(_LIBRARIES)


def _held(hook: Any) -> Any:
    """A hook, or what one that is an object holds, but for lists and dicts, where hooks leave what they meet."""
    if isinstance(hook, types.FunctionType | types.MethodType | functools.partial):
        return hook
    return {name: value for name, value in vars(hook).items() if not isinstance(value, list | dict)}


@functools.lru_cache
def _assigned_in_calls(kind: type[nn.Module]) -> set[str]:
    functions = (vars(each).get("forward") for each in kind.__mro__)
    codes = [func.__code__ for func in functions if isinstance(func, types.FunctionType)]
    return {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}


def tensors_of_both(model: nn.Module, other: nn.Module) -> set[int]:
    """The identities of parameters and buffers, which settings may hold, too."""
    return {id(part) for each in (model, other) for part in (*each.parameters(), *each.buffers())}


def setting_difference(a: Any, b: Any, path: str, known: Collection[int]) -> tuple[str, Any, Any] | None:
    """The first plain values or constant tensors in which two settings differ, in containers too, with their path.

    ``known`` are the identities of tensors that are compared elsewhere.
    """
    if a is b or (id(a) in known and id(b) in known):
        return None
    if _is_constant(a) and _is_constant(b):
        is_same = a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        return None if is_same else (path, a, b)
    if type(a) is not type(b) and callable(a) and callable(b):
        return path, a, b
    if not _is_plain(a) and not _is_plain(b) and type(a) is type(b):
        # Caches may hold what others do not hold yet.
        parts, others = _parts(a), _parts(b)
        every = (setting_difference(parts[key], others[key], path + key, known) for key in parts if key in others)
        return next(filter(None, every), None)
    if not (_is_plain(a) and _is_plain(b)) or a == b or (a != a and b != b):
        return None
    return path, a, b


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def _is_constant(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and value.grad_fn is None and not value.is_meta
    return type(value).__name__ == "ndarray"


def _parts(value: Any) -> dict[str, Any]:
    """What a container or a function holds, by what it adds to a path."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items() if isinstance(key, str | int)}
    if isinstance(value, nn.Module):
        named = tensors_of(value) | dict(value.named_children())
    elif isinstance(value, functools.partial):
        named = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(func := getattr(value, "__func__", value), types.FunctionType):
        cells = zip(func.__code__.co_freevars, map(contents, func.__closure__ or ()), strict=True)
        named = {name: held[0] for name, held in cells if held and _is_plain(held[0])}
        named |= {"__code__": func.__code__, "__defaults__": func.__defaults__, "__kwdefaults__": func.__kwdefaults__}
    elif isinstance(value, types.SimpleNamespace | Namespace):
        named = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    else:
        named = {}
    return {f".{name}": part for name, part in named.items()}


def _shown(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return f"{value.co_name} (line {value.co_firstlineno})"
    return getattr(value, "__name__", None) or textwrap.shorten(repr(value), 60)


def is_sparse(tensor: Tensor) -> bool:
    """Whether most entries of a tensor are zeros that it does not hold."""
    return tensor.layout in (torch.sparse_coo, torch.sparse_csr)


def check_module(model: nn.Module, owner: str = "") -> None:
    """Raise a StackError if this is not a module, or contains one whose code runs with its own tensors alone."""
    if not isinstance(model, nn.Module):
        what = owner + getattr(model, "__qualname__", type(model).__qualname__)
        raise StackError(f"{what} is not a torch.nn.Module; pass a model, such as a factory makes when it is called")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"'{path}'" if path else "the model"
            raise StackError(f"{owner}{where} is a ScriptModule; stack models of the module that it was made from")


def pairs(named: Mapping[str, T], first: Mapping[str, T], member: int, kind: str = "") -> Iterator[tuple[str, T, T]]:
    """The items of a model and of model 0 for each path; a StackError names a path that only one of them has."""
    for path in {**first, **named}:
        if path not in named or path not in first:
            missing, holder = (member, 0) if path not in named else (0, member)
            raise StackError(
                f"model {missing} has no {kind}'{path}' but model {holder} has one; models in one array must have the same "
                f"modules, parameters and buffers"
            )
        yield path, named[path], first[path]


def ties(model: nn.Module) -> dict[str, str]:
    """For each parameter or buffer with several paths, its first path by each of the other paths."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {path: first_path for path, tensor in named if (first_path := first.setdefault(id(tensor), path)) != path}


def computed(module: nn.Module) -> dict[str, Tensor]:
    """The plain attributes that were computed from parameters, by hooks of PyTorch or in a forward pass."""
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.grad_fn is not None or name in weight_hooks(module)}


def check_no_hooks_of_parameters(model: nn.Module) -> None:
    """Raise a StackError if parameters have hooks for the backward pass, which an array cannot call for each member."""
    for path in [path for path, parameter in model.named_parameters() if has_hooks(parameter)]:
        raise StackError(
            f"parameter '{path}' has a hook for the backward pass, which members that run as one do not have one by one; "
            f"remove it, and change gradients in the optimizer: chain(...)"
        )
