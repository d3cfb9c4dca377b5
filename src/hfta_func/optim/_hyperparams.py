"""Changes hyperparameters in a state: to given values, or where a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hfta_func._types import HPARAMS, HYPERPARAMS, SIGNS, Shared, direction_of
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import Range, check, check_choice, labelled, per_member, range_of, vector
from hfta_func.optim._transforms import PartitionState

S = TypeVar("S")
Numbers = float | Sequence[float] | Tensor


def with_hyperparams(state: S, **new: Any) -> S:
    """A copy of the state with other hyperparameters. A compiled step is not recompiled.

    Args:
        state: A training or optimizer state.
        new: By name, a number, one number per member, or a function of the current values, ``float64[M] -> float64[M]``.
            For a schedule, these replace its initial value, and a dict replaces its hyperparameters by name. If the
            optimizer and the loss function both have an ``lr``, then ``"lr"`` is the optimizer's and ``"hparams.lr"`` the
            loss function's. ``"shared.lr"`` is the ``lr`` of the optimizer of shared parameters.

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
        names = ", ".join(sorted(name for name in known if not name.startswith(f"{HPARAMS}."))) or "none"
        why = f"unknown hyperparameter '{unknown[0]}'; this state has {names}"
        raise HyperparameterError(f"{why} (the plain number 0 leaves one out; to keep it, give one number per model)")
    return changed


def plateau(
    metric: str,
    hyperparameter: str = "lr",
    mode: Literal["min", "max"] = "min",
    factor: Numbers = 0.1,
    patience: Numbers = 10,
    threshold: Numbers = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: Numbers = 0,
    min_lr: Numbers = 0.0,
    eps: Numbers = 1e-8,
) -> Callable[[S, Any], S]:
    """Reduce a hyperparameter where the metric stops improving, as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does.

    A callback for ``fit(callbacks=[...])``. It keeps no state: the epochs so far determine which members are reduced.
    In a hand-written loop, call it once per epoch with a dict of metrics ``[epochs, M]``.

    Args:
        metric: Name in the history, one number per member.
        hyperparameter: Name of what to reduce; in a schedule, its initial value.
        mode: Whether lower or higher is better.
        factor: Factor of each reduction, below 1. This and the other numbers may be one per member.
        patience: Epochs without improvement before the one that causes a reduction.
        threshold: Smallest change that counts as an improvement.
        threshold_mode: Whether the threshold is relative to the best value.
        cooldown: Epochs after a reduction in which the lack of improvement does not count.
        min_lr: Lower bound of the hyperparameter.
        eps: Smaller reductions are not made.

    Returns:
        ``callback(state, history) -> state``, for training and optimizer states.

    Raises:
        HyperparameterError: if a number is out of range or a mode unknown, or (by the callback) if the metric is not one
            number per member or the state has no such hyperparameter.

    Example:
        >>> reduce, losses = plateau("loss", patience=1), torch.tensor([[1.0, 1.0], [1.0, 0.9], [1.0, 0.8]])
        >>> state = sgd(lr=[0.1, 0.2]).init({"w": torch.zeros(2, 1)})
        >>> for epochs in (1, 2, 3):
        ...     state = reduce(state, {"loss": losses[:epochs]})
        >>> state.hyperparams["lr"]
        tensor([0.0100, 0.2000], dtype=torch.float64)
    """
    sign = SIGNS[direction_of(mode)]
    check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
    numbers = {"factor": factor, "patience": patience, "threshold": threshold, "cooldown": cooldown}
    numbers |= {"min_lr": min_lr, "eps": eps}
    for name, number in numbers.items():
        check(name, number, Range.DECAY if name == "factor" else Range.FINITE)

    def is_due(metrics: Tensor, k: dict[str, Tensor], since: Tensor) -> Tensor:
        best, bad = torch.full_like(k["eps"], math.inf), torch.zeros_like(k["eps"])
        cooling, due = bad, bad > 0
        for epoch, value in enumerate(sign * metrics):
            limit = best * (1 - sign * k["threshold"]) if threshold_mode == "rel" else best - k["threshold"]
            better = value < limit
            best = torch.where(better, value, best)
            # A member that joined the array later has not seen the earlier epochs.
            bad = torch.where(better | (cooling > 0) | (since > epoch), 0.0, bad + 1)
            due = bad > k["patience"]
            cooling = torch.where(due, k["cooldown"], (cooling - 1).clamp(min=0))
            bad = bad * ~due
        return due

    def callback(state: S, history: Any) -> S:
        metrics = history[metric].detach().double()
        since = torch.zeros(metrics.shape[1:2])
        # A hand-written loop passes a dict whose metrics already have one column per present member.
        if hasattr(history, "members") and metrics.shape[1:] == history.seeds.shape:
            metrics, since = metrics[:, history.members], history.since[history.members]

        def reduced(value: Tensor) -> Tensor:
            k = {name: vector(name, number, len(value), value.device) for name, number in numbers.items()}
            lower = torch.maximum(value * k["factor"], k["min_lr"])
            due = is_due(metrics.to(value.device), k, since.to(value.device))
            return torch.where(due & (value - lower > k["eps"]), lower, value)

        return with_hyperparams(state, **{hyperparameter: reduced})

    return callback


def _replace(node: Any, new: Mapping[str, Any], known: set[str]) -> Any:
    if isinstance(node, PartitionState):
        return PartitionState({name: _within(name, child, new, known) for name, child in node.groups.items()})
    if isinstance(node, Shared):
        return node._replace(opt_state=_within("shared", node.opt_state, new, known, is_alone=True))
    if not isinstance(node, tuple):
        return node
    names: tuple[str, ...] | None = getattr(node, "_fields", None)
    if names is None:
        return tuple(_replace(child, new, known) for child in node)
    fields: dict[str, Any] = {}
    # The loss function's come last, because a plain name that the optimizer has is the optimizer's.
    for field, value in sorted(zip(names, node, strict=True), key=lambda pair: pair[0] == HPARAMS):
        if field == HPARAMS:
            changes = {name: new[name] for name in value if name in new and name not in known}
            changes |= {name: new[f"{field}.{name}"] for name in value if f"{field}.{name}" in new}
            fields[field] = value | {name: _renew(name, value[name], x, Range.FINITE) for name, x in changes.items()}
            known.update(value, (f"{field}.{name}" for name in value))
        elif field in HYPERPARAMS:
            known.update(value)
            fields[field] = value | {
                name: _renew(name, value[name], new[name], range_of(type(node), name)) for name in value if name in new
            }
        else:
            fields[field] = _replace(value, new, known)
    return type(node)(**fields)


def _within(group: str, node: Any, new: Mapping[str, Any], known: set[str], is_alone: bool = False) -> Any:
    """A value for ``"group.name"`` takes precedence over one for ``"name"``, or is alone."""
    dotted = {name.removeprefix(f"{group}."): value for name, value in new.items() if name.startswith(f"{group}.")}
    inner = set[str]()
    changed = _replace(node, dotted if is_alone else {**new, **dotted}, inner)
    known |= {f"{group}.{name}" for name in inner} | (set() if is_alone else inner)
    return changed


def _renew(name: str, old: Any, value: Any, allowed: Range) -> Any:
    if isinstance(old, Tensor):
        value = value(old) if callable(value) else value
        return per_member(name, value, old.shape[0], old.device, allowed).to(old.dtype)
    changes = value if isinstance(value, Mapping) else {next(iter(old)): value}
    unknown, known = [inner for inner in changes if inner not in old], ", ".join(old)
    if unknown:
        raise HyperparameterError(f"unknown hyperparameter '{unknown[0]}' of the schedule of {name}; it has {known}")
    return {
        inner: _renew(label, old[inner], changes[inner], limits) if inner in changes else old[inner]
        for inner, label, limits in labelled(name, allowed, old)
    }
