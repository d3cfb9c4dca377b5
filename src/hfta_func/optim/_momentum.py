"""Optimizers whose direction is a momentum: SGD, Lion, AdEMAMix."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

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


AdEMAMixState = namedtuple("AdEMAMixState", [*FIELDS, "exp_avg", "exp_avg_slow", "exp_avg_sq"])
"""Fast and slow averages of the gradients, and averages of their squares."""
restrict(AdEMAMixState, beta3=Range.DECAY, alpha=Range.NONNEGATIVE, warmup=Range.NONNEGATIVE)


@recorded
def ademamix(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel, PerModel] = (0.9, 0.999, 0.9999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    alpha: PerModel = 5.0,
    warmup: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """AdEMAMix: AdamW with a second, slow average of the gradients, which remembers tens of thousands of them.

    With gradient g at update t: ``m1 = beta1 * m1 + (1 - beta1) * g``; ``m2 = beta3 * m2 + (1 - beta3) * g``;
    ``v = beta2 * v + (1 - beta2) * g^2``;
    ``p -= lr * ((m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p)``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the fast average, the squares and the slow average: ``beta1``, ``beta2``, ``beta3``.
        eps: Added to the denominator.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        alpha: Weight of the slow average.
        warmup: Number of updates in which ``alpha`` rises from 0 and the slow average's decay rate from ``beta1``; the
            paper takes the number of all updates.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = ademamix(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0005])

    References:
        Pagliardini, Ablin and Grangier, "The AdEMAMix optimizer: better, faster, older", ICLR 2025, algorithm 1.
    """
    rates = dict(zip(("beta1", "beta2", "beta3"), betas, strict=True))
    hyperparams = Hyperparams(
        AdEMAMixState, lr=lr, **rates, eps=eps, weight_decay=weight_decay, alpha=alpha, warmup=warmup
    )

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        part = torch.where(count < at["warmup"], count / at["warmup"], 1.0)
        # The memory of the slow average rises linearly, as 1 / log(beta) does.
        inverse = (1 - part) / at["beta1"].log() + part / at["beta3"].log()
        slow = torch.where(part < 1, inverse.reciprocal().exp().minimum(at["beta3"]), at["beta3"])
        at["1-beta3"] = 1 - slow
        # Bias corrections move into numbers per member, outside the leaves.
        root, correction = (1 - at["beta2"] ** count).sqrt(), 1 - at["beta1"] ** count
        at["step"], at["eps"] = -at["lr"] * root / correction, at["eps"] * root
        at["mix"] = part * at["alpha"] * correction

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], fast: Tensor, slow: Tensor, square: Tensor) -> Tensor:
        decay_mean(fast, grad, k["1-beta1"])
        decay_mean(slow, grad, k["1-beta3"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        return (fast + slow * k["mix"]).div_(square.sqrt().add_(k["eps"]))

    return leafwise(AdEMAMixState, hyperparams, rule, prepare, decoupled=True, maximize=maximize)
