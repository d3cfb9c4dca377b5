"""What a call may change besides tensors: generators of random numbers, and Python values that functions hold."""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import (
    MODULE_ATTRIBUTES,
    batch_dim,
    default_generators,
    get_unwrapped,
    is_wrapped,
    out_of_sight,
    pytree,
    writes,
)
from hfta_func.calls.body import is_users_file, running_body
from hfta_func.errors import StateError

_CONTAINERS = (dict, list, set, collections.deque)
_DEPTH = 5
_FEW = 4096
"""Entries of a tensor that may count something; larger ones are data."""


class MemberValues(Tensor):
    """Values of the members ``[M, ...]`` that a call has left in Python: to be read after it, not in later calls."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function makes of an ordinary tensor."""
        if running_body() is not None:
            name = next((vars(arg).get("name") for arg in args if isinstance(arg, cls)), "a tensor")
            raise StateError(
                f"the loss or a hook reads {name}, which an earlier call has left in Python and which holds all members' "
                f"values; keep it in a buffer of the model, self.register_buffer(name, tensor), and write that"
            )
        with out_of_sight():
            return func(*args, **(kwargs or {}))


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

    def changed(self, earlier: Held | None) -> Held:
        """The places that are not as they were, and those that calls have changed earlier."""
        changed, at = Held([]), {(id(holder), key) for holder, key, _ in self._new()}
        if earlier is not None:
            at |= {(id(holder), None) for holder, *_ in (*earlier._contents, *earlier._cells, *earlier._tensors)}
            at |= {(id(names), name) for names, name, _ in earlier._names}
        holders = {holder for holder, _ in at}
        changed._contents = [x for x in self._contents if id(x[0]) in holders or len(x[0]) != len(x[1])]
        changed._names = [x for x in self._names if (id(x[0]), x[1]) in at]
        changed._cells = [x for x in self._cells if id(x[0]) in holders]
        changed._tensors = [x for x in self._tensors if writes(x[0]) != x[1] or id(x[0]) in holders]
        return changed

    def is_any(self) -> bool:
        """Whether there is a place."""
        return bool(self._contents or self._names or self._cells or self._tensors)

    def again(self) -> Held:
        """The same places as they are now, without generators."""
        again = Held([])
        again._contents = [(content, content.copy()) for content, _ in self._contents]
        again._names = [(names, name, names.get(name)) for names, name, _ in self._names]
        again._cells = [(cell, cell.cell_contents) for cell, _ in self._cells]
        again._tensors = [(tensor, writes(tensor), tensor.detach().clone()) for tensor, *_ in self._tensors]
        return again

    def _new(self) -> Iterator[tuple[Any, Any, Any]]:
        """What calls have put there since: a container and a key, or a cell and the name of its content, and the value."""
        for content, before in self._contents:
            if isinstance(content, dict):
                yield from [(content, key, x) for key, x in content.items() if before.get(key, self) is not x]
            elif not isinstance(content, set):
                is_longer = len(content) > len(before)
                start = len(before) if is_longer else 0
                yield from [
                    (content, at, content[at])
                    for at in range(start, len(content))
                    if is_longer or content[at] is not before[at]
                ]
        yield from [(names, name, names[name]) for names, name, x in self._names if names.get(name, x) is not x]
        yield from [(cell, "cell_contents", cell.cell_contents) for cell, x in self._cells if cell.cell_contents is not x]

    def name_of(self, parameter: Tensor) -> str:
        """What a parameter is called in the module that holds it."""
        modules = [each for each in self._seen.values() if isinstance(each, nn.Module)]
        named = ((f"'{path}' of a {type(one).__name__}", x) for one in modules for path, x in one.named_parameters())
        return next((name for name, x in named if x is parameter), f"a parameter {[*parameter.shape]}")

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
        elif isinstance(value, types.MethodType):
            parts = value.__self__, value.__func__
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
        elif isinstance(value, _CONTAINERS):
            self._contents.append((value, value.copy()))
            parts = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            parts = value
        elif isinstance(value, nn.Module):
            for module in value.modules():
                names = {name: part for name, part in vars(module).items() if name not in MODULE_ATTRIBUTES}
                self._names += [(vars(module), name, part) for name, part in names.items()]
                self._contents.append((module._buffers, module._buffers.copy()))
                names |= {"forward": module._forward_hooks, "before": module._forward_pre_hooks}
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


class OneCall:
    """``run(members, ...)`` for groups of members, each of which finds what functions ``held`` as the first one does.

    :meth:`end` makes ``[M, ...]`` of members' tensors that were left there, and of numbers that differ between groups.
    """

    def __init__(self, run: Callable[..., Any], held: Held):
        self._run, self._held = run, held
        self._groups: list[tuple[int, dict[Any, Any]]] = []

    def __call__(self, members: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of a group."""
        self._held.restore()
        result = self._run(members, *args, **kwargs)
        left = {(id(holder), key): (holder, key, pytree.tree_map(_whole, x)) for holder, key, x in self._held._new()}
        self._groups.append((len(members[0]), left))
        return result

    def end(self, count: int) -> None:
        """After the last group of ``count`` members."""
        groups: list[tuple[int, dict[Any, Any]]] = []
        while sum(size for size, _ in groups) < count:
            # Those before were to find the fastest size.
            groups.insert(0, self._groups.pop())
        for place, (holder, key, value) in groups[-1][1].items():
            parts = [(size, left[place][2]) for size, left in groups if place in left]
            sizes, layouts = [size for size, _ in parts], {pytree.tree_structure(part) for _, part in parts}
            if len(layouts) == 1:
                value = pytree.tree_map(lambda *x, sizes=sizes: _joined(sizes, x), *[part for _, part in parts])
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, MemberValues):
                    vars(leaf)["name"] = f"'{key}'" if isinstance(key, str) else f"an entry of a {type(holder).__name__}"
            if isinstance(holder, types.CellType):
                holder.cell_contents = value
            else:
                holder[key] = value


def _whole(leaf: Any) -> Any:
    """The members' values of a tensor that has come out of ``vmap``."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, MemberValues) or not is_wrapped(leaf):
        return leaf
    values = get_unwrapped(leaf)
    return leaf if is_wrapped(values) else values.detach().movedim(batch_dim(leaf), 0).as_subclass(MemberValues)


def _joined(sizes: list[int], parts: Any) -> Any:
    if len(parts) == 1 or not all(isinstance(x, Tensor | float | int) for x in parts):
        return parts[-1]
    tensors = [torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None).detach() for x in parts]
    if not any(isinstance(x, MemberValues) for x in parts) and all(torch.equal(x, tensors[0]) for x in tensors):
        return parts[-1]
    pairs = zip(sizes, parts, tensors, strict=True)
    tensors = [x if isinstance(part, MemberValues) else x.expand(size, *x.shape) for size, part, x in pairs]
    return torch.cat(tensors).as_subclass(MemberValues) if len({x.shape[1:] for x in tensors}) == 1 else tuple(parts)


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
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return all(map(_same, state.values(), other.values()))
    if isinstance(state, tuple) and any(hasattr(part, "tobytes") for part in state):
        return all(map(_same, state, other))
    as_bytes = getattr(state, "tobytes", None)
    return state == other if as_bytes is None else as_bytes() == other.tobytes()
