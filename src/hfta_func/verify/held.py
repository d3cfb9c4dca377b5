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

from hfta_func import _torch
from hfta_func._torch import MODULE_ATTRIBUTES, default_generators, is_wrapped, pytree, writes
from hfta_func._tree import leaves
from hfta_func.calls.body import is_users_file, running_body
from hfta_func.errors import StateError

_CONTAINERS = (dict, list, set, collections.deque)
_DEPTH = 5
_FEW = 4096
"""Entries of a tensor that may count something; larger ones are data."""

_CURE = (
    ", which is of all members; keep it in a buffer of the model, self.register_buffer(name, tensor), and write that"
)


class MemberValues(Tensor):
    """Values of the members ``[M, ...]`` that a call has left in Python: to be read after it, not in later calls."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function makes of an ordinary tensor."""
        if running_body() is not None:
            raise StateError(f"the loss or a hook reads what an earlier call has left in Python{_CURE}")
        with _torch.out_of_sight():
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
        self._names: list[tuple[Any, str, Any]] = []
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
        for holder, key, value in self._names:
            _put(holder, key, value)
        return moved

    def changed(self) -> Held | None:
        """The places that are not as they were, if any."""
        changed, places = Held([]), {(id(holder), key) for holder, key, _ in self.new()}
        holders = {holder for holder, _ in places}
        changed._contents = [x for x in self._contents if id(x[0]) in holders or len(x[0]) != len(x[1])]
        changed._names = [x for x in self._names if (id(x[0]), x[1]) in places]
        changed._tensors = [x for x in self._tensors if writes(x[0]) != x[1]]
        return changed if changed._contents or changed._names or changed._tensors else None

    def again(self) -> Held:
        """The same places as they are now, without generators."""
        again = Held([])
        again._contents = [(content, content.copy()) for content, _ in self._contents]
        again._names = [(holder, key, _get(holder, key)) for holder, key, _ in self._names]
        again._tensors = [(tensor, writes(tensor), tensor.detach().clone()) for tensor, *_ in self._tensors]
        return again

    def written(self) -> list[Tensor]:
        """The values now of all tensors, of those that were not written those before."""
        return [
            values if writes(tensor) == count else tensor.detach().clone() for tensor, count, values in self._tensors
        ]

    def new(self) -> Iterator[tuple[Any, Any, Any]]:
        """What calls have put there since: who holds it, its key there, and the value."""
        for content, before in self._contents:
            if isinstance(content, dict):
                yield from [(content, key, x) for key, x in content.items() if before.get(key, self) is not x]
            elif not isinstance(content, set):
                is_longer = len(content) > len(before)
                entries = range(len(before) if is_longer else 0, len(content))
                yield from [(content, i, content[i]) for i in entries if is_longer or content[i] is not before[i]]
        for holder, key, before in self._names:
            if (value := _get(holder, key)) is not before:
                yield holder, key, value

    def name_of(self, parameter: Tensor) -> str | None:
        """What a parameter is called in the module that holds it; None if no function holds one, as if a call makes it."""
        modules = [each for each in self._seen.values() if isinstance(each, nn.Module)]
        named = ((f"'{path}' of a {type(one).__name__}", x) for one in modules for path, x in one.named_parameters())
        return next((name for name, x in named if x is parameter), None)

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._generators.append((name, get, put, get()))

    def _hold(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH or isinstance(value, type | types.ModuleType | str | int):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            is_plain = value.layout == torch.strided and value.numel() <= _FEW
            if is_plain and not (value.is_inference() or value.is_meta or is_wrapped(value)):
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
                self._contents.append((vars(module)["_buffers"], vars(module)["_buffers"].copy()))
                # Those of a model alone are results of its call.
                buffers = module.buffers(recurse=False) if depth else ()
                for part in (*names.values(), *buffers, module._forward_hooks, module._forward_pre_hooks):
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
            self._names.append((cell, "", content))
            yield content
        if is_users_file(func.__code__.co_filename):
            for name in _globals(func.__code__) & func.__globals__.keys():
                content = func.__globals__[name]
                if not isinstance(content, types.ModuleType | type | types.BuiltinFunctionType):
                    self._names.append((func.__globals__, name, content))
                    yield content


def _get(holder: Any, key: str) -> Any:
    return holder.cell_contents if isinstance(holder, types.CellType) else holder.get(key)


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


class OneCall:
    """``run(members, ...)`` for groups of members, each of which finds what functions ``held`` as the first one does.

    :meth:`end` makes ``[M, ...]`` of members' tensors that were left there, and of numbers that differ between groups.
    """

    def __init__(self, run: Callable[..., Any], held: Held, count: int):
        self._run, self._held, self._count = run, held, count
        self._sizes: list[int] = []
        self._left: list[dict[Any, Any]] = []
        self._written: list[list[Tensor]] = []

    def __call__(self, members: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of a group."""
        if sum(self._sizes) == self._count:
            # Earlier groups were to find the fastest size.
            self._sizes, self._left, self._written = [], [], []
        self._held.restore()
        result = self._run(members, *args, **kwargs)
        self._sizes.append(len(members[0]))
        self._written.append(self._held.written())
        self._left.append({(id(holder), key): pytree.tree_map(_whole, x) for holder, key, x in self._held.new()})
        return result

    def end(self) -> None:
        """After the last group; raises a StateError if a tensor that is not theirs was written with other values by each."""
        if any(not torch.equal(a, b) for one in self._written for a, b in zip(one, self._written[0], strict=True)):
            why = f"the loss or a hook writes a tensor in place for a later call{_CURE}"
            raise StateError(f"{why}, or append what is only read later to a list")
        groups = [*zip(self._sizes, self._left, strict=True)]
        for holder, key, _ in [*self._held.new()]:
            place = id(holder), key
            # Counters of the model are set after all groups.
            sizes = [size for size, left in groups if place in left]
            parts = [left[place] for _, left in groups if place in left]
            if len({*map(pytree.tree_structure, parts)}) == 1:
                _put(holder, key, pytree.tree_map(functools.partial(_joined, sizes), *parts))


def _whole(leaf: Any) -> Any:
    """The members' values of a tensor that has come out of ``vmap``."""
    if not isinstance(leaf, Tensor) or not is_wrapped(leaf) or is_wrapped(values := _torch.get_unwrapped(leaf)):
        return leaf
    return values.detach().movedim(_torch.batch_dim(leaf), 0).as_subclass(MemberValues)


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None).detach()


def _joined(sizes: list[int], *parts: Any) -> Any:
    if len(parts) == 1 or not all(isinstance(x, Tensor | float | int) for x in parts):
        return parts[-1]
    # Of one member alone, tensors have no model axis.
    rows = [x if isinstance(x, MemberValues) else _tensor(x)[None] for x in parts]
    is_same = all(torch.equal(x, rows[0]) for x in rows) and not any(isinstance(x, MemberValues) for x in parts)
    if is_same or len({x.shape[1:] for x in rows}) > 1:
        return parts[-1] if is_same else parts
    rows = [x.expand(size, *x.shape[1:]) for size, x in zip(sizes, rows, strict=True)]
    return torch.cat(rows).as_subclass(MemberValues)


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
