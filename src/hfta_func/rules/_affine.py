"""Scale and shift of a normalisation: inside its kernel if members share them, after it if they differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Vectors = tuple[Tensor | None, Tensor | None]
"""Weight and bias, or running mean and variance."""


def parted(vectors: Vectors, dims: Any, x: Tensor, shape: Any) -> tuple[Vectors, Vectors]:
    """Weight and bias for the kernel that normalises ``x``, and those to apply afterwards because they differ per member."""
    weight, bias = vectors
    if dims[0] is None and dims[1] is None:
        return vectors, (None, None)
    if weight is not None and dims[0] is None:
        return (weight, None), (None, bias)
    return (unit(x, shape, weight, bias), None), vectors


def unit(x: Tensor, shape: Any, *vectors: Tensor | None) -> Tensor | None:
    """Ones for the kernel if the vectors have a wider dtype than ``x``, so that it keeps statistics in that dtype."""
    wide = next((vector for vector in vectors if vector is not None and vector.dtype != x.dtype), None)
    return None if wide is None else wide.new_ones(shape)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """``x * weight + bias`` in the dtype of ``x``, whatever the dtype of the vectors, like the kernels."""
    if weight is None:
        y = x if bias is None else x + bias
    else:
        y = x * weight if bias is None else torch.addcmul(bias, x, weight)
    return y.to(x.dtype)
