"""Reduction of hyperparameters on a plateau of a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func.optim._base import Range, check, check_choice, vector
from hfta_func.optim._hyperparams import with_hyperparams

S = TypeVar("S")
Numbers = float | Sequence[float] | Tensor


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

    A callback for ``fit(callbacks=[...])`` that keeps no state of its own: all epochs so far determine which members are
    due now. In a hand-written loop, call it once per epoch with a dict of metrics ``[epochs, M]``.

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
        eps: Reductions up to this are not made.

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
    check_choice("mode", mode, ("min", "max"))
    check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
    numbers = {"factor": factor, "patience": patience, "threshold": threshold, "cooldown": cooldown}
    numbers |= {"min_lr": min_lr, "eps": eps}
    for name, number in numbers.items():
        check(name, number, Range.DECAY if name == "factor" else Range.FINITE)
    sign = 1 if mode == "min" else -1

    def is_due(metrics: Tensor, k: dict[str, Tensor]) -> Tensor:
        best, bad = torch.full_like(k["eps"], math.inf), torch.zeros_like(k["eps"])
        resting, due = bad, bad > 0
        for value in sign * metrics:
            limit = best * (1 - sign * k["threshold"]) if threshold_mode == "rel" else best - k["threshold"]
            better = value < limit
            best = torch.where(better, value, best)
            bad = torch.where(better | (resting > 0), 0.0, bad + 1)
            due = bad > k["patience"]
            bad, resting = bad * ~due, torch.where(due, k["cooldown"], (resting - 1).clamp(min=0))
        return due

    def callback(state: S, history: Any) -> S:
        metrics = history[metric].detach().double()

        def reduced(held: Tensor) -> Tensor:
            if metrics.shape[1:] != held.shape:
                raise HyperparameterError(
                    f"metric '{metric}' has shape {list(metrics.shape[1:])} per epoch but {hyperparameter} has "
                    f"{list(held.shape)}; plateau needs one number per model"
                )
            k = {name: vector(name, number, len(held), held.device) for name, number in numbers.items()}
            lower = torch.maximum(held * k["factor"], k["min_lr"])
            return torch.where(is_due(metrics.to(held.device), k) & (held - lower > k["eps"]), lower, held)

        return with_hyperparams(state, **{hyperparameter: reduced})

    return callback
