"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs, Shaped, zero_count, zeros_like


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
    knobs = knobs.without_zeros("weight_decay")

    def init(params: Params) -> AdamState:
        largest = zeros_like(params) if amsgrad else {}
        return AdamState(zero_count(params), knobs.init(params), zeros_like(params), zeros_like(params), largest)

    def update(grads: Params, state: AdamState, params: Params) -> tuple[Params, AdamState]:
        at, count = knobs.at(state.hyperparams, state.step), state.step + 1
        at["1-beta1"], at["1-beta2"] = 1 - at["beta1"], 1 - at["beta2"]
        at["step"] = -at["lr"] / (1 - at["beta1"] ** count)
        at["root"] = (1 - at["beta2"] ** count).sqrt()
        if "weight_decay" in at:
            at["decay"] = -at["lr"] * at["weight_decay"] if decoupled else at["weight_decay"]
        shaped = Shaped(at)
        updates, exp_avg, exp_avg_sq, max_exp_avg_sq = {}, {}, {}, {}
        for path, grad in grads.items():
            param, leaf = params[path], shaped.like(params[path])
            if maximize:
                grad = -grad
            if "decay" in at and not decoupled:
                grad = grad + leaf["decay"] * param
            exp_avg[path] = torch.lerp(state.exp_avg[path], grad, leaf["1-beta1"])
            exp_avg_sq[path] = state.exp_avg_sq[path] * leaf["beta2"] + leaf["1-beta2"] * grad * grad
            largest = exp_avg_sq[path]
            if amsgrad:
                largest = max_exp_avg_sq[path] = torch.maximum(state.max_exp_avg_sq[path], largest)
            updates[path] = leaf["step"] * exp_avg[path] / (largest.sqrt() / leaf["root"] + leaf["eps"])
            if "decay" in at and decoupled:
                updates[path] = updates[path] + leaf["decay"] * param
        return updates, AdamState(count, state.hyperparams, exp_avg, exp_avg_sq, max_exp_avg_sq)

    return GradientTransformation(init, update)
