"""RMSprop."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise

RMSpropState = namedtuple("RMSpropState", [*FIELDS, "square_avg", "grad_avg", "momentum"])
"""Averages of the squared gradients and, with ``centered``, of the gradients; momentum buffers if there is momentum."""
restrict(RMSpropState, alpha=Range.DECAY)


@recorded
def rmsprop(
    lr: PerModel = 1e-2,
    alpha: PerModel = 0.99,
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    momentum: PerModel = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """RMSprop, as ``torch.optim.RMSprop`` computes it.

    With gradient g: ``v = alpha * v + (1 - alpha) * g^2``; ``b = momentum * b + g / (sqrt(v) + eps)``; ``p -= lr * b``. With
    ``centered``, the square of an average of the gradients is subtracted from v under the root.

    Args:
        lr: Learning rate.
        alpha: Decay rate of the averages.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        momentum: Momentum factor. The plain number 0 removes the term from the program.
        centered: Divide by an estimate of the standard deviation instead.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = rmsprop(lr=[0.01, 0.1]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Tieleman and Hinton, "Lecture 6.5: RMSProp", Coursera, 2012.
        Graves, "Generating sequences with recurrent neural networks", arXiv:1308.0850, 2013 (``centered``).
    """
    hyperparams = Hyperparams(RMSpropState, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    hyperparams = hyperparams.without_zeros("weight_decay", "momentum")
    unused = (() if centered else ("grad_avg",)) + (() if "momentum" in hyperparams else ("momentum",))

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], square: Tensor, *others: Tensor) -> Tensor:
        decay_square(square, k["alpha"], grad, k["1-alpha"])
        variance = square
        if centered:
            mean = decay_mean(others[0], grad, k["1-alpha"])
            variance = torch.addcmul(square, mean, mean, value=-1)
        scaled = grad / variance.sqrt().add_(k["eps"])
        return others[-1].mul_(k["momentum"]).add_(scaled) if "momentum" in k else scaled

    return leafwise(RMSpropState, hyperparams, rule, unused=unused, maximize=maximize)
