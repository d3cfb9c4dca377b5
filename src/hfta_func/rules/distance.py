"""Distances between the rows of matrices of M members.

Dimension letters: M models, P and R rows, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import align, each, expand, front
from hfta_func.rules._registry import Call, Result, register

_DIRECT = 2  # PyTorch's number for a distance computed without a matrix product


@register("cdist", "distance")
def cdist(call: Call, first: Tensor, second: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Result:
    """``[M,...,P,D], [M,...,R,D] -> [M,...,P,R]``, by PyTorch's decomposable operator, which autocast knows."""
    # Shared tensors are repeated here, as PyTorch's kernel would do, because XLA's kernel does not broadcast.
    both = each(expand, (first, second), call.dims, call.num_models)
    rank = max(x.dim() for x in both) - 1
    return torch.ops.aten.cdist.default(*each(align, both, (0, 0), rank), p, compute_mode), 0


@register("pdist", "distance")
def pdist(call: Call, x: Tensor, p: float = 2.0) -> Result:
    """Distances between all pairs of rows, ``[M,P,D] -> [M,P(P-1)/2]``."""
    x = front(x, call.dims[0])
    rows, columns = _pairs(x)
    return torch.ops.aten.cdist.default(x, x, p, _DIRECT)[:, rows, columns], 0


register("_pdist_forward", "distance")(pdist)


@register("_pdist_backward", "distance")
def pdist_backward(call: Call, grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Result:
    """Gradient of the rows ``[M,P,D]``."""
    grad, x, _, distances = each(expand, (grad, x, p, distances), call.dims, call.num_models)
    rows, columns = _pairs(x)

    def square(values: Tensor) -> Tensor:
        full = values.new_zeros(len(x), x.shape[1], x.shape[1])
        full = torch.ops.aten.index_put.default(full, [None, rows, columns], values)
        return full + full.mT

    # Each pair of rows occurs in the square twice and counts for its first row each time.
    return torch.ops.aten._cdist_backward.default(square(grad), x, x, p, square(distances)), 0


def _pairs(x: Tensor) -> Tensor:
    return torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
