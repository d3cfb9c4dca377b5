"""Largest and smallest elements of M members, with a backward pass in less memory than PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._operator import Operator
from hfta_func.rules._registry import Call, Result, register_each, register_looped


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.dims, ctx.keepdim = inputs
    ctx.save_for_backward(x, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Elements that are equally extreme get equal parts of the gradient."""
    x, extreme = ctx.saved_tensors
    if not ctx.keepdim:
        for dim in sorted(ctx.dims):
            grad, extreme = grad.unsqueeze(dim), extreme.unsqueeze(dim)
    # PyTorch counts in int64 and multiplies by a copy of the mask: tensors of up to twice the size of the result.
    mask = (x == extreme).to(grad.dtype)
    share = grad / mask.sum(ctx.dims, keepdim=True, dtype=torch.promote_types(grad.dtype, torch.float32))
    share = share.to(grad.dtype)
    return mask * share if share.requires_grad else mask.mul_(share), None, None


_OPERATORS = {
    plain.default: Operator(f"{name}(Tensor x, int[] dims, bool keepdim) -> Tensor", plain.default, _setup, _backward)
    for name, plain in (("amax", torch.ops.aten.amax), ("amin", torch.ops.aten.amin))
}


@register_each("reduction", "amax", "amin")
def extreme(operator: Any, call: Call, x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Result:
    """Each member's rows by themselves; the model axis stays where it is."""
    # [N,M,C,S] -> [N,M,C]
    model_dim, rank = call.dims[0], x.dim() - 1
    if rank == 0 or not x.is_floating_point():
        return NotImplemented
    member_axes = sorted({axis % rank for axis in dim} or range(rank))
    axes = [axis + (axis >= model_dim) for axis in member_axes]
    dim_after = model_dim if keepdim else model_dim - sum(axis < model_dim for axis in axes)
    return _OPERATORS[operator](x, axes, keepdim), dim_after


# A histogram of each member has edges of its own.
register_looped("reduction", "histc")
