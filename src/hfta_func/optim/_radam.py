"""Rectified Adam."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

RAdamState = namedtuple("RAdamState", [*FIELDS, "exp_avg", "exp_avg_sq"])
"""Averages of the gradients and of their squares."""


@recorded
def radam(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam that uses its second moment once that is reliable, as ``torch.optim.RAdam`` computes it.

    With Adam's averages m and v at update t, ``R = 2 / (1 - beta2) - 1`` and ``r = R - 2 t beta2^t / (1 - beta2^t)``:
    ``p -= lr * m / (1 - beta1^t) * s``, where s is 1 while ``r <= 5``, and from then on
    ``sqrt((1 - beta2^t) (r - 4) (r - 2) R / ((R - 4) (R - 2) r)) / (sqrt(v) + eps)``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        decoupled_weight_decay: Subtract ``lr * weight_decay * p`` instead.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = radam(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020.
    """
    hyperparams = Hyperparams(RAdamState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        left = 1 - at["beta2"] ** count
        most = 2 / (1 - at["beta2"]) - 1
        length = most - 2 * count * at["beta2"] ** count / left
        rectified = length > 5
        # Negative where it is not rectified, so the root is taken after where().
        inside = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        at["step"] = -at["lr"] / (1 - at["beta1"] ** count) * torch.where(rectified, inside * left, 1.0).sqrt()
        # A member that is not rectified divides by 1.
        at["rectified"], at["plain"] = rectified.to(torch.float64), (~rectified).to(torch.float64)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        return mean / square.sqrt().add_(k["eps"]).mul_(k["rectified"]).add_(k["plain"])

    hyperparams = hyperparams.without_zeros("weight_decay")
    return leafwise(RAdamState, hyperparams, rule, prepare, decoupled=decoupled_weight_decay, maximize=maximize)
