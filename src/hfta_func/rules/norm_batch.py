"""Batch and instance normalisation of M members as one of M times the channels.

The rules stand on the operators that models call, and on the native ones below, which a gradient inside ``vmap`` takes them
apart into. Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._errors import TraceError
from hfta_func.rules._affine import Pair, affine, along, flat, parted
from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register

_native = torch.ops.aten.native_batch_norm.default
_native_backward = torch.ops.aten.native_batch_norm_backward.default


@register("batch_norm", "norm")
def batch_norm(call: Call, *args: Any) -> Result:
    """Batch normalisation of M times the channels; running statistics are updated in place, per member."""
    outputs, dims = _normalise(call, lambda *args: (torch.batch_norm(*args),), *args)
    return outputs[0], dims[0]


@register("instance_norm", "norm")
def instance_norm(call: Call, *args: Any) -> Result:
    """Instance normalisation of M times the channels; running statistics are updated in place, per member."""
    outputs, dims = _normalise(call, lambda *args: (torch.instance_norm(*args),), *args)
    return outputs[0], dims[0]


@register("native_batch_norm", "norm")
def native_batch_norm(call: Call, *args: Any) -> Result:
    """Batch normalisation that also returns each channel's statistics."""
    return _normalise(call, _native, *args)


register("_native_batch_norm_legit", "norm")(native_batch_norm)


@register("_native_batch_norm_legit_no_training", "norm")
def native_batch_norm_in_evaluation(call: Call, *args: Any) -> Result:
    """Batch normalisation with running statistics."""
    *tensors, momentum, eps = args
    return native_batch_norm(call, *tensors, False, momentum, eps)


@register("_native_batch_norm_legit.no_stats", "norm")
def native_batch_norm_without_running_statistics(
    call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> Result:
    """Batch normalisation that also returns each channel's statistics, and keeps none."""
    call = call._replace(dims=(*call.dims[:3], None, None))
    return native_batch_norm(call, x, weight, bias, None, None, *options)


@register("cudnn_batch_norm", "norm")
def cudnn_batch_norm(call: Call, x: Tensor, *args: Any) -> Result:
    """Batch normalisation that also returns each channel's statistics, with PyTorch's own kernel."""
    # The scratch memory that cuDNN hands to its backward pass belongs to no member; PyTorch's kernel needs none.
    outputs, dims = _normalise(call, _native, x, *args)
    return (*outputs, x.new_empty(0, dtype=torch.uint8)), (*dims, None)


def _normalise(
    call: Call,
    kernel: Callable[..., Any],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *rest: bool,
) -> Result:
    """Output, and where the kernel returns them the statistics of the batch."""
    num_models, (x_dim, weight_dim, bias_dim, mean_dim, var_dim) = call.num_models, call.dims[:5]
    vectors: Pair = (weight, weight_dim), (bias, bias_dim)
    stats: Pair = (running_mean, mean_dim), (running_var, var_dim)
    options = training, momentum, eps, *rest
    if training and running_mean is not None and x_dim is not None and (mean_dim is None or var_dim is None):
        raise TraceError(
            "a normalisation would update running statistics that all members share; pass the stacked buffers to vmap too, "
            "as functional(model) does"
        )
    if x.dim() - (x_dim is not None) < 2 and x.numel() == 0:
        # Without an axis of channels PyTorch takes an empty input only, and has nothing to normalise.
        return (x.clone(), x.new_empty(0), x.new_empty(0)), (x_dim, None, None)
    if x_dim is None:
        # [N,C,S] -> [N,C,S]; [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
        if not training:
            return (_frozen(x, vectors, stats, eps), x.new_empty(0), x.new_empty(0)), (0, None, None)
        inner, outer = parted(*vectors, x, (x.shape[1],))
        y, *saved = _normalise_once(kernel, x, inner, stats, momentum, options)
        y = affine(y, *(along(vector, dim, 1, x.dim() - 2) for vector, dim in outer))
        return (y, *saved), (None if weight_dim is None and bias_dim is None else 0, *(None for _ in saved))
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S], [M,C]
    flat_vectors = [flat(*vector, num_models) for vector in vectors]
    flat_stats = [flat(*stat, num_models) for stat in stats]
    # XLA updates a view alone, and not what it is a view of.
    if cloned := training and x.device.type == "xla":
        flat_stats = [stat if stat is None else stat.clone() for stat in flat_stats]
    y, *saved = kernel(fold(x, x_dim, 1, num_models), *flat_vectors, *flat_stats, *options)
    if training:
        for updated, (stat, dim) in zip(flat_stats, stats, strict=True):
            # Where flattening had to copy, the copy was updated.
            if updated is not None and dim is not None and (cloned or not front(stat, dim).is_contiguous()):
                front(stat, dim).copy_(split(updated, 0, num_models))
    return (split(y, 1, num_models), *(split(vector, 0, num_models) for vector in saved)), (1, *(0 for _ in saved))


def _normalise_once(
    kernel: Callable[..., Any], x: Tensor, inner: Any, stats: Pair, momentum: float, options: Any
) -> Any:
    """Normalise an input that all members share, which moves every member's running statistics towards the same point."""
    if all(dim is None for _, dim in stats):
        return kernel(x, *inner, *(stat for stat, _ in stats), *options)
    towards = [stat.new_zeros(x.shape[1]) for stat, _ in stats]
    outputs = kernel(x, *inner, *towards, *options)
    # An empty batch leaves running statistics as they are.
    if x.numel() > 0:
        for (stat, dim), part in zip(stats, towards, strict=True):
            (stat if dim is None else front(stat, dim)).mul_(1 - momentum).add_(part)
    return outputs


def _frozen(x: Tensor, vectors: Pair, stats: Pair, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` of an ``x`` that all members share, as one scale and shift."""
    weight, bias = (along(vector, dim, 1, x.dim() - 2) for vector, dim in vectors)
    mean, var = (_wide(stat, dim, x.dim() - 2) for stat, dim in stats)
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return affine(x, scale, shift)


def _wide(stat: Tensor, dim: int | None, after: int) -> Tensor:
    # Running statistics have no gradient, and those in half precision are computed with in single.
    vector = along(stat.detach(), dim, 1, after)
    assert vector is not None
    return vector.to(torch.promote_types(stat.dtype, torch.float32))


@register("native_batch_norm_backward", "norm")
def native_batch_norm_backward(call: Call, grad: Tensor, x: Tensor, *args: Any) -> Result:
    """Gradient of batch normalisation of M times the channels."""
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S], [M,C]
    num_models, (grad_dim, x_dim, *dims) = call.num_models, call.dims
    vectors = (flat(vector, dim, num_models) for vector, dim in zip(args[:5], dims[:5], strict=True))
    grads = _native_backward(fold(grad, grad_dim, 1, num_models), fold(x, x_dim, 1, num_models), *vectors, *args[5:])
    axes = (1, 0, 0)
    pairs = zip(grads, axes, strict=True)
    return tuple(None if grad is None else split(grad, axis, num_models) for grad, axis in pairs), axes


@register("cudnn_batch_norm_backward", "norm")
def cudnn_batch_norm_backward(call: Call, x: Tensor, grad: Tensor, *args: Any) -> Result:
    """Gradient of batch normalisation of M times the channels, with PyTorch's own kernel."""
    *vectors, eps, _ = args
    x_dim, grad_dim, *dims = call.dims[:7]
    call = call._replace(dims=(grad_dim, x_dim, *dims))
    return native_batch_norm_backward(call, grad, x, *vectors, True, eps, [True, True, True])
