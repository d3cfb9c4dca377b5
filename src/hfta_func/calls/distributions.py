"""The values that random calls write into a tensor, made of the noise of their call site.

Each is ``draw(key, input, ...)`` with the arguments of the in-place call, for a tensor like ``input``. Logarithms and
tangents are taken in float64, so that devices, which round them differently, agree on nearly all values in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hfta_func import random


def uniform(key: random.Stream, input: Tensor, from_: float = 0.0, to: float = 1.0, **bounds: float) -> Tensor:
    """Between two bounds."""
    low = bounds.get("from", from_)
    return random.uniform(key, input.shape, dtype=input.dtype) * (to - low) + low


def normal(key: random.Stream, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """With a mean and a standard deviation."""
    return random.normal(key, input.shape, dtype=input.dtype) * std + mean


def bernoulli(key: random.Stream, input: Tensor, p: Any = 0.5) -> Tensor:
    """1 with probability ``p``, else 0."""
    return random.bernoulli(key, p, input.shape).to(input.dtype)


def exponential(key: random.Stream, input: Tensor, lambd: float = 1.0) -> Tensor:
    """With the rate ``lambd``."""
    # Shifted by half a grid step, so that the logarithm is finite.
    uniform = random.uniform(key, input.shape).double() + 2.0**-25
    return (-uniform.log() / lambd).to(input.dtype)


def cauchy(key: random.Stream, input: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """With a median and a half width."""
    return (torch.tan(math.pi * (_open_uniform(key, input.shape) - 0.5)) * sigma + median).to(input.dtype)


def geometric(key: random.Stream, input: Tensor, p: float) -> Tensor:
    """The number of tries until the first success."""
    tries = torch.log(_open_uniform(key, input.shape)) / (math.log1p(-p) if p < 1 else -math.inf)
    return tries.ceil().clamp(min=1).to(input.dtype)


def log_normal(key: random.Stream, input: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """The exponential of a normal draw."""
    return (random.normal(key, input.shape, dtype=torch.float64) * std + mean).exp().to(input.dtype)


def without_replacement(key: random.Stream, weights: Tensor, count: int) -> Tensor:
    """Different classes ``[..., count]`` in proportion to weights ``[..., C]``."""
    # The order of arrival at these rates is that of draws one after another (Efraimidis and Spirakis, IPL 2006).
    return (weights / -torch.log(_open_uniform(key, weights.shape))).topk(count, -1).indices


def _open_uniform(key: random.Stream, shape: Any) -> Tensor:
    # Shifted by half a grid step, so that it is never 0.
    return random.uniform(key, shape, dtype=torch.float64) + 2.0**-54
