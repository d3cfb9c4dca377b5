"""What a call may change besides tensors: generators of random numbers, and Python values that functions hold."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import default_generators, is_wrapped, pytree
from hfta_func._tree import leaves
from hfta_func.calls.body import put, running_body
from hfta_func.errors import StateError
from hfta_func.models.attributes import Snapshot

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


class Held(Snapshot):
    """Generators, and the numbers, lists and dicts that functions and modules hold, as they are when this is made.

    Args:
        roots: Functions, objects and modules: of what they hold in attributes, closures and globals that they name.
        device: Whose generator is looked at, too, beside those of Python and NumPy.
    """

    def __init__(self, roots: Sequence[Any], device: torch.device | None = None):
        self._generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any], Any]] = []
        if device is not None:
            for generator in default_generators(device):
                self._add("PyTorch", generator.get_state, generator.set_state)
            self._add("Python's random", random.getstate, random.setstate)
            if "numpy" in sys.modules:
                numpy: Any = sys.modules["numpy"].random
                self._add("NumPy (np.random)", numpy.get_state, numpy.set_state)
        super().__init__(*roots, functions=True)

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._generators.append((name, get, put, get()))

    def _hold(self, path: str, value: Any, depth: int) -> None:
        if (kind := _generator(value)) is not None:
            self._add(f"a {type(value).__name__} of its own", *kind)
        else:
            super()._hold(path, value, depth)

    def restore(self) -> str:
        """Put everything back; returns the name of a generator that has drawn, empty if none has."""
        moved = super().restore()
        for name, get, set_state, state in self._generators:
            if not _same(get(), state):
                set_state(state)
                moved = moved or name
        return moved

    def name_of(self, parameter: Tensor) -> str | None:
        """What a parameter is called in the module that holds it; None if no function holds one, as if a call makes it."""
        modules = [each for each in self._seen.values() if isinstance(each, nn.Module)]
        named = ((f"'{path}' of a {type(one).__name__}", x) for one in modules for path, x in one.named_parameters())
        return next((name for name, x in named if x is parameter), None)


class OneCall:
    """``run(members, ...)`` for groups of members, each of which finds what functions ``held`` as the first one does.

    :meth:`end` makes ``[M, ...]`` of members' tensors that were left there, and of numbers that differ between groups.
    """

    def __init__(self, run: Callable[..., Any], held: Snapshot, count: int):
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
                put(holder, key, pytree.tree_map(functools.partial(_joined, sizes), *parts))


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
    try:
        return bool(state == other)
    except (ValueError, RuntimeError):  # There are arrays in it.
        pairs = zip(leaves(state), leaves(other), strict=True)
        return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in pairs)
