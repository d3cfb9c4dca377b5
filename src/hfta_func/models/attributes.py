"""What a model's modules hold besides their tensors: what a call changes there is undone after it, but for counters.

Within a call attributes may carry values, such as an auxiliary loss that a layer assigns and the loss function reads. A
counter, a number that each call changes, goes on in the model that functions were made of. A model whose results depend on
anything else that an earlier call has left, such as the hidden state of a recurrent network, is refused.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, pytree, writes
from hfta_func._torch import first_member as first_member
from hfta_func.calls.body import Body
from hfta_func.errors import StateError
from hfta_func.models.scalar_attributes import is_number

# Hooks, which few calls change, make up most of a module.
_MODULE = MODULE_ATTRIBUTES - {"training", "_flat_weights"}
_HOOKS = {name for name in MODULE_ATTRIBUTES if name.endswith("_hooks")}
_CHILDREN = ("_parameters", "_buffers", "_modules")
_WHOLE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
_UNSET = object()

Undoing = tuple[Any, "str | None", Any]
"""A module, the name of an attribute and its old value; or a container, None and a copy of its old content."""


class Attributes:
    """A record of the plain attributes of a model's modules, and of their contents, at the time when it is made."""

    def __init__(self, model: nn.Module):
        # Each entry has a prefix of paths, a module or None, a container, and a copy; without a module, of one path.
        self._held: list[tuple[str, nn.Module | None, Any, Any]] = []
        self._hooks: list[tuple[str, None, Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._seen: dict[int, Any] = {}
        for path, module in model.named_modules():
            prefix, names = f"{path}." if path else "", vars(module)
            self._held += [
                (prefix, module, held, held.copy()) for held in (names, *(names[kind] for kind in _CHILDREN))
            ]
            self._hooks += [(prefix + name, None, names[name], names[name].copy()) for name in names.keys() & _HOOKS]
            for name in names.keys() - _MODULE:
                self._hold(prefix + name, names[name])

    def _hold(self, path: str, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, _WHOLE):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            # Tensors made in inference mode count no writes.
            if not value.is_inference():
                self._tensors.append((path, value, writes(value)))
        elif isinstance(value, dict | list | tuple | set | collections.deque):
            if not isinstance(value, tuple):
                self._held.append((path, None, value, value.copy()))
            for part in value.values() if isinstance(value, dict) else value:
                self._hold(path, part)
        elif hasattr(value, "__dict__"):
            self._hold(path, vars(value))

    def changed(self) -> dict[str, Any]:
        """The current values at all paths that have been assigned, added, removed or written in place."""
        changes: dict[str, Any] = {path: tensor for path, tensor, count in self._tensors if writes(tensor) != count}
        for path, module, held, before in self._held:
            if _differ(held, before) and module is None:
                changes[path] = held
            elif module is not None and _differ(held, before):
                names = [name for name in {**before, **held} if held.get(name, _UNSET) is not before.get(name, _UNSET)]
                changes |= {path + name: held.get(name, _UNSET) for name in names}
        left = {path: held for path, _, held, before in self._hooks if len(held) != len(before)}
        # They are many, so later calls look at those alone that the first one has left.
        self._hooks = [hook for hook in self._hooks if hook[0] in left]
        return changes | left

    def undoing(self, paths: Collection[str]) -> list[Undoing]:
        """What :func:`undo` needs to restore the values at ``paths``."""
        changes: dict[str, Undoing] = {}
        for prefix, module, held, before in (*self._held, *self._hooks):
            if module is None and prefix in paths:
                changes[f"{prefix} {id(held)}"] = held, None, before
            for path in paths if module is not None else ():
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and "." not in name and (name in before or path not in changes):
                    changes[path] = module, name, before.get(name, _UNSET)
        return [*changes.values()]


def undo(changes: Iterable[Undoing]) -> None:
    """Restore what was assigned, added or removed; a compiler traces this."""
    for owner, name, before in changes:
        if name is None:
            owner.clear()
            owner.extend(before) if isinstance(owner, list | collections.deque) else owner.update(before)
        elif before is _UNSET:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _differ(held: Any, before: Any) -> bool:
    parts = (each.values() if isinstance(each, dict) else each for each in (held, before))
    return len(held) != len(before) or any(map(operator.is_not, *parts))


def examined(run: Callable[..., Any], make: Callable[[], Body]) -> tuple[set[str], bool]:
    """The counters of a model, and whether its results depend on them.

    Args:
        run: ``run(body, altered, buffers)`` calls a model, also with other inputs, and returns its results and new buffers;
            with None it uses the buffers given.
        make: Makes a body that has not been called.

    Raises:
        StateError: if results of a call depend on anything else that an earlier call has left.
    """
    counters: set[str] = set()
    is_read = False
    for altered in (True, False):
        body = make()
        attributes = Attributes(body.model)
        buffers = _copied(run(body, altered, None)[1])
        left = attributes.changed()
        latest = Attributes(body.model)
        results = _copied(run(body, not altered, buffers))
        again = latest.changed()
        # What each call sets to the same, such as ``self.size = len(x)``, counts nothing.
        counted = {path: x for path, x in left.items() if is_number(x) and again.get(path, x) != x}
        alone = []
        for numbers in (counted, {}):
            body = make()
            count(body.model, numbers)
            alone.append(_copied(run(body, not altered, buffers)))
        if not _agree(results, alone[0]):
            names = ", ".join(map(repr, sorted((left.keys() | again.keys()) - counted.keys())))
            raise StateError(
                f"the model carries {names} from one call to the next outside its buffers, where it belongs to no member and "
                f"no state; make it a buffer, self.register_buffer(name, tensor) in __init__, and write a tensor to that, or "
                f"report it instead, as a metric of the loss or by self.log of a LightningModule; what only a first call "
                f"sets, set by calling each model once on a batch before stacking"
            )
        counters |= counted.keys()
        is_read |= not _agree(*alone)
    return counters, is_read


_pending: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("pending", default=None)


@contextlib.contextmanager
def as_one_call(counts: bool = True) -> Iterator[None]:
    """A block whose calls count as one, such as those of all groups of members in a step, or not at all."""
    if _pending.get() is not None:
        yield
        return
    pending: dict[Any, Any] = {}
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    for model, numbers in pending.values() if counts else ():
        count(model, numbers)


def count_later(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Set the counters of a model, after the block of :func:`as_one_call` if there is one."""
    if (pending := _pending.get()) is None:
        count(model, numbers)
    else:
        pending[id(model)] = model, numbers


def count(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Set the counters of a model."""
    for path, number in numbers.items():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, number)


def _copied(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _agree(a: Any, b: Any) -> bool:
    """Equality of two results, up to the rounding of kernels whose results are not reproducible to the bit."""
    (leaves, spec), (other_leaves, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_alike, leaves, other_leaves))


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a is b or a == b)
    return a.shape == b.shape and (a.is_meta or torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True))
