"""Shapes of M members' tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.errors import TraceError
from hfta_func.rules._layout import models_first
from hfta_func.rules._registry import Call, Result, register


@register("view", "shape")
def view(call: Call, x: Tensor, size: list[int]) -> Result:
    """A view of all members if there is one, else a copy."""
    # [.., M, ..] -> [M, *size]
    return models_first(x, call.dims[0]).reshape(call.num_models, *size), 0


@register("reshape", "shape")
def reshape(call: Call, x: Tensor, size: list[int]) -> Result:
    """As ``view``: alone, most members would get a view."""
    return models_first(x, call.dims[0]).reshape(call.num_models, *size), 0


@register("flatten.using_ints", "shape")
def flatten(call: Call, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Result:
    """As ``view``: alone, most members would get a view."""
    x, rank = models_first(x, call.dims[0]), x.dim() - 1
    start, end = (dim + 1 if dim >= 0 else dim for dim in (start_dim, end_dim))
    return (x.flatten(start, end) if rank else x.unsqueeze(1)), 0


@register("contiguous", "shape")
def contiguous(call: Call, x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Result:
    """The members themselves if they are contiguous, as most members alone are, else a copy."""
    return models_first(x, call.dims[0]).contiguous(), 0


@register("as_strided_", "shape")
def as_strided_(call: Call, x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Result:
    """Other strides for axes of size 1, as pooling to one pixel sets them: they have no effect, so nothing is done."""
    dim = call.dims[0]
    layout = [pair for axis, pair in enumerate(zip(x.shape, x.stride(), strict=True)) if axis != dim]
    present, wanted = ([(n, s if n > 1 else 0) for n, s in pairs] for pairs in (layout, zip(size, stride, strict=True)))
    if present != wanted:
        raise TraceError(
            "as_strided_ reads memory outside of one member's tensor; use view, transpose or expand instead"
        )
    return x, dim
