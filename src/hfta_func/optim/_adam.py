"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs
from hfta_func.optim._leafwise import decay_mean, decay_square, leafwise, zeros


class AdamState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its averages of gradients and their squares.

    ``max_exp_avg_sq`` is filled with ``amsgrad`` only.
    """

    step: Tensor
    hyperparams: dict[str, Any]
    exp_avg: Params
    exp_avg_sq: Params
    max_exp_avg_sq: Params


def adam(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam, as ``torch.optim.Adam`` computes it.

    With gradient g at update t: ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g^2``;
    ``p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)``.

    Args:
        lr: Learning rate.
        betas: Decay of the two averages; in the state they are ``beta1`` and ``beta2``.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient; the plain number 0 leaves it out of the program.
        amsgrad: Divide by the largest ``v`` so far.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = adam(lr=[0.1, 1.0])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
        Reddi et al., "On the convergence of Adam and beyond", ICLR 2018 (``amsgrad``).
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=False)


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
        betas: Decay of the two averages; in the state they are ``beta1`` and ``beta2``.
        eps: Added to the denominator.
        weight_decay: Decay, multiplied by the learning rate; the plain number 0 leaves it out of the program.
        amsgrad: Divide by the largest ``v`` so far.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = adamw(lr=0.1, weight_decay=[0.0, 1.0])
        >>> params = {"w": torch.ones(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.1000, -0.2000])

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, maximize, decoupled=True)


def _adam(
    lr: PerModel,
    betas: tuple[PerModel, PerModel],
    eps: PerModel,
    weight_decay: PerModel,
    amsgrad: bool,
    maximize: bool,
    *,
    decoupled: bool,
) -> GradientTransformation:
    knobs = Knobs(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["1-beta1"], at["1-beta2"] = 1 - at["beta1"], 1 - at["beta2"]
        # The bias correction of the root goes into what is one number per member.
        root = (1 - at["beta2"] ** count).sqrt()
        at["step"], at["eps"] = -at["lr"] * root / (1 - at["beta1"] ** count), at["eps"] * root

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor, *most: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        largest = torch.maximum(most[0], square) if most else square
        for slot in most:
            slot.copy_(largest)
        return mean / largest.sqrt().add_(k["eps"])

    return leafwise(
        AdamState,
        knobs.without_zeros("weight_decay"),
        rule,
        slots={"exp_avg": zeros, "exp_avg_sq": zeros, "max_exp_avg_sq": zeros if amsgrad else None},
        prepare=prepare,
        decay="decoupled" if decoupled else "coupled",
        maximize=maximize,
    )
