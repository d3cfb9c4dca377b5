"""Plain attributes of a model, which belong to no member and so must carry no state from call to call.

Within a call they may carry values, such as an auxiliary loss that a layer assigns and the loss function reads. After a call
all attributes are restored, and a model whose results depend on what an earlier call has assigned is refused.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, pytree, writes
from hfta_func._torch import first_member as first_member
from hfta_func.calls.body import Body
from hfta_func.calls.captured import drawn_state
from hfta_func.errors import RandomnessError, StateError
from hfta_func.models.structure import UNSET, equal

# Hooks, which no call changes, make up most of a module.
_MODULE = MODULE_ATTRIBUTES - {"training", "_flat_weights"}
_HOOKS = {name for name in MODULE_ATTRIBUTES if name.endswith("_hooks")}
_CHILDREN = ("_parameters", "_buffers", "_modules")
_WHOLE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)

Undoing = tuple[Any, "str | None", Any]
"""A module, the name of an attribute and its old value; or a container, None and a copy of its old content."""


class Attributes:
    """A record of the plain attributes of a model's modules, and of their contents, at the time when it is made."""

    def __init__(self, model: nn.Module):
        # Each entry has a path, the object there, and a copy; namespaces are the attributes of an object, by name.
        self._namespaces: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._generators: list[tuple[str, Any, Any]] = []
        # Compared after the first call only, because they are many.
        self._hooks: list[tuple[str, Any, int]] = []
        self._seen: dict[int, Any] = {}
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            self._hold_names(prefix, module, _MODULE)
            hooks = [held for name, held in vars(module).items() if name in _HOOKS]
            self._hooks += [(path, held, len(held)) for held in hooks]
            members = [vars(module)[kind] for kind in _CHILDREN]
            self._namespaces += [(prefix, module, names, names.copy()) for names in members]

    def _hold_names(self, prefix: str, owner: Any, skipped: frozenset[str] = frozenset()) -> None:
        names = vars(owner)
        self._namespaces.append((prefix, owner, names, names.copy()))
        for name, value in names.items():
            if name not in skipped:
                self._hold(prefix + name, value)

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
                self._containers.append((path, value, value.copy()))
            for part in _parts(value):
                self._hold(path, part)
        elif (state := drawn_state(value)) is not None:
            self._generators.append((path, value, state))
        elif hasattr(value, "__dict__"):
            self._hold_names(f"{path}.", value)

    def changed(self) -> dict[str, Any]:
        """The current values at all paths that have been assigned, added, removed or written in place."""
        hooks, self._hooks = self._hooks, []
        for path, held, count in hooks:
            if len(held) > count:
                where = f"module '{path}'" if path else "the model"
                raise StateError(
                    f"a call registers a hook on {where} and leaves it there, for all later calls of all members; register "
                    f"it in __init__, or remove it in the call: handle.remove()"
                )
        for path, generator, state in self._generators:
            if not equal(drawn_state(generator), state, set(), {}):
                raise RandomnessError(
                    f"the model draws from its generator '{path}' ({type(generator).__name__}), which all members would "
                    f"share; draw with torch.rand or torch.randn without a generator, which take the member's own key"
                )
        changes: dict[str, Any] = {path: held for path, held, before in self._containers if _differ(held, before)}
        for prefix, _, names, before in self._namespaces:
            # Most are unchanged, which this test finds out quickly.
            if len(names) != len(before) or (before and any(map(operator.is_not, names.values(), before.values()))):
                for name in {**before, **names}:
                    if names.get(name, UNSET) is not before.get(name, UNSET):
                        changes[prefix + name] = names.get(name, UNSET)
        return changes | self.written()

    def written(self) -> dict[str, Tensor]:
        """The tensors that have been written in place, by path."""
        return {path: tensor for path, tensor, count in self._tensors if writes(tensor) != count}

    def undoing(self, paths: Collection[str]) -> list[Undoing]:
        """What :func:`undo` needs to restore the values at ``paths``."""
        changes: dict[str, Undoing] = {}
        for prefix, owner, names, before in self._namespaces:
            for path in paths:
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and "." not in name and (name in before or path not in changes):
                    is_module = isinstance(owner, nn.Module)
                    changes[path] = (owner, name, before.get(name, UNSET)) if is_module else (names, None, before)
        return [*changes.values(), *((held, None, before) for path, held, before in self._containers if path in paths)]


def undo(changes: Iterable[Undoing]) -> None:
    """Restore what was assigned, added or removed; a compiler traces this."""
    for owner, name, before in changes:
        if name is None:
            owner.clear()
            owner.extend(before) if isinstance(owner, list | collections.deque) else owner.update(before)
        elif before is UNSET:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _parts(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


def _differ(held: Any, before: Any) -> bool:
    return len(held) != len(before) or any(map(operator.is_not, _parts(held), _parts(before)))


def check_no_carrying(run: Callable[..., Any], make: Callable[[], Body], evaluates: bool) -> None:
    """Raise a StateError if results of a call depend on what an earlier call has assigned to attributes.

    Args:
        run: ``run(body, params_altered, inputs_altered, buffers)`` calls a model and returns its results and new buffers;
            with None it uses the buffers given.
        make: Makes a body that has not been called.
        evaluates: Whether all calls evaluate, so that the model trains in between if its parameters change.
    """
    for first, retrained in itertools.product((False, True), (False, True) if evaluates else (True,)):
        body = make()
        attributes = Attributes(body.model)
        _, buffers = _copied(run(body, first, first, None))
        if evaluates and retrained:
            _retrain(body.model, attributes)
        others, after = _outcome(run, body, attributes, first is not retrained, not first, buffers)
        body = make()
        results, alone = _outcome(run, body, Attributes(body.model), first is not retrained, not first, buffers)
        differing = {path for path in alone.keys() & after.keys() if not _agree(alone[path], after[path])}
        # Members that run as one cannot write different values into one tensor.
        carried = differing | (alone.keys() ^ after.keys()) | attributes.written().keys()
        if carried or not _agree(results, others):
            names = ", ".join(map(repr, sorted(carried or alone)))
            raise StateError(
                f"the model carries {names} from one call to the next outside its buffers, where it belongs to no member and "
                f"no state; make it a buffer, self.register_buffer(name, tensor) in __init__, and write a tensor to that, or "
                f"report it instead, as a metric of the loss or by self.log of a LightningModule"
            )


def _retrain(model: nn.Module, attributes: Attributes) -> None:
    """Switch a model that evaluates to training and back, where caches of what parameters give are dropped."""
    called = attributes.changed().keys()
    for mode in (True, False):
        # One that cannot train drops none.
        with contextlib.suppress(Exception):
            model.train(mode)
    # What only switches change, such as a count of them, is as the array has it, whose models never switch.
    undo(attributes.undoing(attributes.changed().keys() - called))


def _outcome(run: Callable[..., Any], body: Body, attributes: Attributes, *given: Any) -> Any:
    results = run(body, *given)
    return _copied((results, attributes.changed()))


def _copied(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _agree(a: Any, b: Any) -> bool:
    """Equality of two results, up to the rounding of kernels whose results are not reproducible to the bit."""
    (leaves, spec), (other_leaves, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_alike, leaves, other_leaves))


def _alike(a: Any, b: Any) -> bool:
    floats = isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and not a.is_meta
    if floats and a.shape == b.shape and a.dtype == b.dtype:
        return torch.allclose(a, b, rtol=1e-4, equal_nan=True)
    return equal(a, b, set(), {})
