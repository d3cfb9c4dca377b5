"""Scale and shift of a normalisation: inside its kernel where members share them, after it where each has its own.

Public: :func:`parted`, :func:`affine`, :func:`unit`, :func:`along`, :func:`flat`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front

Batched = tuple[Any, int | None]
"""A tensor or None, and its model axis."""

Pair = tuple[Batched, Batched]
"""Weight and bias, or running mean and variance."""


def parted(weight: Batched, bias: Batched, x: Tensor, shape: Any) -> tuple[Any, Pair]:
    """Which weight and bias the kernel takes for ``x``, and which come after it because members have their own."""
    if weight[1] is None and bias[1] is None:
        return (weight[0], bias[0]), ((None, None), (None, None))
    if weight[0] is not None and weight[1] is None:
        return (weight[0], None), ((None, None), bias)
    return (unit(x, shape, weight[0], bias[0]), None), (weight, bias)


def unit(x: Tensor, shape: Any, *vectors: Tensor | None) -> Tensor | None:
    """What the kernel takes for ``x`` in place of vectors in a wider type, beside which it keeps statistics in that type."""
    wide = next((vector for vector in vectors if vector is not None and vector.dtype != x.dtype), None)
    return None if wide is None else wide.new_ones(shape)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x * weight + bias`` in the dtype of ``x``, whatever that of the vectors, as the kernels do it."""
    if weight is None:
        y = x if bias is None else x + bias
    else:
        y = x * weight if bias is None else torch.addcmul(bias, x, weight)
    return y.to(x.dtype)


def along(vector: Tensor | None, dim: int | None, before: int, after: int) -> Tensor | None:
    """A vector against what it scales, ``[M,C] -> [M,1,C,1]``, with ``before`` and ``after`` axes of length one."""
    if vector is None:
        return None
    models = () if dim is None else (vector.shape[dim],)
    vector = vector if dim is None else front(vector, dim)
    return vector.reshape(*models, *(1,) * before, *vector.shape[len(models) :], *(1,) * after)


def flat(vector: Tensor | None, dim: int | None, num_models: int) -> Tensor | None:
    """``[M,C] -> [MC]``; a shared vector is repeated."""
    return None if vector is None else fold(vector, dim, 0, num_models)
