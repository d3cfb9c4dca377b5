"""Largest and smallest elements of M members, with a backward pass in less memory than PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._operator import Operator
from hfta_func.rules._registry import Call, Result, register


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


def _extreme(name: str) -> None:
    """The rule of ``amax`` or ``amin``."""
    plain: Callable[..., Tensor] = getattr(torch, name)
    schema = f"{name}(Tensor x, int[] dims, bool keepdim) -> Tensor"
    operator = Operator(schema, lambda x, dims, keepdim: plain(x, dims, keepdim), _setup, _backward)

    @register(name, "reduction")
    def extreme(call: Call, x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Result:
        """Each member's rows by themselves; the model axis stays where it is."""
        # [N,M,C,S] -> [N,M,C]
        model_dim, rank = call.dims[0], x.dim() - 1
        if rank == 0 or not x.is_floating_point():
            return NotImplemented
        member_axes = sorted({axis % rank for axis in dim} or range(rank))
        axes = [axis + (axis >= model_dim) for axis in member_axes]
        return operator(x, axes, keepdim), model_dim if keepdim else model_dim - sum(axis < model_dim for axis in axes)


for _name in ("amax", "amin"):
    _extreme(_name)
