"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs, Shaped, zero_count, zeros_like


class SGDState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its momentum buffers (none where momentum is off)."""

    step: Tensor
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
        momentum: Momentum factor. For this and the next two, the plain number 0 leaves the term out of the program
            altogether; to switch it on later, give one number per member.
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
    knobs = Knobs(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay).without_zeros(
        "momentum", "dampening", "weight_decay"
    )
    buffered = "momentum" in knobs

    def init(params: Params) -> SGDState:
        buffers = zeros_like(params) if buffered else {}
        return SGDState(zero_count(params), knobs.init(params), buffers)

    def update(grads: Params, state: SGDState, params: Params) -> tuple[Params, SGDState]:
        at = knobs.at(state.hyperparams, state.step)
        updates, buffers = {}, {}
        if "dampening" in at:
            undamped = (state.step == 0) | (at["momentum"] == 0)
            at["fresh"] = torch.where(undamped, 1.0, 1 - at["dampening"])
        at["step"] = at["lr"] if maximize else -at["lr"]
        shaped = Shaped(at)
        for path, grad in grads.items():
            param, leaf = params[path], shaped.like(params[path])
            if "weight_decay" in at:
                decay = leaf["weight_decay"] * param
                grad = grad - decay if maximize else grad + decay
            if buffered:
                buffers[path] = state.momentum[path] * leaf["momentum"] + (
                    leaf["fresh"] * grad if "fresh" in at else grad
                )
                grad = grad + leaf["momentum"] * buffers[path] if nesterov else buffers[path]
            updates[path] = leaf["step"] * grad
        return updates, SGDState(state.step + 1, state.hyperparams, buffers)

    return GradientTransformation(init, update)
