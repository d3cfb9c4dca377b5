"""Lion."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs
from hfta_func.optim._leafwise import decay_mean, leafwise, zeros


class LionState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its averages of gradients."""

    step: Tensor
    hyperparams: dict[str, Any]
    exp_avg: Params


def lion(
    lr: PerModel = 1e-4,
    betas: tuple[PerModel, PerModel] = (0.9, 0.99),
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Lion: steps of one size in the direction of a sign.

    With gradient g: ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``;
    ``m = beta2 * m + (1 - beta2) * g``.

    Args:
        lr: Learning rate, some three to ten times smaller than Adam's.
        betas: Weight of the average in the step, and its decay; in the state they are ``beta1`` and ``beta2``.
        weight_decay: Decay, multiplied by the learning rate; the plain number 0 leaves it out of the program.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = lion(lr=[0.1, 1.0])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """
    knobs = Knobs(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["1-beta1"], at["1-beta2"], at["step"] = 1 - at["beta1"], 1 - at["beta2"], -at["lr"]

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor) -> Tensor:
        direction = torch.lerp(mean, grad, k["1-beta1"]).sign_()
        decay_mean(mean, grad, k["1-beta2"])
        return direction

    return leafwise(
        LionState,
        knobs.without_zeros("weight_decay"),
        rule,
        slots={"exp_avg": zeros},
        prepare=prepare,
        decay="decoupled",
        maximize=maximize,
    )
