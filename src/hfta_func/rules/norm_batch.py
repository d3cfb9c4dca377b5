"""Batch and instance normalisation of M members as one with M times the channels.

There are rules for the operators that models call; a gradient inside ``vmap`` decomposes them into native operators, which
have PyTorch's own rules. Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func.calls.recompute import recalls
from hfta_func.errors import TraceError
from hfta_func.rules._affine import Vectors, affine, parted
from hfta_func.rules._layout import align, each, fold, models_first, split
from hfta_func.rules._registry import Call, Result, register


@register("batch_norm", "norm")
def batch_norm(call: Call, *args: Any) -> Result:
    """Batch normalisation with M times the channels; updates the running statistics of each member in place."""
    outputs, dims = _normalise(call, _batch_norm, *args)
    return outputs[0], dims[0]


def _batch_norm(x: Tensor, *args: Any) -> tuple[Tensor]:
    """PyTorch's operator, whose output the backward pass may compute again."""
    weight, bias, _, _, training, _, eps, cudnn = args
    if not training or (running := recalls()) is None:
        return (torch.batch_norm(x, *args),)
    y = torch.batch_norm(x, *args)

    # By the same kernel, to the same bits: the derivative of a maximum compares with the output that is computed again.
    def again(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)

    running.note(again, [x, weight, bias], y)
    return (y,)


@register("instance_norm", "norm")
def instance_norm(call: Call, *args: Any) -> Result:
    """Instance normalisation with M times the channels; updates the running statistics of each member in place."""
    outputs, dims = _normalise(call, lambda *args: (torch.instance_norm(*args),), *args)
    return outputs[0], dims[0]


def _normalise(call: Call, kernel: Callable[..., Any], x: Tensor, *args: Any) -> Result:
    """The output and, if the kernel returns them, the statistics of the batch."""
    num_models, (x_dim, *dims), stat_dims = call.num_models, call.dims[:3], call.dims[3:5]
    # Weight and bias; running mean and variance; all else.
    vectors, stats, options = args[:2], args[2:4], args[4:]
    training, momentum, eps, *_ = options
    if training and stats[0] is not None and x_dim is not None and None in stat_dims:
        raise TraceError(
            "a normalisation would update running statistics that all members share; pass the stacked buffers to vmap too, "
            "as functional(model) does; in a model, make them buffers"
        )
    rank = x.dim() - (x_dim is not None)
    if rank < 2 and x.numel() == 0:
        # Without a channel axis PyTorch accepts only an empty input, and there is nothing to normalise.
        return (x.clone(), x.new_empty(0), x.new_empty(0)), (x_dim, None, None)
    if x_dim is None:
        # [N,C,S] -> [N,C,S]; [N,C,S], [M,C] -> [M,1,C,1] -> [M,N,C,S]
        if not training:
            aligned = each(align, (*vectors, *stats), call.dims[1:], rank, rank - 2)
            return (_frozen(x, eps, *aligned), x.new_empty(0), x.new_empty(0)), (0, None, None)
        inner, outer = parted(vectors, dims, x, (x.shape[1],))
        y, *saved = _normalise_once(kernel, x, inner, stats, stat_dims, momentum, options)
        y = affine(y, *each(align, outer, dims, rank, rank - 2))
        return (y, *saved), (None if dims == [None, None] else 0, *(None for _ in saved))
    if x_dim == 0 and not training and all(dim is None for dim in (*dims, *stat_dims)):
        # [M,N,C,S], [C] -> [MN,C,S], [C] -> [M,N,C,S]
        y, *saved = kernel(fold(x, 0, 0, num_models), *vectors, *stats, *options)
        return (split(y, 0, num_models), *saved), (0, *(None for _ in saved))
    # [M,N,C,S], [M,C] -> [N,MC,S], [MC] -> [N,M,C,S], [M,C]
    folded_stats = each(fold, stats, stat_dims, 0, num_models)
    # On XLA an in-place update of a view does not reach its base.
    if cloned := training and x.device.type == "xla":
        folded_stats: list[Any] = [stat if stat is None else stat.clone() for stat in folded_stats]
    folded_vectors = each(fold, vectors, dims, 0, num_models)
    y, *saved = kernel(fold(x, x_dim, 1, num_models), *folded_vectors, *folded_stats, *options)
    if training:
        for updated, stat, dim in zip(folded_stats, stats, stat_dims, strict=True):
            # If folding had to copy, the kernel updated the copy.
            if stat is not None and dim is not None and (cloned or not models_first(stat, dim).is_contiguous()):
                models_first(stat, dim).copy_(split(updated, 0, num_models))
    return (split(y, 1, num_models), *(split(vector, 0, num_models) for vector in saved)), (1, *(0 for _ in saved))


def _normalise_once(
    kernel: Callable[..., Any], x: Tensor, inner: Vectors, stats: Any, stat_dims: Any, momentum: float, options: Any
) -> Any:
    """Normalise an input that all members share; the running statistics of all members move towards the same values."""
    if all(dim is None for dim in stat_dims):
        return kernel(x, *inner, *stats, *options)
    towards = [stat.new_zeros(x.shape[1]) for stat in stats]
    outputs = kernel(x, *inner, *towards, *options)
    # An empty batch leaves running statistics unchanged.
    if x.numel() > 0:
        for stat, dim, part in zip(stats, stat_dims, towards, strict=True):
            models_first(stat, dim).mul_(1 - momentum).add_(part)
    return outputs


def _frozen(x: Tensor, eps: float, weight: Any, bias: Any, mean: Any, var: Any) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` of an ``x`` that all members share, as one scale and shift."""
    # Running statistics have no gradient; those in half precision are computed with in single precision.
    mean, var = (stat.detach().to(torch.promote_types(stat.dtype, torch.float32)) for stat in (mean, var))
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return affine(x, scale, shift)
