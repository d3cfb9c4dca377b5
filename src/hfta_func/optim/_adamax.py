"""Adam with the infinity norm."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, pair_of

AdamaxState = namedtuple("AdamaxState", [*FIELDS, "exp_avg", "exp_inf"])
"""Averages of the gradients, and their decayed maximum magnitudes."""


@recorded
def adamax(
    lr: PerModel = 2e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with the infinity norm, as ``torch.optim.Adamax`` computes it.

    With gradient g at update t: ``m = beta1 * m + (1 - beta1) * g``; ``u = max(beta2 * u, |g| + eps)``;
    ``p -= lr / (1 - beta1^t) * m / u``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the magnitude of the gradient.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = adamax(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, section 7.1.
    """
    hyperparams = Hyperparams(AdamaxState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["step"] = -at["lr"] / (1 - at["beta1"] ** count)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, largest: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        largest.mul_(k["beta2"]).clamp_min_(grad.abs().add_(k["eps"]))
        return mean / largest

    return leafwise(AdamaxState, hyperparams.without_zeros("weight_decay"), rule, prepare, maximize=maximize)
