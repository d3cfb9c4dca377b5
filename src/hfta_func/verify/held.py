"""What calls may change besides their results: Python values that functions hold, small tensors, and generators."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import batch_dim, get_unwrapped, is_wrapped, out_of_sight, pytree, writes
from hfta_func._tree import leaves
from hfta_func.calls.body import put, running_body
from hfta_func.errors import StateError
from hfta_func.models.attributes import is_changed, undo

_CURE = "which is of all members; keep it in a buffer of the model, self.register_buffer(name, tensor), and write that"


class MemberValues(Tensor):
    """Values of the members ``[M, ...]`` that a call has left in Python: to be read after it, not in later calls."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function makes of an ordinary tensor."""
        if running_body() is not None:
            raise StateError(f"the loss or a hook reads what an earlier call has left in Python, {_CURE}")
        with out_of_sight():
            return func(*args, **(kwargs or {}))


@dataclasses.dataclass(eq=False)
class Held:
    """Places where Python holds values, and what is there when this is made.

    Args:
        contents: Lists, dicts, sets and deques, each with a copy.
        names: Dicts or cells of closures, keys there, and the values.
        tensors: Tensors, how often each has been written, and copies of small ones.
        generators: Names of generators, each with what has its state, and the state.
    """

    contents: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    names: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)
    tensors: list[tuple[Tensor, int, Tensor | None]] = dataclasses.field(default_factory=list)
    generators: list[tuple[str, Any, Any]] = dataclasses.field(default_factory=list)

    def add(self, name: str, generator: Any) -> None:
        """Hold a generator, or the one of a module."""
        self.generators.append((name, generator, _state(generator)))

    def restore(self, now: Held | None = None) -> str:
        """Put everything back; returns the name of a generator that has drawn, empty if none has.

        The states of generators are those of ``now``, if it is given: reading them takes as long as a small step.
        """
        undo((content, None, before) for content, before in self.contents if is_changed(content, before))
        for tensor, count, values in self.tensors:
            if values is not None and _is_written(tensor, count, values):
                tensor.detach().copy_(values)
        for holder, key, value in self.names:
            put(holder, key, value)
        moved = ""
        states = [_state(each) for _, each, _ in self.generators] if now is None else [x for *_, x in now.generators]
        for (name, generator, state), current in zip(self.generators, states, strict=True):
            if not _same(current, state):
                _state(generator, state)
                moved = moved or name
        return moved

    def changed(self) -> Held | None:
        """The same of the places that are not as they were, but for generators; None if all are."""
        contents = [x for x in self.contents if is_changed(*x)]
        names = [x for x in self.names if _get(x[0], x[1]) is not x[2]]
        tensors = [x for x in self.tensors if _is_written(*x)]
        return Held(contents, names, tensors) if contents or names or tensors else None

    def again(self) -> Held:
        """The same places as they are now."""
        contents = [(content, content.copy()) for content, _ in self.contents]
        names = [(holder, key, _get(holder, key)) for holder, key, _ in self.names]
        tensors: Any = [(x, writes(x), x.detach().clone()) for x, _, values in self.tensors if values is not None]
        return Held(contents, names, tensors, [(name, each, _state(each)) for name, each, _ in self.generators])

    def written(self) -> list[Tensor]:
        """The values now of all small tensors, of those that were not written those before."""
        held = [(x, count, before) for x, count, before in self.tensors if before is not None]
        return [x.detach().clone() if _is_written(x, count, before) else before for x, count, before in held]

    def new(self) -> Iterator[tuple[Any, Any, Any]]:
        """What calls have put there since: who holds it, its key there, and the value."""
        for content, before in self.contents:
            old = dict(_entries(before))
            yield from [(content, key, x) for key, x in _entries(content) if old.get(key, self) is not x]
        yield from [(x, key, _get(x, key)) for x, key, before in self.names if _get(x, key) is not before]


def _is_written(tensor: Tensor, count: int, before: Tensor | None) -> bool:
    if writes(tensor) != count:
        return True
    # A batch norm writes its running statistics uncounted.
    return before is not None and not torch.equal(tensor.detach().nan_to_num(), before.nan_to_num())


def _entries(content: Any) -> list[tuple[Any, Any]]:
    if isinstance(content, set):
        return []
    return [*(content.items() if isinstance(content, dict) else enumerate(content))]


def _get(holder: Any, key: Any) -> Any:
    return holder.cell_contents if isinstance(holder, types.CellType) else holder.get(key)


class OneCall:
    """``run(members, ...)`` for groups of members, each of which finds what functions ``held`` as the first one does.

    :meth:`end` makes ``[M, ...]`` of members' tensors that were left there, and of numbers that differ between groups.
    """

    def __init__(self, run: Callable[..., Any], held: Held, count: int):
        self._run, self._held, self._count = run, held, count
        # How many members, what they have left by place, and the tensors then.
        self._groups: list[tuple[int, dict[Any, Any], list[Tensor]]] = []

    def __call__(self, members: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of a group."""
        if sum(size for size, *_ in self._groups) == self._count:
            # Earlier groups were to find the fastest size.
            self._groups = []
        self._held.restore()
        result = self._run(members, *args, **kwargs)
        left = {(id(holder), key): pytree.tree_map(_whole, x) for holder, key, x in self._held.new()}
        self._groups.append((len(members[0]), left, self._held.written()))
        return result

    def end(self) -> None:
        """After the last group; raises a StateError if a tensor that is not theirs was written with other values by each."""
        tensors = zip(*(written for *_, written in self._groups), strict=True)
        if any(not torch.equal(x, each[0]) for each in tensors for x in each):
            why = f"the loss or a hook writes a tensor in place for a later call, {_CURE}"
            raise StateError(f"{why}, or append what is only read later to a list")
        for holder, key, _ in [*self._held.new()]:
            place = id(holder), key
            # Counters of the model are set after all groups.
            sizes = [size for size, left, _ in self._groups if place in left]
            parts = [left[place] for _, left, _ in self._groups if place in left]
            if len({*map(pytree.tree_structure, parts)}) == 1:
                put(holder, key, pytree.tree_map(functools.partial(_joined, sizes), *parts))


def _whole(leaf: Any) -> Any:
    """The members' values of a tensor that has come out of ``vmap``."""
    if not isinstance(leaf, Tensor) or not is_wrapped(leaf) or is_wrapped(values := get_unwrapped(leaf)):
        return leaf
    return values.detach().movedim(batch_dim(leaf), 0).as_subclass(MemberValues)


def as_tensor(x: Any) -> Tensor:
    """A tensor as it is, or a number as one."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)


def _joined(sizes: list[int], *parts: Any) -> Any:
    if len(parts) == 1 or not all(isinstance(x, Tensor | float | int) for x in parts):
        return parts[-1]
    # Of one member alone, tensors have no model axis.
    rows = [x if isinstance(x, MemberValues) else as_tensor(x)[None] for x in parts]
    is_same = all(torch.equal(x, rows[0]) for x in rows) and not any(isinstance(x, MemberValues) for x in parts)
    if is_same or len({x.shape[1:] for x in rows}) > 1:
        return parts[-1] if is_same else parts
    rows = [x.expand(size, *x.shape[1:]) for size, x in zip(sizes, rows, strict=True)]
    return torch.cat(rows).detach().as_subclass(MemberValues)


def is_generator(value: Any) -> bool:
    """Whether this is a generator of random numbers, of PyTorch, Python or NumPy."""
    if type(value).__module__.startswith("numpy.random"):
        return hasattr(value, "get_state") or hasattr(value, "bit_generator")
    return isinstance(value, torch.Generator | random.Random)


def _state(holder: Any, *new: Any) -> Any:
    """The state of a generator, or of a module that has one; what is ``new`` is put there."""
    for name in ("set_state", "setstate") if new else ("get_state", "getstate"):
        if hasattr(holder, name):
            return getattr(holder, name)(*new)
    if new:
        holder.bit_generator.state = new[0]
    return holder.bit_generator.state


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    try:
        return bool(state == other)
    except (ValueError, RuntimeError):  # There are arrays in it.
        pairs = zip(leaves(state), leaves(other), strict=True)
        return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in pairs)
