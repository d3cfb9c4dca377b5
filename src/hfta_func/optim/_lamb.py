"""LAMB."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

LambState = namedtuple("LambState", [*FIELDS, "exp_avg", "exp_avg_sq"])
"""Averages of the gradients and of their squares."""


@recorded
def lamb(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-6,
    weight_decay: PerModel = 1e-2,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """LAMB: Adam with each parameter's step scaled to the norm of the parameter.

    With Adam's averages m and v at update t: ``u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p``;
    ``p -= lr * |p| / |u| * u``, with L2 norms over each member's parameter. Where a norm is 0, their ratio counts as 1.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: Decay rate, part of the step that is scaled.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = lamb(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, algorithm 2.
    """
    hyperparams = Hyperparams(LambState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["left1"], at["left2"] = 1 - at["beta1"] ** count, 1 - at["beta2"] ** count
        # Renamed, because it counts towards the norm, so leafwise must not apply it.
        at["inner decay"] = at.pop("weight_decay")

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        direction = (
            (mean / k["left1"]).div_((square / k["left2"]).sqrt_().add_(k["eps"])).add_(param * k["inner decay"])
        )
        length, step = (torch.linalg.vector_norm(x.reshape(x.shape[0], -1), dim=1) for x in (param, direction))
        ratio = torch.where((length > 0) & (step > 0), length / step, 1.0)
        return direction.mul_(per_model(ratio, param))

    return leafwise(LambState, hyperparams, rule, prepare, maximize=maximize, elementwise=False)
