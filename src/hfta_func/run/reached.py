"""What functions can read of Python's values: a digest for a file's name, and a look whether it is as it was."""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import inspect
import operator
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import HEAP_TYPE, has_global_hooks

_MOST = 10_000
"""Objects to look at; a function that can reach more is not looked at."""
_PLAIN = (
    *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, re.Pattern),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FOLLOWED = (
    *(list, tuple, dict, set, frozenset, object, staticmethod, classmethod, property, types.CellType, types.MethodType),
    *(functools.partial, types.SimpleNamespace, types.MappingProxyType, types.GenericAlias, types.UnionType),
)
_NATIVE = (
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, type(torch.ops.aten.mul), type(torch.ops.aten)),
    *(type(torch.ops.aten.mul.Tensor), type(inspect.FullArgSpec.args), types.ModuleType),
)
"""Functions in C, fields of named tuples, operators, and modules, of which what code names is followed."""
_DEFINITIONS = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (torch.__file__, os.path.dirname(__file__), os.path.join(sysconfig.get_path("stdlib"), "os.py"))
)
"""Folders of what changes only with a version, which the digest of a machine holds."""
_ASIDE = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __orig_bases__ __parameters__".split()
)


class Reached:
    """Values that ``roots`` can reach, followed through functions, classes, containers and attributes.

    The attributes of ``model``, which nobody else holds, do not change. What a function of PyTorch, Python or this package
    reads is not followed.
    """

    def __init__(self, *roots: Any, model: torch.nn.Module):
        self.tensors: list[Tensor] = []
        """The tensors among the values, in an order that is the same in another process."""
        self.digest: str | None = None
        """The same in another process if all values but those of tensors are; None if something cannot be followed."""
        self.why_not: str | None = None
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._watched: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        self._parts = {*map(id, model.modules())}
        left = [model, *reversed(roots)]
        try:
            while left:
                left.extend(reversed([*self._visit(left.pop())]))
            self.digest = self._hash.hexdigest()
        except _UnknownError as error:
            self.why_not = str(error)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return not has_global_hooks() and all([_identical(look(), before) for look, before in self._watched])

    def _note(self, *facts: Any) -> None:
        self._hash.update(repr(facts).encode())

    def _watch(self, look: Callable[[], Iterable[Any]]) -> tuple[Any, ...]:
        """What is seen now, and is to be the same later."""
        seen = (*look(),)
        self._watched.append((look, seen))
        return seen

    def _visit(self, value: Any) -> Iterable[Any]:
        """Note a value; returns what it refers to."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            self._note(kind.__qualname__, value)
            return ()
        if id(value) in self._numbers:
            self._note("again", self._numbers[id(value)])
            return ()
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if len(self._kept) > _MOST or has_global_hooks():
            raise _UnknownError(f"its functions can reach more than {_MOST:,} objects, or all modules have hooks")
        self._note(kind.__module__, kind.__qualname__)
        if isinstance(value, Tensor):
            if kind not in (Tensor, torch.nn.Parameter) and not isinstance(value, torch.nn.Buffer):
                raise _UnknownError(f"a {kind.__qualname__}")
            self._note(value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            self.tensors += [] if value.is_meta else [value]
            return ()
        if isinstance(value, _NATIVE):
            self._note(getattr(value, "__qualname__", str(value)))
            return ()
        if isinstance(value, types.FunctionType):
            return self._visit_function(value)
        if isinstance(value, type):
            return self._visit_class(value)
        if isinstance(value, (set, frozenset)):
            if not all(isinstance(one, (str, int)) for one in value):
                raise _UnknownError("a set of objects")
            self._note(self._watch(lambda: sorted(value, key=repr)))
            return ()
        if id(value) in self._parts:
            self._note([*vars(value)])
            attributes = ([*one.items()] if isinstance(one, dict) else [one] for one in vars(value).values())
            return (kind, *(one for each in attributes for one in each))
        is_made = bool(kind.__flags__ & HEAP_TYPE) and (
            hasattr(value, "__dict__") or any(map(_has_slots, kind.__mro__))
        )
        if kind not in _FOLLOWED and not is_made:
            raise _UnknownError(f"a {kind.__qualname__}")
        return self._watch(functools.partial(gc.get_referents, value))

    def _visit_class(self, kind: type) -> Iterable[Any]:
        self._note(kind.__qualname__)
        parts: list[Any] = []
        for base in kind.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if base.__flags__ & HEAP_TYPE and not _is_definition(file):
                self._watch(functools.partial(tuple, vars(base).values()))
                parts += [one for pair in vars(base).items() if pair[0] not in _ASIDE for one in pair]
        return parts

    def _visit_function(self, function: types.FunctionType) -> Iterable[Any]:
        self._note(function.__module__, function.__qualname__)
        parts = self._watch(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__))[1:]
        parts = *parts, *(function.__closure__ or ())
        if _is_definition(function.__code__.co_filename):
            return parts
        self._note(_of_code(function.__code__))
        names = sorted(_names_in(function.__code__))
        return *parts, vars(function), *self._watch(lambda: _named(function.__globals__, names))


class _UnknownError(Exception):
    """Something cannot be followed."""


def _named(space: dict[str, Any], names: list[str], seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What names in code may mean: globals, modules that it imports itself, and what modules among these have."""
    package = space.get("__package__") or ""
    of_version = _is_definition(space.get("__file__"))
    for name in names:
        value = space.get(name, None if seen else sys.modules.get(name, sys.modules.get(f"{package}.{name}")))
        # A version's own data may bear a name that the code has for something else.
        if not of_version or isinstance(value, (types.FunctionType, type, *_NATIVE)):
            yield value
        if isinstance(value, types.ModuleType) and id(value) not in seen and len(seen) < 3:
            yield from _named(vars(value), names, seen | {id(value)})


def _identical(values: Iterable[Any], before: tuple[Any, ...]) -> bool:
    now = (*values,)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_definition(path: str | None) -> bool:
    # Packages may lie in a folder of the standard library.
    return path is not None and any(
        path.startswith(folder) and not path.startswith(f"{folder}site-packages") for folder in _DEFINITIONS
    )


def _has_slots(kind: type) -> bool:
    return bool(vars(kind).get("__slots__")) or issubclass(kind, (list, tuple, dict))


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names in code, and its texts, which may be names."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    texts = (one for one in code.co_consts if isinstance(one, str) and one.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


def _of_code(code: types.CodeType) -> Any:
    constants = [
        _of_code(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if type(one) is frozenset
        else repr(one)
        for one in code.co_consts
    ]
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return shape, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants
