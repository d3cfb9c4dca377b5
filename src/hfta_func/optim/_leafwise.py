"""Optimizers that treat every parameter alike: what they share, so that each file holds one update rule.

Public: :func:`leafwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import num_models
from hfta_func._types import Params
from hfta_func.optim._base import GradientTransformation, Knobs, Shaped, zero_count

Start = Callable[[str, Tensor], Tensor]
"""What a slot holds before the first update, from a parameter's path and value ``[M, ...]``."""


def zeros(path: str, param: Tensor) -> Tensor:
    """A slot that starts at zero."""
    return torch.zeros_like(param)


def leafwise(
    state: Callable[..., Any],
    knobs: Knobs,
    rule: Callable[..., tuple[Tensor, ...]],
    *,
    slots: Mapping[str, Start | None],
    prepare: Callable[..., tuple[Tensor, ...] | None],
    carried: tuple[str, ...] = (),
    decay: Literal["coupled", "decoupled"] = "coupled",
    maximize: bool = False,
) -> GradientTransformation:
    """A transformation from the update rule of one parameter.

    Args:
        state: NamedTuple of ``step``, ``hyperparams``, the carried numbers, and the slots.
        knobs: The hyperparameters. Where ``weight_decay`` is among them it is applied here.
        rule: ``rule(grad, param, k, *slots) -> (update, *new_slots)`` over ``[M, ...]``; ``k`` holds numbers by name, shaped
            to broadcast. It gets the slots that are in use.
        slots: Tensors beside each parameter, by name, with what they start from; None where one is not in use.
        prepare: ``prepare(at, count, *carried) -> carried`` adds to ``at``, vectors ``float64[M]`` by name, what the rule
            needs of them; ``count`` numbers the update, from 1.
        carried: Vectors ``float64[M]`` that are carried from update to update, from one.
        decay: Whether weight decay is a part of the gradient, or apart from it and multiplied by the learning rate.
        maximize: Ascend instead of descend.
    """
    used = [name for name, start in slots.items() if start is not None]

    def init(params: Params) -> Any:
        held = {
            name: {} if start is None else {path: start(path, param) for path, param in params.items()}
            for name, start in slots.items()
        }
        device = next(iter(params.values())).device
        ones = {name: torch.ones(num_models(params), dtype=torch.float64, device=device) for name in carried}
        return state(step=zero_count(params), hyperparams=knobs.init(params), **ones, **held)

    def update(grads: Params, held: Any, params: Params) -> tuple[Params, Any]:
        at, count = knobs.at(held.hyperparams, held.step), held.step + 1
        numbers = prepare(at, count, *(getattr(held, name) for name in carried)) or ()
        if "weight_decay" in at:
            at["decay"] = -at["lr"] * at["weight_decay"] if decay == "decoupled" else at["weight_decay"]
        shaped = Shaped(at)
        updates, new = {}, {name: {} for name in slots}
        for path, grad in grads.items():
            param, k = params[path], shaped.like(params[path])
            if maximize:
                grad = -grad
            if "decay" in at and decay == "coupled":
                grad = grad + k["decay"] * param
            updates[path], *after = rule(grad, param, k, *(getattr(held, name)[path] for name in used))
            if "decay" in at and decay == "decoupled":
                updates[path] = updates[path] + k["decay"] * param
            for name, value in zip(used, after, strict=True):
                new[name][path] = value
        return updates, held._replace(step=count, **dict(zip(carried, numbers, strict=True)), **new)

    return GradientTransformation(init, update)
