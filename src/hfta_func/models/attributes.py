"""What a model's modules hold besides their tensors: what a call changes there is undone after it, but for counters.

Within a call attributes may carry values, such as an auxiliary loss that a layer assigns and the loss function reads. A
counter, a number that each call changes, goes on in the model that functions were made of. A model whose results depend on
anything else that an earlier call has left, such as the hidden state of a recurrent network, is refused.
"""

from __future__ import annotations

import collections
import functools
import gc
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, Places, is_wrapped, pytree, writes
from hfta_func.calls.body import Body, Reference, contents
from hfta_func.errors import StateError
from hfta_func.models.scalar_attributes import assign, is_number

_CHILDREN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
CONTAINERS = (dict, list, set, collections.deque)
_WHOLE = (str, int, float, type(None), type, types.ModuleType, nn.Module)
_DEPTH = 8
_UNSET = object()

Undoing = tuple[Any, "str | None", Any]
"""A module, the name of an attribute and its old value; or a container, None and a copy of its old content."""


class Snapshot:
    """What modules hold in plain attributes, containers in these, and hooks, as it is when this is made.

    Args:
        model: The model.
        functions: Whether to follow functions, too, to the variables of their closures.
    """

    def __init__(self, model: nn.Module, functions: bool = False):
        self._functions = functions
        # The path of a container, or with a module that holds it, the prefix of paths; the container, and a copy.
        self._contents: list[tuple[str, nn.Module | None, Any, Any]] = []
        self._cells: list[types.CellType] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._seen: dict[int, Any] = {}
        for path, module in model.named_modules():
            prefix, names = f"{path}." if path else "", vars(module)
            self._contents += [(prefix, module, x, x.copy()) for x in (names, *(names[kind] for kind in _CHILDREN))]
            self._contents += [(prefix + name, None, names[name], names[name].copy()) for name in _HOOKS]
            for name in names.keys() - MODULE_ATTRIBUTES:
                self._hold(prefix + name, names[name], 1)
            for hook in (hook for name in _HOOKS for hook in names[name].values() if functions):
                self._hold(prefix, hook, 1)

    def _hold(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH or isinstance(value, _WHOLE):
            return
        self._seen[id(value)] = value
        parts: Iterable[Any] = ()
        if isinstance(value, Tensor):
            # Tensors made in inference mode count no writes.
            if not (value.is_inference() or value.is_meta or is_wrapped(value)):
                self._tensors.append((path, value, writes(value)))
        elif isinstance(value, CONTAINERS):
            self._contents.append((path, None, value, value.copy()))
            parts = [*(value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, types.FunctionType):
            parts = value.__closure__ or () if self._functions else ()
        elif isinstance(value, types.MethodType | functools.partial):
            parts = gc.get_referents(value) if self._functions else ()
        elif isinstance(value, types.CellType):
            self._cells.append(value)
            parts = contents(value)
        elif isinstance(value, tuple):
            parts = value
        elif hasattr(value, "__dict__"):
            parts = (vars(value),)
        for part in parts:
            self._hold(path, part, depth + 1)

    def changed(self) -> dict[str, Any]:
        """The current values at all paths that have been assigned, added, removed or written in place."""
        changes: dict[str, Any] = {path: tensor for path, tensor, count in self._tensors if writes(tensor) != count}
        for path, module, held, before in self._contents:
            # Most hold nothing, as do the hooks of a module.
            if not (held or before) or not is_changed(held, before):
                continue
            if module is None:
                changes[path] = held
            else:
                names = [name for name in {**before, **held} if held.get(name, _UNSET) is not before.get(name, _UNSET)]
                changes |= {path + name: held.get(name, _UNSET) for name in names}
        return changes

    def undoing(self, paths: Collection[str]) -> list[Undoing]:
        """What :func:`undo` needs to restore the values at ``paths``."""
        changes: dict[str, Undoing] = {}
        for prefix, module, held, before in self._contents:
            if module is None and prefix in paths:
                changes[f"{prefix} {id(held)}"] = held, None, before
            for path in paths if module is not None else ():
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and "." not in name and (name in before or path not in changes):
                    changes[path] = module, name, before.get(name, _UNSET)
        return [*changes.values()]

    def held(self) -> Iterator[tuple[Any, Any, Any]]:
        """All that is held by key or index: who holds it, its key there, and the value."""
        for _, module, content, before in self._contents:
            if not isinstance(content, set) and (module is None or content is vars(module)):
                entries = before.items() if isinstance(content, dict) else enumerate(before)
                yield from [(content, key, x) for key, x in entries if key not in MODULE_ATTRIBUTES]
        yield from [(cell, "", content) for cell in self._cells for content in contents(cell)]


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


def is_changed(held: Any, before: Any) -> bool:
    """Whether a container holds something else than its copy."""
    if isinstance(held, dict):
        return len(held) != len(before) or any(map(operator.is_not, held.values(), before.values()))
    return len(held) != len(before) or any(map(operator.is_not, held, before))


def aliases(model: nn.Module, places: Places) -> list[tuple[Any, Any, Any]]:
    """Where plain attributes hold parameters or buffers of the model, too, as in ``self.penalised = [self.fc.weight]``.

    Each is a list, a dict or a cell of a function, a key there, and a :class:`Reference` or a tuple with some.
    """
    tensors = {id(held[name]): Reference(held, name) for held, name in places.values() if held[name] is not None}

    def source(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [source(part) for part in value]
            return getattr(value, "_make", tuple)(parts) if any(map(operator.is_not, parts, value)) else value
        return tensors.get(id(value), value)

    held = Snapshot(model, functions=True).held()
    return [(holder, key, source(value)) for holder, key, value in held if source(value) is not value]


def examined(run: Callable[..., Any], make: Callable[[], tuple[Body, Snapshot]]) -> tuple[set[str], bool]:
    """The counters of a model, and whether its results depend on them.

    Args:
        run: ``run(body, altered, buffers)`` calls a model, also with other inputs, and returns its results and new buffers;
            with None it uses the buffers given.
        make: Makes a body that has not been called, and a snapshot of it.

    Raises:
        StateError: if results of a call depend on anything else that an earlier call has left.
    """
    counters: set[str] = set()
    is_read = False
    for altered in (True, False):
        body, attributes = make()
        buffers = _copied(run(body, altered, None)[1])
        left = attributes.changed()
        latest = Snapshot(body.model)
        results = _copied(run(body, not altered, buffers))
        again = latest.changed()
        # What each call sets to the same, such as ``self.size = len(x)``, counts nothing.
        counted = {path: x for path, x in left.items() if is_number(x) and again.get(path, x) != x}
        alone = []
        for numbers in (counted, {}):
            body, _ = make()
            assign(body.model, numbers)
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


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), tree)


def _agree(a: Any, b: Any) -> bool:
    """Equality of two results, up to the rounding of kernels whose results are not reproducible to the bit."""
    (leaves, spec), (other_leaves, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_alike, leaves, other_leaves))


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a is b or a == b)
    return a.shape == b.shape and (a.is_meta or torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True))
