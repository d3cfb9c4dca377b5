"""Activations with parameters of M members."""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import align, each
from hfta_func.rules._registry import Call, Result, register


@register("_prelu_kernel", "activation")
def prelu(call: Call, x: Tensor, weight: Tensor) -> Result:
    """Elementwise; PyTorch passes the slopes as ``[1,C,1]``, shaped like the input."""
    x, weight = _aligned(call, x, weight)
    if x.device.type == "xla":
        # XLA's kernel takes the second axis for the channels, whatever the shape of the slopes.
        return torch.where(x > 0, x, weight * x), 0
    return torch.ops.aten._prelu_kernel.default(x, weight), 0


@register("_prelu_kernel_backward", "activation")
def prelu_backward(call: Call, grad: Tensor, x: Tensor, weight: Tensor) -> Result:
    """Gradients of the input and of the slopes, the latter not yet summed."""
    grad, x, weight = _aligned(call, grad, x, weight)
    if x.device.type == "xla":
        return (torch.where(x > 0, grad, weight * grad), torch.where(x > 0, 0, x * grad)), (0, 0)
    return torch.ops.aten._prelu_kernel_backward.default(grad, x, weight), (0, 0)


def _aligned(call: Call, *tensors: Tensor) -> list[Tensor]:
    rank = max(x.dim() - (dim is not None) for x, dim in zip(tensors, call.dims, strict=True))
    first, *others = each(align, tensors, call.dims, rank)
    # The kernel makes its output as large as the first tensor.
    return [first.expand(call.num_models, *first.shape[1:]), *others]
