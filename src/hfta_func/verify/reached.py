"""What functions can reach of Python's values: a digest for a file's name, whether it is as it was, and what to put back."""

from __future__ import annotations

import collections
import dis
import enum
import functools
import gc
import hashlib
import inspect
import operator
import os
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, default_generators, has_global_hooks, is_wrapped, writes
from hfta_func.calls.body import contents
from hfta_func.models.attributes import CONTAINERS
from hfta_func.models.padding import Padding
from hfta_func.verify.held import Held, is_generator

_SHAPE = operator.attrgetter(
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars"),
)
"""What tells code from other code, besides its constants."""
_HEAP_TYPE = 1 << 9
"""The flag of CPython's classes that are made at run time."""

_HOLDING = *CONTAINERS, tuple, types.CellType, types.MethodType, functools.partial
_TABLES = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
_MOST = 10_000
"""Objects to look at; a function that can reach more is not looked at."""
_FEW = 4096
"""Entries of a tensor that may count something; larger ones are data."""
_PLAIN = (
    type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, re.Pattern,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FOLLOWED = (
    list, tuple, dict, set, frozenset, object, staticmethod, classmethod, property, types.CellType, types.MethodType,
    torch.Size, functools.partial, types.SimpleNamespace, types.MappingProxyType, types.GenericAlias, types.UnionType,
    collections.OrderedDict, collections.defaultdict, collections.deque, type(functools.lru_cache(len)),
)  # fmt: skip
_NATIVE = (
    *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, type(torch.ops.aten.mul), type(torch.ops.aten)),
    *(type(torch.ops.aten.mul.Tensor), type(inspect.FullArgSpec.args), types.ModuleType),
)
"""Functions in C, fields of named tuples, operators, and modules, of which what code names is followed."""
_OF_THREADS = type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread
_OF_GLOBALS = "LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"
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

    What a function of PyTorch, Python or this package reads is not followed.

    Args:
        roots: Functions and other objects, the nearest of whose values come first.
        model: A module that nobody else holds, whose attributes do not change.
        device: Where calls run whose changes are to be put back. Nothing is followed into classes and other modules then, and
            the generators of PyTorch, Python and NumPy are held.
    """

    def __init__(self, *roots: Any, model: nn.Module | None = None, device: torch.device | None = None):
        self.tensors: list[Tensor] = []
        """The tensors among the values, in an order that is the same in another process."""
        self.why_not: str | None = None
        """What cannot be followed, if anything."""
        self.held = Held()
        """What calls may change, for a device."""
        self._changes = device is not None
        self._facts, self._watched = list[Any](), list[Any]()
        self._seen: dict[int, tuple[int, Any]] = {}
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._parts = set() if model is None else {*map(id, model.modules())}
        if device is not None:
            for one in default_generators(device):
                self.held.add("PyTorch", one)
            self.held.add("Python's random", random)
            if "numpy" in sys.modules:
                self.held.add("NumPy (np.random)", sys.modules["numpy"].random)
        left = collections.deque((*roots, model))
        while left and len(self._seen) <= _MOST and (self._changes or self.why_not is None):
            parts = self._visit(left.popleft())
            self._note(len(parts))
            left += parts
        if left or has_global_hooks():
            self._cannot(f"its functions can reach more than {_MOST:,} objects, or all modules have hooks")
        self._before = gc.get_referents(*self._watched)

    @functools.cached_property
    def digest(self) -> str | None:
        """The same in another process if all values but those of tensors are; None if something cannot be followed."""
        return None if self.why_not else hashlib.sha256(repr(self._facts).encode()).hexdigest()

    def holds(self) -> bool:
        """Whether everything is as it was."""
        now = gc.get_referents(*self._watched)
        same = len(now) == len(self._before) and all(map(operator.is_, now, self._before))
        return same and not has_global_hooks() and all([space.get(name) is value for space, name, value in self._names])

    def name_of(self, parameter: Tensor) -> str | None:
        """What a parameter is called in the module that holds it; None if no function holds one, as if a call makes it."""
        modules = [each for _, each in self._seen.values() if isinstance(each, nn.Module)]
        named = ((f"'{path}' of a {type(one).__name__}", x) for one in modules for path, x in one.named_parameters())
        return next((name for name, x in named if x is parameter), None)

    def _note(self, *facts: Any) -> None:
        self._facts.append(facts)

    def _cannot(self, why: str) -> None:
        self.why_not = self.why_not or why

    def _watch(self, value: Any) -> list[Any]:
        """What a value refers to, which is to be the same later."""
        self._watched.append(value)
        return gc.get_referents(value)

    def _visit(self, value: Any) -> Sequence[Any]:
        """Note a value; returns what it refers to."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            self._note(kind.__qualname__, value)
            return ()
        if id(value) in self._seen:
            self._note("again", self._seen[id(value)][0])
            return ()
        self._seen[id(value)] = len(self._seen), value
        self._note(kind.__module__, kind.__qualname__)
        if isinstance(value, Tensor):
            return self._visit_tensor(value)
        if isinstance(value, weakref.ref):
            return () if self._changes else (value(),)
        if isinstance(value, _NATIVE) or kind.__name__ in ("ufunc", "_ArrayFunctionDispatcher"):
            self._note(getattr(value, "__qualname__", str(value)))
            return ()
        if isinstance(value, types.FunctionType):
            return self._visit_function(value)
        if isinstance(value, types.CodeType):
            self._note(_SHAPE(value))
            return value.co_consts
        if isinstance(value, type):
            return () if self._changes else self._visit_class(value)
        if isinstance(value, Padding):
            # It holds a model of every size, which nobody writes.
            self._note(value.signatures)
            return (value.masks,)
        if id(value) in self._parts:
            self._note([*vars(value)])
            attributes = ([*one.items()] if isinstance(one, dict) else [one] for one in vars(value).values())
            return [kind, *(one for each in attributes for one in each)]
        if self._changes and isinstance(value, nn.Module):
            tables = [vars(value), *(vars(value)[name] for name in _TABLES)]
            self.held.contents += [(table, table.copy()) for table in tables]
            plain = [x for name, x in vars(value).items() if name not in MODULE_ATTRIBUTES]
            return [*plain, *(x for table in tables[2:] for x in table.values())]
        if self._changes and is_generator(value):
            self.held.add(f"a {kind.__name__} of its own", value)
        if self._changes and isinstance(value, CONTAINERS):
            self.held.contents.append((value, value.copy()))
        if self._changes and isinstance(value, types.CellType):
            self.held.names += [(value, "", content) for content in contents(value)]
        if isinstance(value, (set, frozenset)):
            if not all(isinstance(one, (str, int, float)) for one in value):
                self._cannot("a set of objects")
            self._note(sorted(value, key=repr))
            return [x for x in self._watch(value) if type(x) not in _PLAIN]
        if self._changes and not isinstance(value, _HOLDING):
            attributes = getattr(value, "__dict__", {})
            # What threads share, such as the queue of a writer of logs, other threads change, too.
            return () if any(isinstance(x, _OF_THREADS) for x in attributes.values()) else (attributes,)
        if kind not in _FOLLOWED and not all(_is_followed(base) for base in kind.__mro__):
            self._cannot(f"a {kind.__qualname__}")
            return ()
        if isinstance(value, dict):
            self._note([*map(repr, value)] if all(isinstance(key, (str, int)) for key in value) else len(value))
        # Where attributes are kept without a dict, asking for it makes one.
        getattr(value, "__dict__", None)
        return self._watch(value)

    def _visit_tensor(self, value: Tensor) -> Sequence[Any]:
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            self._note(value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            self.tensors += [] if value.is_meta else [value]
        else:
            self._cannot(f"a {type(value).__qualname__} of layout {value.layout}")
        # Tensors made in inference mode count no writes.
        if self._changes and not (value.is_inference() or value.is_meta or is_wrapped(value)):
            is_few = value.layout == torch.strided and value.numel() <= _FEW
            self.held.tensors.append((value, writes(value), value.detach().clone() if is_few else None))
        return [vars(value)] if vars(value) else ()

    def _visit_class(self, kind: type) -> Sequence[Any]:
        self._note(kind.__qualname__)
        parts: list[Any] = []
        for base in kind.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if base.__flags__ & _HEAP_TYPE and not _is_definition(file):
                self._watch(gc.get_referents(vars(base))[0])
                parts += [one for pair in vars(base).items() if pair[0] not in _ASIDE for one in pair]
        return parts

    def _visit_function(self, function: types.FunctionType) -> Sequence[Any]:
        code, space = function.__code__, function.__globals__
        parts = [vars(function), function.__defaults__, function.__kwdefaults__, *(function.__closure__ or ())]
        self._note(function.__module__, function.__qualname__)
        self._watch(function)
        if _is_definition(code.co_filename):
            return parts[1:]
        imports = dis.opmap["IMPORT_NAME"] in code.co_code[::2]
        named = [*_named(space, sorted(names_in(code)), imports, _globals_in(code))]
        self._names += named
        if self._changes:
            named = [x for x in named if x[0] is space and x[1] in space]
            self.held.names += named
        return [code, *parts, *(value for *_, value in named)]


def _named(
    space: dict[str, Any], names: list[str], imports: bool, read: Collection[str], seen: frozenset[int] = frozenset()
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What names in code may mean: globals that it may ``read``, modules that it imports, and what modules have."""
    package, of_version = space.get("__package__") or "", _is_definition(space.get("__file__"))
    for name in names:
        places: list[Any] = [(space, name)] if name in read else []
        places += [(sys.modules, name), (sys.modules, f"{package}.{name}")] if imports else []
        if not places:
            continue
        place = next((one for one in places if one[1] in one[0]), places[0])
        value = place[0].get(place[1])
        # A version's own data may bear a name that the code has for something else.
        if not of_version or isinstance(value, (types.FunctionType, type, *_NATIVE)):
            yield place[0], place[1], value
        if isinstance(value, types.ModuleType) and id(value) not in seen and len(seen) < 3:
            yield from _named(vars(value), names, False, names, seen | {id(value)})


def _is_definition(path: str | None) -> bool:
    # Packages may lie in a folder of the standard library.
    inside = [path.removeprefix(folder) for folder in _DEFINITIONS if path and path.startswith(folder)]
    return any(not name.startswith("site-packages") for name in inside)


def _is_followed(kind: type) -> bool:
    """Whether a class was made in Python, or what objects of it refer to is all that they hold."""
    is_of_c = not kind.__flags__ & _HEAP_TYPE or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    return kind in _FOLLOWED or not is_of_c


@functools.lru_cache(1024)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals in code; an attribute or a key may have the name of a loop's variable."""
    inner = (_globals_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(x.argval for x in dis.get_instructions(code) if x.opname in _OF_GLOBALS).union(*inner)


def names_in(code: types.CodeType) -> set[str]:
    """The names in code, and its texts, which may be names."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    texts = (part for part in code.co_consts if isinstance(part, str) and part.isidentifier())
    return {*code.co_names}.union(texts, *inner)
