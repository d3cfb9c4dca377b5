"""Shapes of M members' tensors."""

from __future__ import annotations

from torch import Tensor

from hfta_func._errors import TraceError
from hfta_func.rules._layout import front
from hfta_func.rules._registry import Call, Result, register


@register("view", "shape")
def view(call: Call, x: Tensor, size: list[int]) -> Result:
    """A view of all members if possible, else a copy, because one member's tensor has no model axis in between."""
    # [.., M, ..] -> [M, *size]
    dim = call.dims[0]
    return (x.view(call.num_models, *size) if dim == 0 else front(x, dim).reshape(call.num_models, *size)), 0


@register("as_strided_", "shape")
def as_strided_(call: Call, x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Result:
    """Other strides for axes of size 1, as pooling to one pixel sets them: they have no effect, so nothing is done."""
    dim = call.dims[0]
    own = [pair for axis, pair in enumerate(zip(x.shape, x.stride(), strict=True)) if axis != dim]
    ours, asked = ([(n, s if n > 1 else 0) for n, s in pairs] for pairs in (own, zip(size, stride, strict=True)))
    if ours != asked:
        raise TraceError(
            "as_strided_ reads memory outside of one member's tensor; use view, transpose or expand instead"
        )
    return x, dim
