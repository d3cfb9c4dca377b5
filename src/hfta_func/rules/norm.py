"""Normalisation of M members as one, then scale and shift per member; of batches and instances with M times the channels.

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
from hfta_func._kernels import programs
from hfta_func._torch import has_tangents
from hfta_func.calls.recompute import cheap, recalls
from hfta_func.errors import TraceError
from hfta_func.rules._layout import align, each, expand, fold, models_first, split
from hfta_func.rules._operator import Program, runs_programs
from hfta_func.rules._registry import Call, Result, filled, register

Vectors = tuple[Tensor | None, Tensor | None]
"""Weight and bias, or running mean and variance."""

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


_with_scale = Program(
    "layer_norm(Tensor x, Tensor scale, Tensor shift, int axes, float eps) -> (Tensor, Tensor)",
    *(programs.layer_norm, _keep, _gradients),
    fake=lambda x, scale, shift, axes, eps: (x.new_empty(x.shape), x.new_empty((*x.shape[:-axes], 2))),
)
_with_scale_backward = Program(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor scale, Tensor stats, int axes) -> (Tensor, Tensor, Tensor)",
    # Whoever needs its derivative does not call it.
    *(programs.layer_norm_backward, lambda *_: None, lambda *_: None),
    fake=lambda grad, x, scale, *_: (x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)),
)


@register("layer_norm", "norm")
def layer_norm(call: Call, x: Tensor, shape: list[int], *options: Any) -> Result:
    """Layer normalisation of all members' rows at once, then weight and bias per member."""
    (x_dim, _, *dims), (weight, bias, eps, _) = call.first_dims(4), filled(options, None, None, 1e-5, True)
    x = models_first(x, x_dim)
    if weight is not None and bias is not None and None not in (x_dim, *dims) and weight.dtype == x.dtype:
        if torch.get_num_threads() <= len(x) and runs_programs(x, programs.norm):
            vectors = each(models_first, (weight, bias), dims)
            return cheap(lambda *args: _with_scale(*args)[0], x, *vectors, len(shape), eps), 0
        # [M,N,D], [M,D] -> [M,N,D], [M,1,D]
        scale, shift = each(align, (weight, bias), dims, x.dim() - 1)
        return cheap(torch.addcmul, shift, cheap(torch.layer_norm, x, shape, None, None, eps), scale), 0
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    inner, outer = parted((weight, bias), dims, x, shape)
    y = torch.layer_norm(x, shape, *inner, eps)
    return affine(y, *each(align, outer, dims, x.dim() - (x_dim is not None))), 0


@register("rms_norm", "norm")
def rms_norm(call: Call, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Result:
    """Root mean square normalisation of all members' rows at once, then the weight per member."""
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    x_dim, _, weight_dim = call.first_dims(3)
    inner, outer = (weight, None) if weight_dim is None else (None, weight)
    y = torch.rms_norm(models_first(x, x_dim), shape, inner, eps)
    return affine(y, *each(align, (outer,), (weight_dim,), x.dim() - (x_dim is not None))), 0


@register("group_norm", "norm")
def group_norm(
    call: Call, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *options: Any
) -> Result:
    """Group normalisation with M times the channels and groups."""
    num_models, (x_dim, _, *dims) = call.num_models, call.first_dims(4)
    if x_dim == 0 and dims == [None, None]:
        # [M,N,C,S] -> [MN,C,S] -> [M,N,C,S]
        y = torch.group_norm(fold(x, 0, 0, num_models), groups, weight, bias, *options)
        return split(y, 0, num_models), 0
    if x_dim is None:
        # [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
        inner, outer = parted((weight, bias), dims, x, x.shape[1:2])
        y = torch.group_norm(x, groups, *inner, *options)
        return affine(y, *each(align, outer, dims, x.dim(), x.dim() - 2)), 0
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S]
    vectors = each(fold, (weight, bias), dims, 0, num_models)
    y = torch.group_norm(fold(x, x_dim, 1, num_models), groups * num_models, *vectors, *options)
    return split(y, 1, num_models), 1


@register("_weight_norm_interface", "norm")
def weight_norm(call: Call, v: Tensor, g: Tensor, dim: int = 0) -> Result:
    """``v * g / norm(v)`` with M times the rows; also returns the norms."""
    # [M,O,I], [M,O,1] -> [MO,I], [MO,1] -> [M,O,I]
    num_models = call.num_models
    v, g = each(expand, (v, g), call.dims, num_models)
    axis = dim % (v.dim() - 1)
    tensors = (x.movedim(axis + 1, 1) for x in (v, g))
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


@register("batch_norm", "norm")
def batch_norm(call: Call, *args: Any) -> Result:
    """Batch normalisation with M times the channels; updates the running statistics of each member in place."""
    return _normalise(call, _batch_norm, *args)


def _batch_norm(x: Tensor, *args: Any) -> Tensor:
    """PyTorch's operator, whose output the backward pass may compute again."""
    weight, bias, _, _, training, _, eps, cudnn = args
    if not training or (running := recalls()) is None:
        return torch.batch_norm(x, *args)
    y = torch.batch_norm(x, *args)

    # By the same kernel, to the same bits: the derivative of a maximum compares with the output that is computed again.
    def again(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)

    running.note(again, [x, weight, bias], y)
    return y


@register("instance_norm", "norm")
def instance_norm(call: Call, *args: Any) -> Result:
    """Instance normalisation with M times the channels; updates the running statistics of each member in place."""
    return _normalise(call, torch.instance_norm, *args)


def _normalise(call: Call, kernel: Callable[..., Tensor], x: Tensor, *args: Any) -> Result:
    num_models, (x_dim, *dims), stat_dims = call.num_models, call.dims[:3], call.dims[3:5]
    # Weight and bias; running mean and variance; all else.
    vectors, stats, options = args[:2], args[2:4], args[4:]
    training = options[0]
    if training and stats[0] is not None and x_dim is not None and None in stat_dims:
        raise TraceError(
            "a normalisation would update running statistics that all members share; put a network that is no part of the "
            "model in eval mode; under a vmap of your own pass its stacked buffers, too, as functional(model) does"
        )
    if x_dim is None and (training or stat_dims == (None, None)):
        # [N,C,S] -> [N,C,S]; [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
        inner, outer = parted(vectors, dims, x, (x.shape[1],))
        # Running statistics of all members move towards the same values.
        towards = [one if dim is None else one.new_zeros(x.shape[1]) for one, dim in zip(stats, stat_dims, strict=True)]
        y = kernel(x, *inner, *towards, *options)
        for stat, dim, part in zip(stats, stat_dims, towards, strict=True):
            # An empty batch leaves them unchanged.
            if dim is not None and x.numel() > 0:
                models_first(stat, dim).mul_(1 - options[1]).add_(part)
        y = affine(y, *each(align, outer, dims, x.dim(), x.dim() - 2))
        return y, None if dims == [None, None] else 0
    if x_dim is None:
        x, x_dim = expand(x, None, num_models), 0
    if x_dim == 0 and not training and all(dim is None for dim in (*dims, *stat_dims)):
        # [M,N,C,S], [C] -> [MN,C,S], [C] -> [M,N,C,S]
        return split(kernel(fold(x, 0, 0, num_models), *vectors, *stats, *options), 0, num_models), 0
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S], [M,C]
    folded_stats = each(fold, stats, stat_dims, 0, num_models)
    # On XLA an in-place update of a view does not reach its base.
    if cloned := training and x.device.type == "xla":
        folded_stats: list[Any] = [stat if stat is None else stat.clone() for stat in folded_stats]
    folded_vectors = each(fold, vectors, dims, 0, num_models)
    y = kernel(fold(x, x_dim, 1, num_models), *folded_vectors, *folded_stats, *options)
    if training:
        for updated, stat, dim in zip(folded_stats, stats, stat_dims, strict=True):
            # If folding had to copy, the kernel updated the copy.
            if stat is not None and dim is not None and (cloned or not models_first(stat, dim).is_contiguous()):
                models_first(stat, dim).copy_(split(updated, 0, num_models))
    return split(y, 1, num_models), 1


def parted(vectors: Vectors, dims: Any, x: Tensor, shape: Any) -> tuple[Vectors, Vectors]:
    """Weight and bias for the kernel that normalises ``x``, and those to apply afterwards because they differ per member."""
    weight, bias = vectors
    if dims[0] is None and dims[1] is None:
        return vectors, (None, None)
    if weight is not None and dims[0] is None:
        return (weight, None), (None, bias)
    # Ones for the kernel if the vectors have a wider dtype than the input, so that it keeps statistics in that dtype.
    wide = next((vector for vector in vectors if vector is not None and vector.dtype != x.dtype), None)
    return (None if wide is None else wide.new_ones(shape), None), vectors


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """``x * weight + bias`` in the dtype of ``x``, whatever the dtype of the vectors, like the kernels."""
    if weight is None:
        y = x if bias is None else x + bias
    else:
        y = x * weight if bias is None else torch.addcmul(bias, x, weight)
    return y.to(x.dtype)
