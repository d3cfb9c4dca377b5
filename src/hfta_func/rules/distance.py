"""Distances between the rows of matrices of M members.

Dimension letters: M models, P and R rows, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import align, expand, front
from hfta_func.rules._registry import Call, Result, register

_DIRECT = 2  # PyTorch's number for a distance that is not computed with a matrix product


@register("cdist", "distance")
def cdist(call: Call, first: Tensor, second: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Result:
    """``[M,...,P,D], [M,...,R,D] -> [M,...,P,R]``; PyTorch's own composite, so that autocast knows it."""
    # Repeated here, as PyTorch's kernel would, because XLA's does not broadcast.
    both = [expand(x, dim, call.num_models) for x, dim in zip((first, second), call.dims, strict=False)]
    rank = max(x.dim() for x in both) - 1
    return torch.ops.aten.cdist.default(*(align(x, 0, rank) for x in both), p, compute_mode), 0


@register("pdist", "distance")
def pdist(call: Call, x: Tensor, p: float = 2.0) -> Result:
    """Distances of all pairs of rows, ``[M,P,D] -> [M,P(P-1)/2]``."""
    (dim, *_) = call.dims
    assert dim is not None
    x = front(x, dim)
    rows, columns = _pairs(x)
    return torch.ops.aten.cdist.default(x, x, p, _DIRECT)[:, rows, columns], 0


@register("_pdist_forward", "distance")
def pdist_forward(call: Call, x: Tensor, p: float = 2.0) -> Result:
    """The same."""
    return pdist(call, x, p)


@register("_pdist_backward", "distance")
def pdist_backward(call: Call, grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Result:
    """Gradient of the rows ``[M,P,D]``."""
    num_models, (grad_dim, x_dim, _, distances_dim) = call.num_models, call.dims
    x = expand(x, x_dim, num_models)
    rows, columns = _pairs(x)

    def square(values: Tensor, dim: int | None) -> Tensor:
        values = expand(values, dim, num_models)
        full = values.new_zeros(num_models, x.shape[1], x.shape[1])
        full = torch.ops.aten.index_put.default(full, [None, rows, columns], values)
        return full + full.mT

    # Each pair of rows stands in the square twice, and each time counts for its first row.
    return torch.ops.aten._cdist_backward.default(square(grad, grad_dim), x, x, p, square(distances, distances_dim)), 0


def _pairs(x: Tensor) -> Tensor:
    return torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
