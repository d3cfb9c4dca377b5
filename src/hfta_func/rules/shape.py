"""Shapes of M members' tensors."""

from __future__ import annotations

from torch import Tensor

from hfta_func.rules._layout import front
from hfta_func.rules._registry import Call, Result, register


@register("view", "shape")
def view(call: Call, x: Tensor, size: list[int]) -> Result:
    """A view of all members where there is one, else a copy: a member's own tensor has no model axis in between."""
    # [.., M, ..] -> [M, *size]
    (dim, *_) = call.dims
    assert dim is not None
    return (x.view(call.num_models, *size) if dim == 0 else front(x, dim).reshape(call.num_models, *size)), 0
