"""Optimizers whose direction is a momentum: SGD, Lion."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, pair_of

SGDState = namedtuple("SGDState", [*FIELDS, "momentum"])
"""Momentum buffers, if there is momentum."""


@recorded
def sgd(
    lr: PerModel = 1e-3,
    momentum: PerModel = 0.0,
    dampening: PerModel = 0.0,
    weight_decay: PerModel = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` computes it.

    With gradient g and momentum buffer b: ``g += weight_decay * p``; ``b = momentum * b + (1 - dampening) * g`` (``b = g``
    at the first update); ``p -= lr * b``, or ``p -= lr * (g + momentum * b)`` with ``nesterov``.

    Args:
        lr: Learning rate.
        momentum: Momentum factor. For this and the next two, the plain number 0 removes the term from the program; to
            switch it on later, give one number per member.
        dampening: Fraction of each gradient that does not enter the momentum buffer. No effect where momentum is 0.
        weight_decay: L2 penalty added to the gradient.
        nesterov: Nesterov's momentum.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = sgd(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    """
    hyperparams = Hyperparams(SGDState, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    hyperparams = hyperparams.without_zeros("momentum", "dampening")

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        if "dampening" in at and "momentum" in at:
            at["fresh"] = torch.where((count == 1) | (at["momentum"] == 0), 1.0, 1 - at["dampening"])

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], *buffers: Tensor) -> Tensor:
        if not buffers:
            return grad
        buffer = buffers[0].mul_(k["momentum"]).add_(grad * k["fresh"] if "fresh" in k else grad)
        return grad + k["momentum"] * buffer if nesterov else buffer

    unused = () if "momentum" in hyperparams else ("momentum",)
    return leafwise(SGDState, hyperparams, rule, prepare, unused=unused, maximize=maximize)


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

    return leafwise(LionState, hyperparams, rule, decoupled=True, maximize=maximize)
