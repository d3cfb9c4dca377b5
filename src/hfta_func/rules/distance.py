"""Distances between the rows of matrices of M members.

Dimension letters: M models, P and R rows, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import align, each, expand, models_first
from hfta_func.rules._registry import Call, Result, register, register_looped

_DIRECT = 2  # PyTorch's number for a distance computed without a matrix product


@register("cdist", "distance")
def cdist(call: Call, first: Tensor, second: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Result:
    """``[M,...,P,D], [M,...,R,D] -> [M,...,P,R]``, by PyTorch's decomposable operator, which autocast knows."""
    # Shared tensors are repeated, as PyTorch's kernel would do, because XLA's kernel does not broadcast.
    both = each(expand, (first, second), call.dims, call.num_models)
    rank = max(x.dim() for x in both) - 1
    return torch.ops.aten.cdist.default(*each(align, both, (0, 0), rank), p, compute_mode), 0


@register("_cdist_backward", "distance")
def cdist_backward(call: Call, grad: Tensor, first: Tensor, second: Tensor, p: float, distances: Tensor) -> Result:
    """The gradient of ``first``; PyTorch's rule mixes members where some of the tensors are shared."""
    values = each(expand, (grad, first, second, distances), (*call.dims[:3], call.dims[4]), call.num_models)
    rank = max(x.dim() for x in values) - 1
    grad, first, second, distances = (x.contiguous() for x in each(align, values, (0,) * 4, rank))
    return torch.ops.aten._cdist_backward.default(grad, first, second, p, distances), 0


@register("pdist", "distance")
def pdist(call: Call, x: Tensor, p: float = 2.0) -> Result:
    """Distances between all pairs of rows, ``[M,P,D] -> [M,P(P-1)/2]``."""
    x = models_first(x, call.dims[0])
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    return torch.ops.aten.cdist.default(x, x, p, _DIRECT)[:, rows, columns], 0


register_looped("distance", "_pdist_forward", "_pdist_backward")
