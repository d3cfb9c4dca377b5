"""Families of a few operators each: activations with parameters, distances, extremes, resampling, shapes.

Dimension letters: M models, N batch, C channels, S space, P and R rows, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func.errors import TraceError
from hfta_func.rules._layout import align, each, expand, models_first
from hfta_func.rules._operator import Operator
from hfta_func.rules._registry import Call, Result, register, register_each, register_looped


@register("view", "shape")
def view(call: Call, x: Tensor, size: list[int]) -> Result:
    """A view of all members if there is one, else a copy."""
    # [.., M, ..] -> [M, *size]
    return models_first(x, call.dims[0]).reshape(call.num_models, *size), 0


@register("contiguous", "shape")
def contiguous(call: Call, x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Result:
    """The members themselves if they are contiguous, as most members alone are, else a copy."""
    return models_first(x, call.dims[0]).contiguous(), 0


@register("as_strided_", "shape")
def as_strided_(call: Call, x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Result:
    """Other strides for axes of size 1, as pooling to one pixel sets them: they have no effect, so nothing is done."""
    dim = call.dims[0]
    layout = [pair for axis, pair in enumerate(zip(x.shape, x.stride(), strict=True)) if axis != dim]
    present, wanted = ([(n, s if n > 1 else 0) for n, s in pairs] for pairs in (layout, zip(size, stride, strict=True)))
    if present != wanted:
        raise TraceError(
            "as_strided_ reads memory outside of one member's tensor; use view, transpose or expand instead"
        )
    return x, dim


@register("_prelu_kernel", "activation")
def prelu(call: Call, x: Tensor, weight: Tensor) -> Result:
    """Elementwise; PyTorch passes the slopes as ``[1,C,1]``, shaped like the input."""
    if x.device.type != "xla" and call.dims[0] is not None:
        return NotImplemented
    # XLA's kernel takes the second axis for the channels, and PyTorch's output has the shape of the input.
    x, weight = each(align, (x, weight), call.dims, x.dim() - (call.dims[0] is not None))
    return torch.where(x > 0, x, weight * x), 0


@register("cdist", "distance")
def cdist(call: Call, first: Tensor, second: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Result:
    """``[M,...,P,D], [M,...,R,D] -> [M,...,P,R]``, by PyTorch's decomposable operator, which autocast knows."""
    # Shared tensors are repeated, as PyTorch's kernel would do, because XLA's kernel does not broadcast.
    both = each(expand, (first, second), call.dims, call.num_models)
    rank = max(x.dim() for x in both) - 1
    return torch.ops.aten.cdist.default(*each(align, both, (0, 0), rank), p, compute_mode), 0


@register("_cdist_backward", "distance")
def cdist_backward(call: Call, grad: Tensor, first: Tensor, second: Tensor, p: float, distances: Tensor) -> Result:
    """The gradient of ``first``; PyTorch's rule mixes members where some of the tensors are shared."""
    values = each(expand, (grad, first, second, distances), (*call.dims[:3], call.dims[4]), call.num_models)
    rank = max(x.dim() for x in values) - 1
    grad, first, second, distances = (x.contiguous() for x in each(align, values, (0,) * 4, rank))
    return torch.ops.aten._cdist_backward.default(grad, first, second, p, distances), 0


register_looped("distance", "pdist", "_pdist_forward", "_pdist_backward")


for _space in (1, 2, 3):
    _exact = f"_upsample_nearest_exact{_space}d"
    register_looped("resampling", _exact, f"{_exact}.vec", f"{_exact}_backward")


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
