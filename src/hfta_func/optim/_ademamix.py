"""AdEMAMix."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise

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

    hyperparams = hyperparams.without_zeros("weight_decay")
    return leafwise(AdEMAMixState, hyperparams, rule, prepare, decoupled=True, maximize=maximize)
