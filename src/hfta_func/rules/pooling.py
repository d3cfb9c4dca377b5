"""Pooling of M members as one pooling with M times the batch or M times the channels.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, split
from hfta_func.rules._registry import Call, Result, register


@register("max_pool2d_with_indices", "pooling")
def max_pool2d(call: Call, x: Tensor, *options: Any) -> Result:
    """Maxima and their positions, ``[M,N,C,H,W]`` or ``[M,C,H,W]``."""
    # Members join the axis that they already stand next to in memory, so that nothing is copied:
    # [N,M,C,S] -> [N,MC,S] or [M,N,C,S] -> [MN,C,S]
    (dim, *_) = call.dims
    assert dim is not None
    into = 1 if dim == 1 and x.dim() == 5 else 0
    values, indices = torch.ops.aten.max_pool2d_with_indices.default(fold(x, dim, into, call.num_models), *options)
    return (split(values, into, call.num_models), split(indices, into, call.num_models)), (into, into)
