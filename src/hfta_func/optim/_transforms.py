"""Chains, and what stands in them beside an optimizer: clipping and weight decay per member."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs, Range, in_place, restrict, zero_count

restrict(max_norm=Range.POSITIVE, clip_value=Range.POSITIVE)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations in order: the updates of each are the gradients of the next.

    Args:
        transformations: Any number of them, usually with the optimizer last.

    Example:
        >>> optimizer = chain(clip_grad_norm(1.0), sgd(lr=0.1))
        >>> params = {"w": torch.zeros(1, 2)}
        >>> updates, _ = optimizer.update({"w": torch.tensor([[3.0, 4.0]])}, optimizer.init(params), params)
        >>> updates["w"]
        tensor([[-0.0600, -0.0800]])
    """

    def init(params: Params) -> tuple[Any, ...]:
        return tuple(transformation.init(params) for transformation in transformations)

    def update(grads: Params, state: tuple[Any, ...], params: Params) -> tuple[Params, tuple[Any, ...]]:
        states = []
        for transformation, held in zip(transformations, state, strict=True):
            grads, held = transformation.update(grads, held, params)
            states.append(held)
        return grads, tuple(states)

    def update_(grads: Params, state: Any, params: Params, keep: Tensor | None, apply: bool) -> Params:
        last = len(transformations) - 1
        for number, (transformation, held) in enumerate(zip(transformations, state, strict=True)):
            grads = in_place(transformation)(grads, held, params, keep, apply and number == last)
        return grads

    return GradientTransformation(init, update, update_)


KnobState = namedtuple("KnobState", ["step", "hyperparams"])
"""Numbers of updates, and hyperparameters."""


def clip_grad_norm(max_norm: PerModel) -> GradientTransformation:
    """Scale each member's gradients so that their total L2 norm is at most its ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: the factor is ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        max_norm: Maximum norm, positive.

    Example:
        >>> clip = clip_grad_norm([5.0, 10.0])
        >>> params = {"w": torch.zeros(2, 2)}
        >>> grads = {"w": torch.tensor([[6.0, 8.0], [6.0, 8.0]])}
        >>> clip.update(grads, clip.init(params), params)[0]["w"]
        tensor([[3.0000, 4.0000], [6.0000, 8.0000]])

    References:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
    """

    def rule(grads: Params, params: Params, limit: Tensor) -> Params:
        norms = [torch.linalg.vector_norm(grad.reshape(grad.shape[0], -1), dim=1) for grad in grads.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        return {path: grad * per_model(factor, grad) for path, grad in grads.items()}

    return _with_knob(rule, max_norm=max_norm)


def clip_grad_value(clip_value: PerModel) -> GradientTransformation:
    """Clamp each member's gradients to between minus and plus its ``clip_value``.

    As ``torch.nn.utils.clip_grad_value_``.

    Args:
        clip_value: Maximum magnitude, positive.

    Example:
        >>> clip = clip_grad_value([1.0, 7.0])
        >>> params = {"w": torch.zeros(2, 2)}
        >>> clip.update({"w": torch.tensor([[6.0, -8.0], [6.0, -8.0]])}, clip.init(params), params)[0]["w"]
        tensor([[ 1., -1.],
                [ 6., -7.]])
    """

    def rule(grads: Params, params: Params, limit: Tensor) -> Params:
        limits = {path: per_model(limit, grad) for path, grad in grads.items()}
        return {path: grad.maximum(-limits[path]).minimum(limits[path]) for path, grad in grads.items()}

    return _with_knob(rule, clip_value=clip_value)


def add_decayed_weights(weight_decay: PerModel) -> GradientTransformation:
    """Add ``weight_decay * p``: before an optimizer, an L2 penalty.

    Args:
        weight_decay: Factor of the parameters.

    Example:
        >>> decay = add_decayed_weights([0.0, 0.5])
        >>> params = {"w": torch.ones(2, 1)}
        >>> decay.update({"w": torch.ones(2, 1)}, decay.init(params), params)[0]["w"].flatten()
        tensor([1.0000, 1.5000])
    """

    def rule(grads: Params, params: Params, decay: Tensor) -> Params:
        return {path: grad + per_model(decay, grad) * params[path] for path, grad in grads.items()}

    return _with_knob(rule, weight_decay=weight_decay)


def _with_knob(rule: Callable[[Params, Params, Tensor], Params], **spec: PerModel) -> GradientTransformation:
    """A transformation from ``rule(grads, params, value)`` with one hyperparameter ``float64[M]``."""
    knobs = Knobs(**spec)

    def init(params: Params) -> KnobState:
        return KnobState(zero_count(params), knobs.init(params))

    def update(grads: Params, state: KnobState, params: Params) -> tuple[Params, KnobState]:
        (value,) = knobs.at(state.hyperparams, state.step).values()
        return rule(grads, params, value), state._replace(step=state.step + 1)

    return GradientTransformation(init, update)
