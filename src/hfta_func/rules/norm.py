"""Normalisation of M members as one normalisation of M times the channels.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func._errors import TraceError
from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register


@register("batch_norm", "norm")
def batch_norm(
    call: Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *options: float | bool,
) -> Result:
    """Batch normalisation; running statistics per member are updated in place, as one member's would be."""
    # [M,N,C,S] -> [N,MC,S] -> [N,M,C,S]; vectors [M,C] -> [MC]
    num_models = call.num_models
    x_dim, weight_dim, bias_dim, mean_dim, var_dim = call.dims[:5]
    if training and running_mean is not None and x_dim is not None and (mean_dim is None or var_dim is None):
        raise TraceError(
            "batch_norm would update running statistics that all members share; pass the stacked buffers to vmap too, as "
            "functional(model) does"
        )
    stats = [_flat(stat, dim, num_models) for stat, dim in ((running_mean, mean_dim), (running_var, var_dim))]
    vectors = [_flat(vector, dim, num_models) for vector, dim in ((weight, weight_dim), (bias, bias_dim))]
    y = _batch_norm(fold(x, x_dim, 1, num_models), *vectors, *stats, training, *options)
    if training:
        for flat, stat, dim in ((stats[0], running_mean, mean_dim), (stats[1], running_var, var_dim)):
            # Where flattening had to copy, the copy was updated.
            if stat is None or flat is None:
                continue
            updated = split(flat, 0, num_models)
            if dim is None:
                stat.copy_(updated[0])
            elif not front(stat, dim).is_contiguous():
                front(stat, dim).copy_(updated)
    return split(y, 1, num_models), 1


_batch_norm = torch.ops.aten.batch_norm.default


def _flat(vector: Tensor | None, dim: int | None, num_models: int) -> Tensor | None:
    return None if vector is None else fold(vector, dim, 0, num_models)
