"""Adagrad."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, check, per_member, restrict
from hfta_func.optim._leafwise import FIELDS, leafwise

AdagradState = namedtuple("AdagradState", [*FIELDS, "sum"])
"""Sums of the squared gradients."""
restrict(AdagradState, lr_decay=Range.NONNEGATIVE)


@recorded
def adagrad(
    lr: PerModel = 1e-2,
    lr_decay: PerModel = 0.0,
    weight_decay: PerModel = 0.0,
    initial_accumulator_value: PerModel = 0.0,
    eps: PerModel = 1e-10,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adagrad, as ``torch.optim.Adagrad`` computes it.

    With gradient g at update t: ``s += g^2``; ``p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)``.

    Args:
        lr: Learning rate.
        lr_decay: How fast the learning rate decays.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        initial_accumulator_value: Initial value of the sums. It is not part of the state.
        eps: Added to the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = adagrad(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
    """
    hyperparams = Hyperparams(AdagradState, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    check("initial_accumulator_value", initial_accumulator_value, Range.NONNEGATIVE)

    def start(path: str, param: Tensor) -> Tensor:
        name, allowed = "initial_accumulator_value", Range.NONNEGATIVE
        values = per_member(name, initial_accumulator_value, param.shape[0], param.device, allowed)
        values = torch.complex(values, values) if param.is_complex() else values
        return torch.zeros_like(param) + per_model(values, param)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["step"] = -at["lr"] / (1 + (count - 1) * at["lr_decay"])

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], total: Tensor) -> Tensor:
        total.add_(grad * grad)
        return grad / total.sqrt().add_(k["eps"])

    return leafwise(
        AdagradState, hyperparams.without_zeros("weight_decay"), rule, prepare, start=start, maximize=maximize
    )
