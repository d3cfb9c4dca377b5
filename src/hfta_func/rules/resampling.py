"""Resampling of M members' images as one with M times the batch, if PyTorch has no rule.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hfta_func.rules._layout import fold, split
from hfta_func.rules._registry import Call, Result, register_each

_NAMES = [f"_upsample_nearest_exact{space}d" for space in (1, 2, 3)]


@register_each("resampling", *_NAMES, *(f"{name}.vec" for name in _NAMES))
def resample(operator: Any, call: Call, x: Tensor, *options: Any) -> Result:
    """Members join the batch."""
    # [M,N,C,S] -> [MN,C,S]
    return split(operator(fold(x, call.dims[0], 0, call.num_models), *options), 0, call.num_models), 0


@register_each("resampling", *(f"{name}_backward" for name in _NAMES))
def resample_backward(operator: Any, call: Call, grad: Tensor, out: Any, size: Any, *scales: Any) -> Result:
    """Gradient of an input of a ``size``; members join the batch."""
    grad, size = fold(grad, call.dims[0], 0, call.num_models), [call.num_models * size[0], *size[1:]]
    return split(operator(grad, out, size, *scales), 0, call.num_models), 0
