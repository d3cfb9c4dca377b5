"""How a model may hold what it is made of, besides its modules: in ways that its copies, which run members, can follow."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, is_compiled
from hfta_func.calls.captured import contents
from hfta_func.errors import StackError

_CACHED = type(functools.cache(len))


def check_references(model: nn.Module, owner: str = "") -> None:
    """Raise a StackError if an attribute holds a parameter, a buffer or a module where no copy can have another."""
    names: dict[int, str] = {id(module): f"module '{path}'" for path, module in model.named_modules() if path}
    names |= {id(model): "the model"}
    names |= {id(tensor): f"parameter '{path}'" for path, tensor in model.named_parameters()}
    names |= {id(tensor): f"buffer '{path}'" for path, tensor in model.named_buffers()}
    seen: dict[int, Any] = {}

    def visit(value: Any, path: str, inside: str = "") -> None:
        if isinstance(value, int) and value in names:
            raise StackError(
                f"{owner}'{path}' holds the id of {names[value]}, and members have others; hold its name, and look it up in "
                f"the model, dict(self.named_parameters())[name]"
            )
        if isinstance(value, weakref.ref):
            # Of modules only the references that attributes, lists, dicts and closures hold are renewed.
            if inside or type(value) is not weakref.ref or isinstance(value(), Tensor):
                refuse(getattr(value(), "__self__", value()), path, "a weak reference")
        if id(value) in seen or isinstance(value, Tensor | nn.Module | type | types.ModuleType | int | str):
            return
        seen[id(value)] = value
        for kind, part in _fixed(value):
            refuse(part, path, kind)
        for name, part in _parts(value):
            visit(part, f"{path}{name}", inside or ("an object" if name.startswith(".") else ""))

    def refuse(part: Any, path: str, kind: str) -> None:
        if id(part) in names:
            raise StackError(
                f"{owner}'{path}' holds {names[id(part)]} in {kind}, where members cannot have their own; take it from the "
                f"model where it is used, or hold it in a list or a dict"
            )

    for path, module in model.named_modules():
        # What a compiler has added is replaced.
        for name in () if is_compiled(module) else vars(module).keys() - MODULE_ATTRIBUTES:
            visit(vars(module)[name], f"{path}.{name}" if path else name)


def _fixed(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds where a copy cannot hold another, each with the kind of its holder."""
    if isinstance(value, types.FunctionType):
        held = (
            value.__defaults__,
            value.__kwdefaults__,
            [part for part in vars(value).values() if isinstance(part, Tensor)],
        )
        yield from (("a default or an attribute of a function", part) for part in _flat(held))
    elif isinstance(value, types.BuiltinMethodType):
        yield "a method", value.__self__
    elif isinstance(value, types.MappingProxyType):
        yield from (("a mapping proxy", part) for part in _flat(dict(value)))
    elif isinstance(value, _CACHED):
        held = _parts(getattr(value, "__wrapped__", None))
        yield from (("a function with a cache", part) for _, part in held)
    elif isinstance(value, functools.partial):
        return
    elif isinstance(value, dict | set):
        yield from (("a weak dictionary or set", key()) for key in value if isinstance(key, weakref.ref))
    else:
        attributes = [item for kind in type(value).__mro__ for item in vars(kind).items()]
        slots = [name for name, attribute in attributes if isinstance(attribute, types.MemberDescriptorType)]
        for name in (name for name in slots if not name.startswith("__")):
            yield from (("an object with slots", part) for part in _flat(getattr(value, name, None)))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple | set | frozenset):
        for part in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            yield from _flat(part)
    else:
        yield value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with what its path adds to that of the object."""
    if isinstance(value, dict):
        yield from (("", key) for key in value if isinstance(key, int | tuple))
        yield from ((f"[{key!r}]" if isinstance(key, str) else "", part) for key, part in [*value.items()])
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from (("", part) for part in value)
    elif isinstance(value, types.FunctionType):
        yield from (("", part) for cell in value.__closure__ or () for part in contents(cell))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, value.args, value.keywords))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in [*vars(value).items()])


def marks_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a parameter or a buffer was given, such as ``weight.no_decay = True``: numbers and texts."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict | list | tuple):
            return all(map(is_plain, value.values() if isinstance(value, dict) else value))
        return value is None or isinstance(value, bool | int | float | str)

    return {name: value for name, value in vars(tensor).items() if is_plain(value)}


def check_same_marks(tensors: dict[str, Tensor], first: dict[str, Tensor], member: int) -> None:
    """Compare the attributes of a member's parameters and buffers with those of member 0."""
    for path in tensors.keys() & first.keys():
        marks, others = marks_of(tensors[path]), marks_of(first[path])
        # Libraries note with such names how a tensor came to its values.
        for name in (name for name in {**others, **marks} if not name.startswith("_")):
            if marks.get(name) != others.get(name):
                raise StackError(
                    f"model {member}: '{path}' has the attribute {name}={marks.get(name)!r} but in model 0 it is "
                    f"{others.get(name)!r}; models in one array must share every setting"
                )
