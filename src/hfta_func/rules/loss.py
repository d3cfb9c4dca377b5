"""Losses of M members as one loss over M times the batch.

Dimension letters: M models, N batch, C classes, S space.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register

_NONE, _MEAN = 0, 1


@register("nll_loss_forward", "loss")
def nll_loss_forward(
    call: Call, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Result:
    """Negative log likelihood ``[M,N,C], [M,N] -> [M]`` or ``[M,N]``, and the total weight of the targets."""
    return _nll(torch.ops.aten.nll_loss_forward.default, call, input, target, weight, reduction, ignore_index)


@register("nll_loss2d_forward", "loss")
def nll_loss2d_forward(
    call: Call, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Result:
    """The same for images ``[M,N,C,H,W], [M,N,H,W]``."""
    return _nll(torch.ops.aten.nll_loss2d_forward.default, call, input, target, weight, reduction, ignore_index)


def _nll(operator: Any, call: Call, input: Tensor, target: Tensor, weight: Tensor | None, *options: int) -> Result:
    # [M,N,C,S], [M,N,S] -> [MN,C,S], [MN,S] -> [MN,S] -> [M,NS] -> [M]
    num_models, (input_dim, target_dim, weight_dim) = call.num_models, call.dims[:3]
    reduction, ignore_index = options
    single = target.dim() - (target_dim is not None) == 0
    if single:
        # One sample without a batch axis, [C] and []: give it one.
        input, input_dim = _front(input, input_dim).unsqueeze(-2), None if input_dim is None else 0
        target, target_dim = _front(target, target_dim).unsqueeze(-1), None if target_dim is None else 0
    input, target = fold(input, input_dim, 0, num_models), fold(target, target_dim, 0, num_models)
    losses = operator(input, target, None, _NONE, ignore_index)[0]
    weights = target != ignore_index
    if weight is not None:
        weights = _weights(weight, weight_dim, target, weights, num_models)
        losses = losses * weights
    if reduction == _NONE:
        losses = split(losses, 0, num_models)
        return (losses.squeeze(1) if single else losses, losses.new_zeros(num_models)), (0, 0)
    total = losses.reshape(num_models, -1).sum(1)
    divisor = weights.reshape(num_models, -1).sum(1, dtype=total.dtype)
    return (total / divisor if reduction == _MEAN else total, divisor), (0, 0)


def _weights(weight: Tensor, dim: int | None, target: Tensor, counted: Tensor, num_models: int) -> Tensor:
    """The class weight of every target ``[MN,...]``, zero where it is ignored."""
    # Ignored targets may lie outside the table.
    index = torch.where(counted, target, 0)
    if dim is None:
        weights = weight[index]
    else:
        member = torch.arange(num_models, device=index.device).repeat_interleave(target.shape[0] // num_models)
        weights = front(weight, dim)[member.reshape(-1, *(1,) * (index.dim() - 1)), index]
    return torch.where(counted, weights, 0)


def _front(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else front(x, dim)
