"""What functions can read of Python's values: a digest for a file's name, and a look whether it is as it was."""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import inspect
import logging
import operator
import os
import pathlib
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import HEAP_TYPE, has_global_hooks

_MOST = 10_000
"""Objects to look at; a function that can reach more is not looked at."""
_PLAIN = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, re.Pattern),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FOLLOWED = (list, tuple, dict, set, frozenset, staticmethod, classmethod, property, types.CellType)
_NATIVE = (
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, type(torch.ops.aten.mul), type(torch.ops.aten)),
    *(type(torch.ops.aten.mul.Tensor), type(inspect.FullArgSpec.args)),
)
"""Functions in C, fields of named tuples, and operators."""
_DEFINITIONS = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (torch.__file__, os.path.dirname(__file__), os.path.join(sysconfig.get_path("stdlib"), "os.py"))
)
"""Folders of what changes only with a version, which the digest of a machine holds."""
_ELSEWHERE = frozenset(("globals", "locals", "__import__", "import_module", "_getframe"))
"""Names in code that reads what cannot be followed."""
_BY_TEXT = frozenset("getattr hasattr vars __dict__ __getattribute__ attrgetter methodcaller".split())
"""Names in code whose texts may be names, too."""
_ASIDE = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __orig_bases__ __parameters__".split()
)


class Reached:
    """Values that ``roots`` can reach, followed through functions, classes, containers and attributes.

    The attributes of ``model``, which nobody else holds, do not change.
    """

    def __init__(self, *roots: Any, model: torch.nn.Module):
        self.tensors: list[Tensor] = []
        """The tensors among the values, in an order that is the same in another process."""
        self.digest: str | None = None
        """The same in another process if all values but those of tensors are; None if something cannot be followed."""
        self.why_not: str | None = None
        self._hash = hashlib.sha256()
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []
        self._watched: list[tuple[Callable[[], Iterable[Any]], tuple[Any, ...]]] = []
        self._left = [model, *reversed(roots)]
        self._read = set[str]()
        self._patches: list[tuple[str, Any]] = []
        self._parts = {*map(id, model.modules())}
        try:
            while self._left or self._take_patches():
                self._visit(self._left.pop())
            self.digest = self._hash.hexdigest()
        except _UnknownError as error:
            self.why_not = str(error)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return not has_global_hooks() and all([_identical(look(), before) for look, before in self._watched])

    def _note(self, *facts: Any) -> None:
        self._hash.update(repr(facts).encode())

    def _follow(self, *values: Any) -> None:
        self._left.extend(reversed(values))

    def _watch(self, look: Callable[[], Iterable[Any]]) -> None:
        self._watched.append((look, (*look(),)))

    def _take_patches(self) -> bool:
        """Go on with what others have added to PyTorch's classes and somebody reads, if there is any."""
        taken = [patch for patch in self._patches if patch[0] in self._read]
        self._patches = [patch for patch in self._patches if patch[0] not in self._read]
        for name, value in taken:
            self._note(name)
            self._follow(value)
        return bool(taken)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return self._note(kind.__qualname__, value)
        key = (id(value[0]), value[1]) if kind is _Names else id(value)
        if key in self._numbers:
            return self._note("again", self._numbers[key])
        self._numbers[key] = len(self._numbers)
        self._kept.append(value)
        if len(self._kept) > _MOST or has_global_hooks():
            raise _UnknownError(f"its functions can reach more than {_MOST:,} objects, or all modules have hooks")
        self._note(kind.__module__, kind.__qualname__)
        if kind is _Names:
            self._visit_names(*value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._follow(value.__func__, value.__self__)
        elif isinstance(value, types.ModuleType):
            self._note(value.__name__)
        elif isinstance(value, _NATIVE):
            holder = getattr(value, "__self__", None)
            if not (holder is None or isinstance(holder, (type, types.ModuleType))):
                raise _UnknownError(f"a method of a {type(holder).__qualname__}")
            self._note(getattr(value, "__qualname__", str(value)))
        elif isinstance(value, Tensor):
            if kind not in (Tensor, torch.nn.Parameter) and not isinstance(value, torch.nn.Buffer):
                raise _UnknownError(f"a {kind.__qualname__}")
            self._note(value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            if not value.is_meta:
                self.tensors.append(value)
        elif isinstance(value, logging.Logger):
            # Its handlers hold half of a program, none of which a step computes with.
            self._note(value.name, value.getEffectiveLevel())
            self._watch(lambda: (value.getEffectiveLevel(),))
        elif id(value) in self._parts:
            self._follow(kind)
            for name, attribute in vars(value).items():
                self._note(name)
                self._follow(*([*attribute.items()] if isinstance(attribute, dict) else [attribute]))
        else:
            self._visit_object(value, kind)

    def _visit_object(self, value: Any, kind: type) -> None:
        """Containers and instances."""
        if isinstance(value, (list, tuple)):
            self._note(len(value))
            self._follow(*value)
            if not isinstance(value, tuple):
                self._watch(functools.partial(tuple, value))
        elif isinstance(value, Mapping):
            self._note(len(value))
            self._follow(*value.keys(), *value.values())
            self._watch(lambda: (*value.keys(), *value.values()))
        elif isinstance(value, (set, frozenset)):
            if not all(isinstance(one, (str, int)) for one in value):
                raise _UnknownError("a set of objects")
            self._note(sorted(map(repr, value)))
            self._watch(lambda: sorted(value, key=repr))
        elif isinstance(value, weakref.ref):
            self._follow(value())
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow(value.__func__)
        elif isinstance(value, property):
            self._follow(value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.partial):
            self._follow(value.func, value.args, value.keywords)
        elif isinstance(value, types.CellType):
            self._follow(value.cell_contents)
            self._watch(lambda: (value.cell_contents,))
        attributes = getattr(value, "__dict__", None)
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        if _is_builtin(kind):
            if kind is not object and not isinstance(value, _FOLLOWED):
                raise _UnknownError(f"a {kind.__qualname__}")
            return
        if attributes is None and not slots and not isinstance(value, (tuple, Mapping, weakref.ref, functools.partial)):
            raise _UnknownError(f"a {kind.__qualname__}")
        self._follow(kind, attributes, *(getattr(value, name) for name in slots))
        self._watch(lambda: (type(value), *(getattr(value, name, None) for name in slots)))

    def _visit_class(self, kind: type) -> None:
        self._note(kind.__qualname__)
        for base in kind.__mro__:
            if base in self._numbers or _is_builtin(base):
                continue
            self._numbers[base] = len(self._numbers)
            self._watch(functools.partial(tuple, vars(base).values()))
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            for name, value in [*vars(base).items()]:
                if name in _ASIDE:
                    continue
                function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if file is None or not _is_definition(file):
                    self._note(name)
                    self._follow(value)
                elif isinstance(function, types.FunctionType) and not _is_definition(function.__code__.co_filename):
                    # Somebody has replaced a method, which PyTorch reads, or added one.
                    self._patches.append((name, value))
                    if name.startswith("__") or name in _names_of(file):
                        self._read.add(name)

    def _visit_function(self, function: types.FunctionType) -> None:
        self._note(function.__module__, function.__qualname__)
        cells = function.__closure__ or ()
        self._watch(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__, *_contents(cells)))
        self._follow(function.__defaults__, function.__kwdefaults__, *_contents(cells))
        if _is_definition(function.__code__.co_filename):
            return
        self._note(_of_code(function.__code__))
        self._follow(vars(function))
        names = _names_in(function.__code__)
        self._read |= names
        if names & _ELSEWHERE:
            raise _UnknownError(f"{function.__qualname__} calls {min(names & _ELSEWHERE)}")
        space = function.__globals__
        self._follow(_Names(space, names))
        package = space.get("__package__") or ""
        for name in sorted(names - space.keys()):
            # Modules that it imports itself.
            for path in (name, f"{package}.{name}"):
                if path in sys.modules:
                    self._follow(_Names(vars(sys.modules[path]), names))

    def _visit_names(self, space: dict[str, Any], names: frozenset[str]) -> None:
        """Those of a module's names that code reads."""
        picked = sorted(name for name in names if name in space)
        self._note(space.get("__name__"), picked)
        missing = [name for name in names if name not in space and hasattr(builtins, name)]
        of_version = _is_definition(space.get("__file__"))
        self._watch(lambda: (*map(space.get, picked), *(space.get(name) for name in missing)))
        for name in picked:
            value = space[name]
            if of_version and not isinstance(value, (types.FunctionType, types.ModuleType, type, *_NATIVE, *_PLAIN)):
                # A version's own data, which may bear a name that the code has for something else.
                self._note(type(value).__qualname__)
                continue
            inner = vars(value) if isinstance(value, types.ModuleType) else None
            self._follow(value if inner is None or inner is space else _Names(inner, names))


class _UnknownError(Exception):
    """Something cannot be followed."""


class _Names(tuple[dict[str, Any], frozenset[str]]):
    """The names of a module, and those of them that matter."""

    __slots__ = ()

    def __new__(cls, space: dict[str, Any], names: frozenset[str]) -> _Names:
        """Both."""
        return tuple.__new__(cls, (space, names))


def _identical(values: Iterable[Any], before: tuple[Any, ...]) -> bool:
    now = (*values,)
    return len(now) == len(before) and (
        all(map(operator.is_, now, before))
        or all(
            # Zeros of both signs are equal.
            a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b and repr(a) == repr(b))
            for a, b in zip(now, before, strict=True)
        )
    )


def _is_definition(path: str | None) -> bool:
    # Packages may lie in a folder of the standard library.
    return path is not None and any(
        path.startswith(folder) and not path.startswith(f"{folder}site-packages") for folder in _DEFINITIONS
    )


@functools.cache
def _names_of(path: str) -> frozenset[str]:
    return _names_in(compile(pathlib.Path(path).read_bytes(), path, "exec")) if path.endswith(".py") else frozenset()


def _is_builtin(kind: type) -> bool:
    """Whether a class is Python's own; classes of code that runs without a ``__name__`` are put there, too."""
    return kind.__module__ == "builtins" and not kind.__flags__ & HEAP_TYPE


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return () if _is_builtin(kind) else (slots,) if isinstance(slots, str) else slots


def _contents(cells: Iterable[Any]) -> Iterable[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            yield None


def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    names = frozenset(code.co_names).union(*inner)
    texts = (one for one in code.co_consts if isinstance(one, str)) if names & _BY_TEXT else ()
    return names.union(texts)


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
