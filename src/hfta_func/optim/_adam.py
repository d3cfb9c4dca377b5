"""Adam and AdamW."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

AdamState = namedtuple("AdamState", [*FIELDS, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
"""Averages of the gradients and of their squares and, with ``amsgrad``, the maxima of the latter."""


@recorded
def adam(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    """Adam, as ``torch.optim.Adam`` computes it.

    With gradient g at update t: ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g^2``;
    ``p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        amsgrad: Use the largest ``v`` so far in the denominator.
        maximize: Maximize instead of minimize.
        decoupled_weight_decay: Subtract ``lr * weight_decay * p`` instead, as :func:`adamw` does.

    Example:
        >>> optimizer, params, grads = adam(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
        Reddi et al., "On the convergence of Adam and beyond", ICLR 2018 (``amsgrad``).
    """
    hyperparams = Hyperparams(AdamState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        # The bias correction of the root moves into numbers per member, outside the leaves.
        root = (1 - at["beta2"] ** count).sqrt()
        at["step"], at["eps"] = -at["lr"] * root / (1 - at["beta1"] ** count), at["eps"] * root

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor, *most: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        largest = most[0].clamp_min_(square) if most else square
        return mean / largest.sqrt().add_(k["eps"])

    hyperparams = hyperparams.without_zeros("weight_decay")
    unused = () if amsgrad else ("max_exp_avg_sq",)
    decoupled = decoupled_weight_decay
    return leafwise(AdamState, hyperparams, rule, prepare, unused=unused, decoupled=decoupled, maximize=maximize)


@recorded
def adamw(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay ``p -= lr * weight_decay * p``, as ``torch.optim.AdamW`` computes it.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        amsgrad: Use the largest ``v`` so far in the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, ones = adamw(lr=0.1, weight_decay=[0.0, 1.0]), {"w": torch.ones(2, 1)}
        >>> optimizer.update(ones, optimizer.init(ones), ones)[0]["w"].flatten()
        tensor([-0.1000, -0.2000])

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    return adam(lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True)
