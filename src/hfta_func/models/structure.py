"""Compares models beyond the values of their parameters: classes, modes, ties, hooks and other settings.

An array runs the *first* model's code for every member, so everything that the code reads besides parameters and buffers
must be equal in all models.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import threading
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hfta_func._torch import MODULE_ATTRIBUTES, has_hooks, is_compiled, pytree, storage_number, tensors_of, weight_hooks
from hfta_func.calls.captured import contents, drawn_state
from hfta_func.errors import StackError
from hfta_func.models.references import check_references, check_same_marks
from hfta_func.models.scalar_attributes import may_differ

T = TypeVar("T")

# A number by which a hook can be removed, while the hooks themselves are compared; locks.
_WITHOUT_SETTINGS = (RemovableHandle, type(threading.Lock()), type(threading.RLock()))

# Tensors and children are compared separately.
_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks"))
_BACKWARD_HOOKS = tuple(name for name in _HOOKS if "backward" in name)


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
    if member == 0:
        check_references(model)
    modules, first_modules = dict(model.named_modules()), dict(first.named_modules())
    # Hooks may be methods of any module; modules with the same path are compared by the loop.
    aligned: list[tuple[Any, Any]] = [
        (modules[path], first_modules[path]) for path in modules.keys() & first_modules.keys()
    ]
    tensors, first_tensors = (
        {**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (model, first)
    )
    aligned += [(tensors[path], first_tensors[path]) for path in tensors.keys() & first_tensors.keys()]
    known = {(id(one), id(other)): (one, other) for one, other in aligned}
    for path, module, other in pairs(modules, first_modules, member, "module "):
        numbers |= _check_module(module, other, path, member, known, varied)
    check_same_marks(tensors, first_tensors, member)
    tied, first_tied = ties(model), ties(first)
    for path in {**first_tied, **tied}:
        if tied.get(path) != first_tied.get(path):
            holder, other, target = (member, 0, tied[path]) if path in tied else (0, member, first_tied[path])
            raise StackError(
                f"model {holder} ties '{path}' to '{target}' but model {other} does not; tie the same parameters in all "
                f"models"
            )
    return numbers


def check_materialised(model: nn.Module, owner: str = "") -> None:
    """Raise a StackError if this is not a module, or contains a lazy module that has not been run yet."""
    if not isinstance(model, nn.Module):
        what = getattr(model, "__qualname__", type(model).__qualname__)
        raise StackError(f"{what} is not a torch.nn.Module; pass a model, such as a factory makes when it is called")
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise StackError(
                f"{owner}'{path}' is lazy and has no shape yet; run the model once on an example input first"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise StackError(
                f"{owner}'{path}' is a {kind} tensor, and these cannot be stacked; "
                f"assign it to a plain attribute instead, which all models share"
            )
    trained = {storage_number(param): path for path, param in model.named_parameters() if param.requires_grad}
    known = {*map(id, (*model.parameters(), *model.buffers()))}
    for path, module in model.named_modules():
        for name in vars(module).keys() - MODULE_ATTRIBUTES - weight_hooks(module).keys():
            for leaf in pytree.tree_leaves(vars(module)[name]):
                if isinstance(leaf, Tensor) and id(leaf) not in known and storage_number(leaf) in trained:
                    raise StackError(
                        f"{owner}'{f'{path}.{name}' if path else name}' shares memory with parameter "
                        f"'{trained[storage_number(leaf)]}', of which every member has its own; take it from the "
                        f"parameter where it is used, or hold a clone"
                    )
        if isinstance(module, torch.jit.ScriptModule):
            raise StackError(
                f"{owner}{repr(path) if path else 'the model'} is a ScriptModule, whose code cannot run with other tensors "
                f"than its own; stack models of the module that it was made from, and script one that is exported"
            )


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


def check_no_backward_hooks(model: nn.Module) -> None:
    """Raise a StackError if the model has hooks for the backward pass, which an array cannot call for each member."""
    hooked = [(f"parameter '{path}'", has_hooks(parameter)) for path, parameter in model.named_parameters()]
    for path, module in model.named_modules():
        where = f"module '{path}'" if path else "the model"
        hooked.append((where, any(getattr(module, name, None) for name in _BACKWARD_HOOKS)))
    for where, is_hooked in hooked:
        if is_hooked:
            raise StackError(
                f"{where} has a hook for the backward pass, which members that run as one do not have one by one; remove it, "
                f"and change gradients in the optimizer: chain(...)"
            )


def _check_module(
    module: nn.Module,
    first: nn.Module,
    path: str,
    member: int,
    known: dict[tuple[int, int], Any],
    varied: Collection[str],
) -> dict[str, tuple[float, float]]:
    where = f"'{path}'" if path else "the model"
    if class_of(module) != class_of(first):
        raise StackError(
            f"model {member}: {where} is a {type(module).__qualname__} but in model 0 it is a "
            f"{type(first).__qualname__}; models in one array must be of one class"
        )
    if module.training != first.training:
        mode, other = ("train", "eval") if module.training else ("eval", "train")
        raise StackError(
            f"model {member}: {where} is in {mode} mode but in model 0 it is in {other} mode; call .train() or .eval() "
            f"on all of them"
        )
    compared = {id(tensor) for each in (module, first) for tensor in tensors_of(each).values()}
    for name in _HOOKS:
        count, other = len(getattr(module, name, ())), len(getattr(first, name, ()))
        if count != other:
            raise StackError(
                f"model {member}: {where} has {count} {name.strip('_')} but model 0 has {other}; register the same hooks "
                f"on all models or on none"
            )
        hooks = [tuple(getattr(each, name, {}).values()) for each in (module, first)]
        if not equal(hooks[0], hooks[1], compared, dict(known)):
            raise StackError(
                f"model {member}: the {name.strip('_')} of {where} are not those of model 0, whose code runs for all "
                f"members; register hooks that hold the same values"
            )
    numbers: dict[str, tuple[float, float]] = {}
    if is_compiled(module):
        # Its settings are the compiler's.
        return numbers
    computed_names = computed(module).keys() | computed(first).keys()
    for name in sorted({*vars(module), *vars(first)} - MODULE_ATTRIBUTES - computed_names):
        a, b, label = vars(module).get(name, UNSET), vars(first).get(name, UNSET), f"{path}.{name}".lstrip(".")
        if equal(a, b, compared, dict(known)):
            continue
        # Integers may be sizes, which must be equal.
        is_real = isinstance(a, float) or isinstance(b, float) or label in varied
        if is_real and may_differ(module, name) and may_differ(first, name):
            numbers[label] = a, b
            continue
        free = "; pad=True pads sizes, and other numbers must be floats" if type(a) is int and type(b) is int else ""
        raise StackError(f"model {member}: {_setting_difference(a, b, label, compared, {})}{free}")
    return numbers


UNSET = object()


def _setting_difference(a: Any, b: Any, path: str, compared: set[int], seen: dict[tuple[int, int], Any]) -> str:
    """Describe the first part in which two settings differ, and the cure; ``b`` is model 0's."""
    # A container may hold itself.
    seen = {**seen, (id(a), id(b)): (a, b)}
    parts, others = (_parts(a), _parts(b)) if type(a) is type(b) and not isinstance(a, nn.Module) else ({}, {})
    sequence = isinstance(a, list | tuple)
    # Short sequences, such as kernel sizes, are shown whole.
    whole = sequence and len(a) <= 4 and all(isinstance(value, int | float | str) for value in a)
    if parts and others and not whole and parts.keys() == others.keys():
        for key, part in parts.items():
            if not equal(part, others[key], compared, dict(seen)):
                label = f"{path}[{key!r}]" if sequence or isinstance(a, dict) else f"{path}.{key}"
                return _setting_difference(part, others[key], label, compared, seen)
    shown, other = _show(a), _show(b)
    cure = "models in one array must share every setting, but for floats that are attributes of a module (self.lr)"
    if (
        parts is not None
        and others is not None
        and type(a) is type(b) is dict
        and all(equal(parts[key], others[key], compared, {}) for key in parts.keys() & others.keys())
    ):
        cure += "; if making the first model has filled a cache here, make that model again, or all by init_params"
    if shown != other:
        return f"'{path}' is {shown} but in model 0 it is {other}; {cure}"
    if isinstance(a, Tensor):
        cure = "a tensor that differs between models must be a parameter or a buffer"
    elif isinstance(a, nn.Module):
        cure = "assign the module to an attribute of its own or put it into an nn.ModuleList"
    return f"'{path}' ({shown}) differs from that of model 0; {cure}"


def class_of(module: nn.Module) -> Any:
    """The class of a module, to be compared."""
    # PyTorch derives a new class for each parametrized or traced module; its base is the class to compare.
    derived = parametrize.is_parametrized(module) or isinstance(module, torch.fx.GraphModule)
    return type(module).__bases__ if derived else type(module)


def _show(value: Any) -> str:
    """A short description of a setting, without values of arrays and without addresses."""
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


def equal(a: Any, b: Any, compared: set[int], seen: dict[tuple[int, int], Any]) -> bool:
    """Equality of settings; composite settings are equal if all their parts are."""
    if a is b or (id(a), id(b)) in seen or (id(a) in compared and id(b) in compared):
        return True
    seen[id(a), id(b)] = (a, b)  # Both stay alive, because a later object could otherwise get the same id.
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.grad_fn is not None and b.grad_fn is not None:
            # What calls have computed is no setting.
            return True
        alike = a.dtype == b.dtype and a.device == b.device and a.layout == b.layout
        # Each jagged tensor has a size of its own for its rows.
        alike = alike and (a.layout == torch.jagged or a.shape == b.shape)
        if alike and a.layout != torch.strided:
            return all(map(torch.equal, _strided(a), _strided(b)))
        return alike and (a.is_meta or bool(torch.equal(a, b)))
    parts, others = _parts(a), _parts(b)
    if parts is not None and others is not None:
        if parts.keys() != others.keys():
            # Keys may be parameters or modules, or tuples with some.
            alike = len(parts) == len(others) and all(isinstance(key, Tensor | nn.Module | tuple) for key in parts)
            if not (alike and equal([*parts], [*others], compared, seen)):
                return False
            others = dict(zip(parts, others.values(), strict=True))
        return all(equal(parts[key], others[key], compared, seen) for key in parts)
    if isinstance(a, set | frozenset) and a != b:
        return len(a) == len(b) and all(any(equal(x, y, compared, dict(seen)) for y in b) for x in a)
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    try:
        same = (a == b) | ((a != a) & (b != b))
        # Arrays compare element by element, and tables column by column.
        if bool(same.all().all() if hasattr(same, "all") else same):
            return True
    except (RuntimeError, TypeError, ValueError):
        pass  # It asks for the truth value of tensors or arrays in it.
    fields, others = _fields(a), _fields(b)
    return fields is not None and equal(fields, others, compared, seen)


def _strided(sparse: Any) -> tuple[Tensor, ...]:
    """The plain tensors that a sparse or a jagged tensor is made of."""
    if sparse.layout == torch.sparse_coo:
        return sparse.coalesce().indices(), sparse.coalesce().values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return sparse.offsets(), sparse.values()


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a composite setting by name; None if the setting is compared as a whole."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | collections.deque):
        return dict(enumerate(value))
    if isinstance(value, _WITHOUT_SETTINGS):
        return {}
    if isinstance(value, torch.fx.Graph):
        return {"code": value.python_code("self").src}
    if (state := drawn_state(value)) is not None:
        return {"state": state}
    if isinstance(value, weakref.ref):
        return {"referent": value()}
    if isinstance(value, functools.partial):
        return {name: getattr(value, name) for name in ("func", "args", "keywords")}
    if isinstance(value, types.MethodType):
        return {name: getattr(value, name) for name in ("__func__", "__self__")}
    if isinstance(value, types.FunctionType):
        named = {name: getattr(value, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
        return {**named, "__closure__": tuple(part for cell in value.__closure__ or () for part in contents(cell))}
    attributes = [item for kind in type(value).__mro__ for item in vars(kind).items()]
    slots = [name for name, attribute in attributes if isinstance(attribute, types.MemberDescriptorType)]
    plain = type(value).__eq__ is object.__eq__ and (slots or hasattr(value, "__dict__"))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})} if plain else None


def _fields(value: Any) -> dict[str, Any] | None:
    """What makes two objects equal that compare as tuples of their fields; None for objects of other kinds."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    return vars(value) if isinstance(value, types.SimpleNamespace) else None
