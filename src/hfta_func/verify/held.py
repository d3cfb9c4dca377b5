"""What a call may change besides tensors: generators of random numbers, and Python values that functions hold."""

from __future__ import annotations

import collections
import functools
import gc
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, default_generators, is_wrapped, writes
from hfta_func._tree import leaves
from hfta_func.calls.body import is_users_file

_CONTAINERS = (dict, list, set, collections.deque)
_DEPTH = 5
_FEW = 4096
"""Entries of a tensor that may count something; larger ones are data."""


class Held:
    """Generators, and the numbers, lists and dicts that functions and modules hold, as they are when this is made.

    Args:
        roots: Functions, objects and modules: of what they hold in attributes, closures and globals that they name.
        device: Whose generator is looked at, too, beside those of Python and NumPy.
    """

    def __init__(self, roots: list[Any], device: torch.device | None = None):
        self._generators: list[tuple[str, Any, Callable[[Any], Any], Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._seen: dict[int, Any] = {}
        if device is not None:
            for generator in default_generators(device):
                self._add("PyTorch", generator.get_state, generator.set_state)
            self._add("Python's random", random.getstate, random.setstate)
            if "numpy" in sys.modules:
                numpy: Any = sys.modules["numpy"].random
                self._add("NumPy (np.random)", numpy.get_state, numpy.set_state)
        for root in roots:
            self._hold(root, 0)

    def restore(self) -> str:
        """Put everything back; returns the name of a generator that has drawn, empty if none has."""
        moved = ""
        for name, get, put, state in self._generators:
            if not _same(get(), state):
                put(state)
                moved = moved or name
        for content, before in self._contents:
            if isinstance(content, dict):
                for key in content.keys() - before.keys():
                    del content[key]
                content.update((key, value) for key, value in before.items() if content.get(key, self) is not value)
            elif len(content) != len(before) or any(a is not b for a, b in zip(content, before, strict=True)):
                content.clear()
                (content.update if isinstance(content, set) else content.extend)(before)
        for tensor, count, values in self._tensors:
            if writes(tensor) != count:
                tensor.detach().copy_(values)
        for names, name, value in self._names:
            names[name] = value
        for cell, value in self._cells:
            cell.cell_contents = value
        return moved

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._generators.append((name, get, put, get()))

    def _hold(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH or isinstance(value, type | types.ModuleType | str | int):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if value.numel() <= _FEW and not (value.is_inference() or value.is_meta or is_wrapped(value)):
                self._tensors.append((value, writes(value), value.detach().clone()))
            return
        if isinstance(value, types.FunctionType):
            parts = self._of_function(value)
        elif isinstance(value, types.MethodType | functools.partial | tuple):
            parts = gc.get_referents(value)
        elif isinstance(value, _CONTAINERS):
            self._contents.append((value, value.copy()))
            parts = value.values() if isinstance(value, dict) else value
        elif isinstance(value, nn.Module):
            for module in value.modules():
                names = {name: part for name, part in vars(module).items() if name not in MODULE_ATTRIBUTES}
                self._names += [(vars(module), name, part) for name, part in names.items()]
                for part in names.values():
                    self._hold(part, depth + 1)
            return
        elif (kind := _generator(value)) is not None:
            return self._add(f"a {type(value).__name__} of its own", *kind)
        else:
            parts = (vars(value),) if hasattr(value, "__dict__") else ()
        for part in [*parts]:
            self._hold(part, depth + 1)

    def _of_function(self, func: types.FunctionType) -> Iterator[Any]:
        yield from (func.__defaults__, func.__kwdefaults__, vars(func))
        for cell in func.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, content))
            yield content
        if is_users_file(func.__code__.co_filename):
            for name in _globals(func.__code__) & func.__globals__.keys():
                content = func.__globals__[name]
                if not isinstance(content, types.ModuleType | type | types.BuiltinFunctionType):
                    self._names.append((func.__globals__, name, content))
                    yield content


def _globals(code: types.CodeType) -> set[str]:
    inner = (_globals(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names}.union(*inner)


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and to set the state of a generator of PyTorch, Python or NumPy; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "get_state"):
            return value.get_state, value.set_state
        if (bits := getattr(value, "bit_generator", None)) is not None:
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _same(state: Any, other: Any) -> bool:
    pairs = zip(leaves(state), leaves(other), strict=True)
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in pairs)
