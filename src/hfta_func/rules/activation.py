"""Activations with parameters of M members."""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import front
from hfta_func.rules._operator import lower_precision
from hfta_func.rules._registry import Call, Result, register


@register("_prelu_kernel", "activation")
def prelu(call: Call, x: Tensor, weight: Tensor) -> Result:
    """Elementwise; the slopes ``[1,C,1]`` come shaped like the input."""
    x, weight = _broadcast(call, *lower_precision(x, weight))
    if x.device.type == "xla":
        # Its kernel takes the second axis for the channels, whatever the shape of the slopes.
        return torch.where(x > 0, x, weight * x), 0
    return torch.ops.aten._prelu_kernel.default(x, weight), 0


@register("_prelu_kernel_backward", "activation")
def prelu_backward(call: Call, grad: Tensor, x: Tensor, weight: Tensor) -> Result:
    """Gradients of input and slopes, the latter not yet summed."""
    grad, x, weight = _broadcast(call, grad, x, weight)
    if x.device.type == "xla":
        return (torch.where(x > 0, grad, weight * grad), torch.where(x > 0, 0, x * grad)), (0, 0)
    return torch.ops.aten._prelu_kernel_backward.default(grad, x, weight), (0, 0)


def _broadcast(call: Call, *tensors: Tensor) -> list[Tensor]:
    """All tensors with the model axis in front, of the largest number of axes."""
    lead = [x.unsqueeze(0) if dim is None else front(x, dim) for x, dim in zip(tensors, call.dims, strict=True)]
    rank = max(x.dim() for x in lead)
    lead = [x.reshape(x.shape[0], *(1,) * (rank - x.dim()), *x.shape[1:]) for x in lead]
    # The kernel makes its output as large as the first tensor.
    return [lead[0].expand(call.num_models, *lead[0].shape[1:]), *lead[1:]]
