"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._tree import num_models, per_model
from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs


class AdamState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its averages of gradients and their squares.

    ``max_exp_avg_sq`` is filled with ``amsgrad`` only.
    """

    count: Tensor
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
        weight_decay: L2 penalty, added to the gradient.
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
        weight_decay: Decay, multiplied by the learning rate.
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

    def init(params: Params) -> AdamState:
        count = torch.zeros(num_models(params), dtype=torch.int64, device=next(iter(params.values())).device)

        def zeros() -> Params:
            return {path: torch.zeros_like(param) for path, param in params.items()}

        return AdamState(count, knobs.init(params), zeros(), zeros(), zeros() if amsgrad else {})

    def update(grads: Params, state: AdamState, params: Params) -> tuple[Params, AdamState]:
        at, count = knobs.at(state.hyperparams, state.count), state.count + 1
        beta1, beta2 = at["beta1"], at["beta2"]
        step = -at["lr"] / (1 - beta1**count)
        root = (1 - beta2**count).rsqrt()
        updates, exp_avg, exp_avg_sq, max_exp_avg_sq = {}, {}, {}, {}
        for path, grad in grads.items():
            param = params[path]
            if maximize:
                grad = -grad
            if not decoupled:
                grad = torch.addcmul(grad, per_model(at["weight_decay"], param), param)
            exp_avg[path] = torch.lerp(state.exp_avg[path], grad, per_model(1 - beta1, param))
            exp_avg_sq[path] = torch.addcmul(
                state.exp_avg_sq[path] * per_model(beta2, param), per_model(1 - beta2, param) * grad, grad
            )
            largest = exp_avg_sq[path]
            if amsgrad:
                largest = max_exp_avg_sq[path] = torch.maximum(state.max_exp_avg_sq[path], largest)
            denominator = torch.addcmul(per_model(at["eps"], param), largest.sqrt(), per_model(root, param))
            updates[path] = per_model(step, param) * exp_avg[path] / denominator
            if decoupled:
                updates[path] = torch.addcmul(updates[path], per_model(-at["lr"] * at["weight_decay"], param), param)
        return updates, AdamState(count, state.hyperparams, exp_avg, exp_avg_sq, max_exp_avg_sq)

    return GradientTransformation(init, update)
