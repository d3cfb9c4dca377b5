"""Masks for parameters of a padded model, by bits: as exact as choices, and many times faster on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import (
    add_batch_dim,
    current_interpreter,
    depth,
    has_tangents,
    is_batched,
    is_captured,
    unwrap_leaves,
)
from hfta_func._types import Params
from hfta_func.rules._operator import Operator

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an entry, integers of the same size."""


def masked(params: Params, masks: Mapping[str, Mapping[int, Tensor]], size: Tensor) -> Params:
    """A member's parameters, with zeros for the entries that its size lacks, which get no gradient.

    Args:
        params: Parameters by path.
        masks: Which entries along an axis each of K sizes has, ``bool[K, length]``, by path and axis.
        size: Which size the member has, ``int64[]``.
    """
    given = dict(params)
    for path, axes in masks.items():
        if path in params:
            mask: Tensor | None = None
            for axis, table in axes.items():
                has = table.to(size.device).index_select(0, size.reshape(1)).squeeze(0)
                part = has.reshape([-1] + [1] * (params[path].dim() - axis - 1)) if params[path].dim() else has[0]
                mask = part if mask is None else mask & part
            given[path] = params[path] if mask is None else kept(params[path], mask)
    return given


def kept(x: Tensor, mask: Tensor) -> Tensor:
    """The entries that a mask keeps, and zeros, which get no gradient, whatever the others and their gradients are."""
    integers = _INTEGERS.get(x.itemsize)
    is_plain = is_batched(x) and is_batched(mask) and depth() == 1 and not torch.compiler.is_compiling()
    # Only what a compiler does not trace can ask what captures tensors.
    if integers is None or not is_plain or is_captured([x]) or has_tangents():
        return torch.where(mask, x, 0.0)
    # The operator has the gradient that is written for it outside of vmap only.
    bits = -mask.expand(*x.shape[: x.dim() - mask.dim()], *mask.shape).to(integers)
    (x, bits), dims = unwrap_leaves((x, bits), 1)
    with current_interpreter().lower():
        result = _kept(*(one.movedim(dim, 0) for one, dim in zip((x, bits), dims, strict=True)))
    return add_batch_dim(result, 0, 1)


def _forward(x: Tensor, bits: Tensor) -> Tensor:
    return (x.view(bits.dtype) & bits).view(x.dtype)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _kept(grad, *ctx.saved_tensors), None


_kept = Operator("kept(Tensor x, Tensor bits) -> Tensor", _forward, _setup, _backward)
