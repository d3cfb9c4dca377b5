"""Replaces hyperparameters in a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func._types import HYPERPARAMS
from hfta_func.optim._base import labels, per_member
from hfta_func.optim._wrappers import PartitionState

S = TypeVar("S")


def with_hyperparams(state: S, **new: Any) -> S:
    """The same state with other hyperparameters. A compiled step is not compiled again.

    Args:
        state: A training or optimizer state.
        new: By name, a number, one number per member, or a function of the current values, ``float64[M] -> float64[M]``.
            For a schedule, these replace its initial value, and a dict replaces its knobs by name.

    Raises:
        HyperparameterError: if no part of the state has a hyperparameter of that name, or a value is NaN, out of range
            or of the wrong length.

    Example:
        >>> optimizer = sgd(lr=0.1)
        >>> state = optimizer.init({"w": torch.zeros(2, 3)})
        >>> with_hyperparams(state, lr=[0.1, 0.2]).hyperparams["lr"]
        tensor([0.1000, 0.2000], dtype=torch.float64)
        >>> with_hyperparams(state, lr=lambda lr: lr / 2).hyperparams["lr"]
        tensor([0.0500, 0.0500], dtype=torch.float64)
    """
    known: set[str] = set()
    changed = _replace(state, new, known)
    unknown = [name for name in new if name not in known]
    if unknown:
        raise HyperparameterError(
            f"unknown hyperparameter '{unknown[0]}'; this state has {', '.join(sorted(known)) or 'none'} (the plain "
            f"number 0 leaves one out; to keep it, give one number per model)"
        )
    return changed


def _replace(node: Any, new: Mapping[str, Any], known: set[str]) -> Any:
    if isinstance(node, PartitionState):
        return PartitionState({name: _replace_group(name, child, new, known) for name, child in node.groups.items()})
    if not isinstance(node, tuple):
        return node
    names: tuple[str, ...] | None = getattr(node, "_fields", None)
    if names is None:
        return tuple(_replace(child, new, known) for child in node)
    fields: dict[str, Any] = {}
    for field, value in zip(names, node, strict=True):
        if field in HYPERPARAMS:
            known.update(value)
            fields[field] = {
                name: _renew(name, held, new[name]) if name in new else held for name, held in value.items()
            }
        else:
            fields[field] = _replace(value, new, known)
    return type(node)(**fields)


def _replace_group(group: str, node: Any, new: Mapping[str, Any], known: set[str]) -> Any:
    """A value for ``"group.name"`` takes precedence over one for ``"name"``."""
    own = {name.removeprefix(f"{group}."): value for name, value in new.items() if name.startswith(f"{group}.")}
    found: set[str] = set()
    changed = _replace(node, {**new, **own}, found)
    known |= found | {f"{group}.{name}" for name in found}
    return changed


def _renew(name: str, held: Any, value: Any) -> Any:
    if isinstance(held, Tensor):
        value = value(held) if callable(value) else value
        return per_member(name, value, held.shape[0], held.device).to(held.dtype)
    changes = value if isinstance(value, Mapping) else {next(iter(held)): value}
    unknown = [knob for knob in changes if knob not in held]
    if unknown:
        raise HyperparameterError(f"unknown knob '{unknown[0]}' of the schedule of {name}; it has {', '.join(held)}")
    return {
        knob: _renew(label, held[knob], changes[knob]) if knob in changes else held[knob]
        for knob, label in labels(name, held).items()
    }
