"""Convolutions of M members as one convolution.

Dimension letters: M models, N batch, G groups, I and O channels of one group in and out, S space, K kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register

_convolution = torch.ops.aten.convolution.default


@register("convolution", "conv")
def convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Result:
    """Forward and transposed, any number of space axes, any mix of shared and per-member inputs."""
    num_models, (x_dim, weight_dim, bias_dim) = call.num_models, call.dims[:3]
    # A bias that is per member exactly when the filters are goes into the kernel; any other is added afterwards.
    separate = bias is not None and (weight_dim is None) != (bias_dim is None)
    inner = None if separate else bias
    if weight_dim is None:
        # [M,N,GI,S], [GO,I,K] -> [MN,GI,S], [GO,I,K] -> [MN,GO,S] -> [M,N,GO,S]
        if x_dim is None:
            y, dim = _convolution(x, weight, None, *options), None
        else:
            y = _convolution(fold(x, x_dim, 0, num_models), weight, inner, *options)
            y, dim = split(y, 0, num_models), 0
    else:
        # Only a shared input can be read by one wide convolution.
        lower = _wide if call.lowering == "wide" and x_dim is None else _grouped
        y, dim = lower(call, x, weight, inner, *options)
    if separate:
        assert bias is not None
        y, dim = _add_bias(y, dim, bias, bias_dim)
    return y, dim


def _grouped(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Result:
    # [M,N,GI,S], [M,GO,I,K] -> [N,MGI,S], [MGO,I,K] -> [N,MGO,S] -> [N,M,GO,S]
    num_models, (x_dim, weight_dim, bias_dim) = call.num_models, call.dims[:3]
    *geometry, groups = options
    y = _convolution(
        fold(x, x_dim, 1, num_models),
        fold(weight, weight_dim, 0, num_models),
        None if bias is None else fold(bias, bias_dim, 0, num_models),
        *geometry,
        groups * num_models,
    )
    return split(y, 1, num_models), 1


def _wide(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Result:
    # [N,GI,S], [M,GO,I,K] -> [N,GI,S], [GMO,I,K] -> [N,GMO,S] -> [N,G,M,O,S] -> [N,M,GO,S]
    num_models, (_, weight_dim, bias_dim) = call.num_models, call.dims[:3]
    *_, transposed, _, groups = options
    assert weight_dim is not None
    if transposed:
        # The filters of a transposed convolution are [GI,O,K]: members go next to O.
        weight = fold(weight, weight_dim, 1, num_models)
    else:
        weight = _interleave(weight, weight_dim, groups)
    if bias is not None:
        assert bias_dim is not None
        bias = _interleave(bias, bias_dim, groups)
    y = split(_convolution(x, weight, bias, *options), 1, groups)
    return split(y, 2, num_models).transpose(1, 2).flatten(2, 3), 1


def _interleave(weight: Tensor, dim: int, groups: int) -> Tensor:
    """``[M,GO,...] -> [GMO,...]``: each group's filters of all members side by side."""
    return split(front(weight, dim), 1, groups).transpose(0, 1).flatten(0, 2)


def _add_bias(y: Tensor, dim: int | None, bias: Tensor, bias_dim: int | None) -> Result:
    space = y.dim() - 2 - (dim is not None)
    if bias_dim is None:
        bias = bias.reshape(1, -1, *(1,) * space)
        return (y if dim is None else front(y, dim)) + bias, None if dim is None else 0
    # [M,N,O,S] + [M,1,O,1]
    bias = front(bias, bias_dim).unsqueeze(1).reshape(bias.shape[bias_dim], 1, -1, *(1,) * space)
    return (y.unsqueeze(0) if dim is None else front(y, dim)) + bias, 0
