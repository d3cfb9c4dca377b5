"""Lion."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, pair_of

LionState = namedtuple("LionState", [*FIELDS, "exp_avg"])
"""Averages of the gradients."""


@recorded
def lion(
    lr: PerModel = 1e-4,
    betas: tuple[PerModel, PerModel] = (0.9, 0.99),
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Lion: steps of equal size in every entry, with the sign of an average.

    With gradient g: ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``;
    ``m = beta2 * m + (1 - beta2) * g``.

    Args:
        lr: Learning rate, typically three to ten times smaller than Adam's.
        betas: The average's weight in the step, and its decay rate; ``beta1`` and ``beta2`` in the state.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = lion(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """
    hyperparams = Hyperparams(LionState, lr=lr, **pair_of(betas), weight_decay=weight_decay)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor) -> Tensor:
        direction = torch.lerp(mean, grad, k["1-beta1"]).sign_()
        decay_mean(mean, grad, k["1-beta2"])
        return direction

    return leafwise(LionState, hyperparams.without_zeros("weight_decay"), rule, decoupled=True, maximize=maximize)
