"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._tree import num_models, per_model
from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs


class SGDState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its momentum buffers (none where momentum is off)."""

    count: Tensor
    hyperparams: dict[str, Any]
    momentum: Params


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
        momentum: Momentum factor. The plain number 0 keeps no buffers at all.
        dampening: Fraction of each gradient that momentum leaves out; without effect where momentum is 0.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = sgd(lr=[0.1, 1.0])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    """
    buffered = not (isinstance(momentum, int | float) and momentum == 0)
    knobs = (
        Knobs(lr=lr, weight_decay=weight_decay, momentum=momentum, dampening=dampening)
        if buffered
        else Knobs(lr=lr, weight_decay=weight_decay)
    )

    def init(params: Params) -> SGDState:
        count = torch.zeros(num_models(params), dtype=torch.int64, device=next(iter(params.values())).device)
        buffers = {path: torch.zeros_like(param) for path, param in params.items()} if buffered else {}
        return SGDState(count, knobs.init(params), buffers)

    def update(grads: Params, state: SGDState, params: Params) -> tuple[Params, SGDState]:
        at = knobs.at(state.hyperparams, state.count)
        step = at["lr"] if maximize else -at["lr"]
        decay = -at["weight_decay"] if maximize else at["weight_decay"]
        updates, buffers = {}, {}
        if buffered:
            undamped = (state.count == 0) | (at["momentum"] == 0)
            fresh = torch.where(undamped, torch.ones_like(at["dampening"]), 1 - at["dampening"])
        for path, grad in grads.items():
            param = params[path]
            grad = torch.addcmul(grad, per_model(decay, param), param)
            if buffered:
                momentum = per_model(at["momentum"], param)
                buffer = torch.addcmul(per_model(fresh, param) * grad, momentum, state.momentum[path])
                buffers[path] = buffer
                grad = torch.addcmul(grad, momentum, buffer) if nesterov else buffer
            updates[path] = per_model(step, param) * grad
        return updates, SGDState(state.count + 1, state.hyperparams, buffers)

    return GradientTransformation(init, update)
