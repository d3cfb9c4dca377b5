"""Layer, group, RMS and weight normalisation of M members as one, then scale and shift per member.

There are rules for the operators that models call, so that autocast treats them as usual; a gradient inside ``vmap``
decomposes them into native operators, which have PyTorch's own rules. Dimension letters: M models, N batch (and further
rows), C channels, G groups, S space, D normalised features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._kernels import norm
from hfta_func._kernels.operators import members_in_front
from hfta_func._torch import has_tangents
from hfta_func.calls.recompute import cheap
from hfta_func.rules._affine import Vectors, affine, parted
from hfta_func.rules._layout import align, each, expand, fold, models_first, split
from hfta_func.rules._lowering import member_shape
from hfta_func.rules._operator import Operator, runs_programs
from hfta_func.rules._registry import Call, Result, register

_native_layer_norm_backward = _torch.operator("native_layer_norm_backward")


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    x, scale, _, ctx.axes, ctx.eps = inputs
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(x, scale, outputs[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (x, scale, stats), axes = ctx.saved_tensors, ctx.axes
    if not torch.is_grad_enabled() and not has_tangents():
        return *_with_scale_backward(grad, x, scale, stats, axes), None, None
    # In operators of PyTorch, which have derivatives.
    shape, space = scale.shape[-axes:], range(scale.dim() - axes, x.dim() - axes)
    aligned = scale.reshape(*scale.shape[:-axes], *(1 for _ in space), *shape)
    mean, rstd = stats.reshape(*x.shape[:-axes], *(1,) * (axes - 1), 2).split(1, -1)
    given = (grad * aligned).contiguous(), x.contiguous(), shape, mean.contiguous(), rstd.contiguous()
    dx = _native_layer_norm_backward(*given, None, None, [True, False, False])[0]
    products = grad * torch.layer_norm(x, shape, eps=ctx.eps), grad
    return dx, *(one.sum([*space]) if space else one for one in products), None, None


_with_scale = Operator(
    "layer_norm(Tensor x, Tensor scale, Tensor shift, int axes, float eps) -> (Tensor, Tensor)",
    *(norm.layer_norm, _keep, _gradients),
    fake=lambda x, scale, shift, axes, eps: (x.new_empty(x.shape), x.new_empty((*x.shape[:-axes], 2))),
    batched=members_in_front(lambda *args: _with_scale(*args)),
)
_with_scale_backward = Operator(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor scale, Tensor stats, int axes) -> (Tensor, Tensor, Tensor)",
    # Whoever needs its derivative does not call it.
    *(norm.layer_norm_backward, lambda *_: None, lambda *_: None),
    fake=lambda grad, x, scale, *_: (x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)),
    batched=members_in_front(lambda *args: _with_scale_backward(*args)),
)


@register("layer_norm", "norm")
def layer_norm(
    call: Call,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *options: bool,
) -> Result:
    """Layer normalisation of all members' rows at once, then weight and bias per member."""
    x_dim, _, *dims = call.first_dims(4)
    x = models_first(x, x_dim)
    if weight is not None and bias is not None and None not in (x_dim, *dims) and weight.dtype == x.dtype:
        if torch.get_num_threads() <= len(x) and runs_programs(x, norm):
            vectors = each(models_first, (weight, bias), dims)
            return cheap(lambda *args: _with_scale(*args)[0], x, *vectors, len(shape), eps), 0
        # [M,N,D], [M,D] -> [M,N,D], [M,1,D]
        scale, shift = each(align, (weight, bias), dims, x.dim() - 1)
        return cheap(torch.addcmul, shift, cheap(torch.layer_norm, x, shape, None, None, eps), scale), 0
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    inner, outer = parted((weight, bias), dims, x, shape)
    y = torch.layer_norm(x, shape, *inner, eps)
    return affine(y, *each(align, outer, dims, _rank(x, x_dim))), 0


@register("rms_norm", "norm")
def rms_norm(call: Call, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Result:
    """Root mean square normalisation of all members' rows at once, then the weight per member."""
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    x_dim, _, weight_dim = call.first_dims(3)
    inner, outer = (weight, None) if weight_dim is None else (None, weight)
    y = torch.rms_norm(models_first(x, x_dim), shape, inner, eps)
    return affine(y, *each(align, (outer,), (weight_dim,), _rank(x, x_dim))), 0


@register("group_norm", "norm")
def group_norm(
    call: Call, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *options: Any
) -> Result:
    """Group normalisation with M times the channels and groups."""
    num_models, (x_dim, _, *dims) = call.num_models, call.first_dims(4)
    if x_dim is None or (x_dim == 0 and dims == [None, None]):

        def kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
            return (torch.group_norm(x, groups, weight, bias, *options),)

        return _group_samples(num_models, kernel, x, x_dim, (weight, bias), dims)[0], 0
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S]
    vectors = each(fold, (weight, bias), dims, 0, num_models)
    y = torch.group_norm(fold(x, x_dim, 1, num_models), groups * num_models, *vectors, *options)
    return split(y, 1, num_models), 1


def _group_samples(
    num_models: int, kernel: Callable[..., Any], x: Tensor, x_dim: int | None, vectors: Vectors, dims: Any
) -> tuple[Tensor, ...]:
    """Normalise the samples of all members; outputs are contiguous per member, as the native operator promises."""
    # [M,N,C,S] -> [MN,C,S] -> [M,N,C,S]; [M,N,C,S] or [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
    shape = member_shape(x, x_dim)
    assert shape is not None
    inner, outer = parted(vectors, dims, x, shape[1:2])
    if x_dim is None:
        y, *stats = kernel(x, *inner)
    else:
        y, *stats = (split(output, 0, num_models) for output in kernel(fold(x, x_dim, 0, num_models), *inner))
    return affine(y, *each(align, outer, dims, len(shape), len(shape) - 2)), *stats


@register("_weight_norm_interface", "norm")
def weight_norm(call: Call, v: Tensor, g: Tensor, dim: int = 0) -> Result:
    """``v * g / norm(v)`` with M times the rows; also returns the norms."""
    (v_dim, g_dim), num_models = call.dims[:2], call.num_models
    if v_dim is None:
        # [O,I], [M,O,1] -> [O,1], [M,O,1] -> [M,O,I]
        norms = torch.norm_except_dim(v, 2, dim)
        return (v * (models_first(g, g_dim) / norms), norms), (0, None)
    # [M,O,I], [M,O,1] -> [MO,I], [MO,1] -> [M,O,I]
    axis = dim % (v.dim() - 1)
    tensors = (x.movedim(axis + 1, 1) for x in each(expand, (v, g), call.dims, num_models))
    rows = (fold(x, 0, 0, num_models).contiguous() for x in tensors)
    outputs = torch.ops.aten._weight_norm_interface.default(*rows, 0)
    return tuple(split(x, 0, num_models).movedim(1, axis + 1) for x in outputs), (0, 0)


@register("_weight_norm_interface_backward", "norm")
def weight_norm_backward(call: Call, grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Result:
    """Gradient of weight normalisation, in elementary operations."""
    grad, v, g, norms = each(expand, (grad, v, g, norms), call.dims, call.num_models)
    axis = dim % (v.dim() - 1) + 1
    radial = (grad * v).sum([i for i in range(1, v.dim()) if i != axis], keepdim=True) / norms
    grad_v = (grad - v * (radial / norms)) * (g / norms)
    return (grad_v.to(v.dtype), radial.to(g.dtype)), (0, 0)


def _rank(x: Tensor, dim: int | None) -> int:
    """The number of axes of one member's tensor."""
    return x.dim() - (dim is not None)
