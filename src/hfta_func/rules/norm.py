"""Normalisation of M members as one normalisation, followed by each member's own scale and shift where they differ.

The rules stand on the operators that models call, whose autocast policy thereby applies, and on the native ones below,
which a gradient inside ``vmap`` takes them apart into. Dimension letters: M models, N batch (and further rows), C channels,
G groups, S space, D normalised features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._affine import Pair, affine, along, flat, parted, unit
from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._lowering import member_shape
from hfta_func.rules._registry import Call, Result, register

_fused_rms_norm = torch.ops.aten._fused_rms_norm.default
_native_group_norm = torch.ops.aten.native_group_norm.default
_native_group_norm_backward = torch.ops.aten.native_group_norm_backward.default
_native_layer_norm = torch.ops.aten.native_layer_norm.default
_native_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_weight_norm = torch.ops.aten._weight_norm_interface.default


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
    x_dim, _, weight_dim, bias_dim = _dims(call, 4)
    if (
        (x_dim is not None and weight_dim is not None and bias_dim is not None)
        and (weight is not None and bias is not None)
        and weight.dtype == x.dtype
    ):
        # [M,N,D], [M,D] -> [M,N,D], [M,1,D]
        aligned = (call.num_models, *(1,) * (x.dim() - 1 - len(shape)), *shape)
        x = front(x, x_dim)
        weight, bias = front(weight, weight_dim).reshape(aligned), front(bias, bias_dim).reshape(aligned)
        return torch.addcmul(bias, torch.layer_norm(x, shape, None, None, eps), weight), 0
    call = call._replace(dims=(x_dim, None, weight_dim, bias_dim, None))
    outputs, dims = native_layer_norm(call, x, shape, weight, bias, eps)
    return outputs[0], dims[0]


@register("native_layer_norm", "norm")
def native_layer_norm(
    call: Call, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Result:
    """Layer normalisation that also returns each row's statistics."""
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    x_dim, _, weight_dim, bias_dim, _ = call.dims
    rows = x.dim() - (x_dim is not None) - len(shape)
    inner, outer = parted((weight, weight_dim), (bias, bias_dim), x, shape)
    y, mean, rstd = _native_layer_norm(_front(x, x_dim), shape, *inner, eps)
    y = affine(y, *(along(vector, dim, rows, 0) for vector, dim in outer))
    stat_dim = None if x_dim is None else 0
    return (y, mean, rstd), (0, stat_dim, stat_dim)


@register("native_layer_norm_backward", "norm")
def native_layer_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> Result:
    """Gradient of layer normalisation: the rows' at once, the vectors' as sums over each member's rows."""
    # [M,N,D], [M,N,1] -> [M,N,D]; [M,N,D] -> [M,D]
    grad, x, mean, rstd = (
        _stacked(tensor, call.dims[i], call.num_models) for i, tensor in ((0, grad), (1, x), (3, mean), (4, rstd))
    )
    rows = x.dim() - 1 - len(shape)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled = affine(grad, along(weight, call.dims[5], rows, 0), None)
        stats, ones = (mean.contiguous(), rstd.contiguous()), unit(x, shape, weight, bias)
        grad_x = _native_layer_norm_backward(scaled, x, shape, *stats, ones, None, [True, False, False])[0]
    if mask[1]:
        assert weight is not None
        grad_weight = _sum_rows(grad * ((x - mean) * rstd), rows).to(weight.dtype)
    if mask[2]:
        assert bias is not None
        grad_bias = _sum_rows(grad, rows).to(bias.dtype)
    return (grad_x, grad_weight, grad_bias), (0, 0, 0)


@register("rms_norm", "norm")
def rms_norm(call: Call, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Result:
    """Root mean square normalisation of all members' rows at once, then the weight per member."""
    # [M,N,D] -> [M,N,D]; [M,N,D] or [N,D], [M,D] -> [M,1,D] -> [M,N,D]
    x_dim, _, weight_dim = _dims(call, 3)
    rows = x.dim() - (x_dim is not None) - len(shape)
    if weight_dim is None:
        return torch.rms_norm(_front(x, x_dim), shape, weight, eps), 0
    return affine(torch.rms_norm(_front(x, x_dim), shape, None, eps), along(weight, weight_dim, rows, 0), None), 0


@register("_fused_rms_norm", "norm")
def fused_rms_norm(call: Call, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Result:
    """Root mean square normalisation that also returns each row's statistic."""
    x_dim, _, weight_dim, _ = call.dims
    rows = x.dim() - (x_dim is not None) - len(shape)
    shared = weight_dim is None
    y, rstd = _fused_rms_norm(_front(x, x_dim), shape, weight if shared else None, eps)
    y = y if shared else affine(y, along(weight, weight_dim, rows, 0), None)
    return (y, rstd), (0, None if x_dim is None else 0)


@register("_fused_rms_norm_backward", "norm")
def fused_rms_norm_backward(
    call: Call, grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Result:
    """Gradient of root mean square normalisation, in elementary operations."""
    # [M,N,D], [M,N,1] -> [M,N,D]; [M,N,D] -> [M,D]
    grad, x, rstd = (_stacked(tensor, call.dims[i], call.num_models) for i, tensor in ((0, grad), (1, x), (3, rstd)))
    rows = x.dim() - 1 - len(shape)
    features = tuple(range(-len(shape), 0))
    grad_x = grad_weight = None
    normalised = x * rstd
    if mask[0]:
        scaled = affine(grad, along(weight, call.dims[4], rows, 0), None)
        grad_x = rstd * (scaled - normalised * (scaled * normalised).mean(features, keepdim=True))
        grad_x = grad_x.to(x.dtype)
    if mask[1]:
        assert weight is not None
        grad_weight = _sum_rows(grad * normalised, rows).to(weight.dtype)
    return (grad_x, grad_weight), (0, 0)


@register("group_norm", "norm")
def group_norm(
    call: Call,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *options: Any,
) -> Result:
    """Group normalisation of M times the channels and groups."""
    num_models, (x_dim, _, weight_dim, bias_dim) = call.num_models, _dims(call, 4)
    vectors: Pair = (weight, weight_dim), (bias, bias_dim)
    if x_dim is None or (x_dim == 0 and weight_dim is None and bias_dim is None):

        def kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
            return (torch.group_norm(x, groups, weight, bias, *options),)

        return _group_samples(num_models, kernel, x, x_dim, vectors)[0], 0
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S]
    weight, bias = (flat(vector, dim, num_models) for vector, dim in vectors)
    y = torch.group_norm(fold(x, x_dim, 1, num_models), groups * num_models, weight, bias, *options)
    return split(y, 1, num_models), 1


@register("native_group_norm", "norm")
def native_group_norm(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, s: int, groups: int, eps: float
) -> Result:
    """Group normalisation that also returns each group's statistics."""
    x_dim, weight_dim, bias_dim = call.dims[:3]

    def kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return _native_group_norm(x.contiguous(), weight, bias, x.shape[0], c, s, groups, eps)

    stat_dim = None if x_dim is None else 0
    outputs = _group_samples(call.num_models, kernel, x, x_dim, ((weight, weight_dim), (bias, bias_dim)))
    return outputs, (0, stat_dim, stat_dim)


def _group_samples(
    num_models: int, kernel: Callable[..., tuple[Tensor, ...]], x: Tensor, x_dim: int | None, vectors: Pair
) -> tuple[Tensor, ...]:
    """Normalise all members' samples, which gives what the native operator promises: outputs contiguous for each member."""
    # [M,N,C,S] -> [MN,C,S] -> [M,N,C,S]; [M,N,C,S] or [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
    shape = member_shape(x, x_dim)
    assert shape is not None
    inner, outer = parted(*vectors, x, shape[1:2])
    if x_dim is None:
        y, *stats = kernel(x, *inner)
    else:
        y, *stats = (split(output, 0, num_models) for output in kernel(fold(x, x_dim, 0, num_models), *inner))
    return affine(y, *(along(vector, dim, 1, len(shape) - 2) for vector, dim in outer)), *stats


@register("native_group_norm_backward", "norm")
def native_group_norm_backward(
    call: Call,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    s: int,
    groups: int,
    mask: list[bool],
) -> Result:
    """Gradient of group normalisation of M times the channels and groups."""
    # [M,N,C,S], [M,N,G], [M,C] -> [N,MC,S], [N,MG], [MC] -> [N,M,C,S], [M,C]
    num_models = call.num_models
    tensors = (
        fold(tensor, dim, 1, num_models).contiguous()
        for tensor, dim in zip((grad, x, mean, rstd), call.dims, strict=False)
    )
    weight = flat(weight, call.dims[4], num_models)
    outputs = _native_group_norm_backward(*tensors, weight, n, c * num_models, s, groups * num_models, mask)
    return _split_grads(outputs, num_models)


@register("_weight_norm_interface", "norm")
def weight_norm(call: Call, v: Tensor, g: Tensor, dim: int = 0) -> Result:
    """``v * g / norm(v)`` of M times the rows; also returns the norms."""
    (v_dim, g_dim), num_models = call.dims[:2], call.num_models
    if v_dim is None:
        # [O,I], [M,O,1] -> [O,1], [M,O,1] -> [M,O,I]
        norms = torch.norm_except_dim(v, 2, dim)
        return (v * (_front(g, g_dim) / norms), norms), (0, None)
    # [M,O,I], [M,O,1] -> [MO,I], [MO,1] -> [M,O,I]
    axis = dim % (v.dim() - 1)
    rows = (
        fold(x.movedim(axis + 1, 1), 0, 0, num_models).contiguous()
        for x in (_stacked(v, v_dim, num_models), _stacked(g, g_dim, num_models))
    )
    return tuple(split(x, 0, num_models).movedim(1, axis + 1) for x in _weight_norm(*rows, 0)), (0, 0)


@register("_weight_norm_interface_backward", "norm")
def weight_norm_backward(call: Call, grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Result:
    """Gradient of weight normalisation, in elementary operations."""
    grad, v, g, norms = (
        _stacked(x, x_dim, call.num_models) for x, x_dim in zip((grad, v, g, norms), call.dims, strict=False)
    )
    axis = dim % (v.dim() - 1) + 1
    radial = (grad * v).sum([i for i in range(1, v.dim()) if i != axis], keepdim=True) / norms
    grad_v = (grad - v * (radial / norms)) * (g / norms)
    return (grad_v.to(v.dtype), radial.to(g.dtype)), (0, 0)


def _dims(call: Call, count: int) -> tuple[Any, ...]:
    """The model axes of the first arguments; the dispatcher leaves out those that have their default."""
    return (*call.dims, *(None,) * count)[:count]


def _front(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else front(x, dim)


def _stacked(x: Tensor, dim: int | None, num_models: int) -> Tensor:
    """``[M, ...]``; of a shared tensor a view."""
    return x.expand(num_models, *x.shape) if dim is None else front(x, dim)


def _sum_rows(x: Tensor, rows: int) -> Tensor:
    """``[M,N,D] -> [M,D]``."""
    return x.sum(tuple(range(1, rows + 1))) if rows else x


def _split_grads(grads: tuple[Tensor | None, ...], num_models: int) -> Result:
    """``[N,MC,S], [MC], [MC] -> [N,M,C,S], [M,C], [M,C]``."""
    axes = (1, 0, 0)
    pairs = zip(grads, axes, strict=True)
    return tuple(None if grad is None else split(grad, axis, num_models) for grad, axis in pairs), axes
