"""Functions whose numbers PyTorch takes as Python numbers only, written for numbers that are tensors without axes.

Each function has the arguments of PyTorch's function of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def is_zero(rate: Any) -> bool:
    """Whether nothing is dropped in any member; the rates in a tensor may be 0 for some."""
    return not isinstance(rate, Tensor) and rate == 0


def checked(rate: Any) -> Any:
    """The rate; a rate in a tensor becomes NaN if PyTorch would refuse it."""
    return torch.where((rate >= 0) & (rate <= 1), rate, math.nan) if isinstance(rate, Tensor) else rate


def inverse(keep: Any) -> Any:
    """``1 / keep``, or 0 where nothing is kept."""
    if isinstance(keep, Tensor):
        return torch.where(keep == 0, torch.zeros_like(keep), 1 / keep)
    return 1 / keep if keep else 0.0


def leaky_relu(input: Tensor, negative_slope: Any = 0.01, inplace: bool = False) -> Tensor:
    """``F.leaky_relu``."""
    return _applied(input, lambda x: torch.where(x > 0, x, x * negative_slope), inplace)


def _elu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Tensor:
    # The exponential of positive values may be infinite and its gradient NaN, so they are replaced by 0.
    return _applied(input, lambda x: torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0, x))), inplace)


def _softplus(input: Tensor, beta: Any = 1.0, threshold: Any = 20.0) -> Tensor:
    scaled = input * beta
    is_linear = scaled > threshold
    return torch.where(is_linear, input, torch.log1p(torch.exp(torch.where(is_linear, 0, scaled))) / beta)


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """PyTorch's takes two numbers or two tensors."""
    return torch.clamp(input, _bound(min, input), _bound(max, input))


def _clamp_(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return input.clamp_(_bound(min, input), _bound(max, input))


def _bound(value: Any, like: Tensor) -> Any:
    if value is None or like.is_floating_point():
        return value if value is None else _like(value, like)
    # Integers are clamped by real numbers to real numbers.
    return value if isinstance(value, Tensor) else torch.tensor(value, device=like.device)


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0, weight: Tensor | None = None
) -> Tensor:
    distance = (input - target).abs()
    loss = torch.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return _reduced(loss if weight is None else loss * weight, reduction)


def _smooth_l1_loss(input: Tensor, target: Tensor, reduction: str = "mean", beta: Any = 1.0) -> Tensor:
    distance = (input - target).abs()
    near = distance < beta
    # With beta=0 nothing is near, and nothing is divided by it.
    curved = 0.5 * torch.where(near, distance, 0) ** 2 / torch.where(beta > 0, beta, 1)
    return _reduced(torch.where(near, curved, distance - 0.5 * beta), reduction)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: Any = 1e-5
) -> Tensor:
    wide, dims = _wide(input), [*range(-len(normalized_shape), 0)]
    centred = wide - wide.mean(dims, keepdim=True)
    normed = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return affine(normed.to(input.dtype), weight, bias)


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Tensor:  # fmt: skip
    wide, dims = _wide(input), [0, *range(2, input.dim())]
    mean, var = (wide.mean(dims), wide.var(dims, correction=0)) if training else (running_mean, running_var)
    if training and running_mean is not None:
        count = input.numel() // input.shape[1]
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(input.shape)}"
            )
        for average, stat in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            average += (stat.detach() - average) * momentum
    scale = _by_channel((var + eps).rsqrt(), input)
    normed = (wide - _by_channel(mean, input)) * scale
    return affine(normed.to(input.dtype), *(_by_channel(x, input) for x in (weight, bias)))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_channel(x: Any, like: Tensor) -> Any:
    return x if x is None else x.reshape(-1, *[1] * (like.dim() - 2))


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A normalized tensor times its weight plus its bias."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _like(value: Any, x: Tensor) -> Tensor:
    """A number as a tensor with the dtype and device of ``x``."""
    return value.to(x.dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype, device=x.device)


def _applied(input: Tensor, compute: Callable[[Tensor], Tensor], inplace: bool) -> Tensor:
    # On a copy, because the gradient needs the values that are overwritten.
    return input.copy_(compute(input.clone())) if inplace else compute(input)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


NUMBERED: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.clamp, torch.clip, Tensor.clamp, Tensor.clip), _clamp),
    **dict.fromkeys((Tensor.clamp_, Tensor.clip_), _clamp_),
    **{F.leaky_relu: leaky_relu, F.elu: _elu, F.softplus: _softplus},
    **{F.huber_loss: _huber_loss, F.smooth_l1_loss: _smooth_l1_loss},
    **{F.layer_norm: _layer_norm, F.batch_norm: _batch_norm},
}
"""Replacements by function, for calls with a number that is a tensor."""


def precision(met: list[Tensor]) -> torch.dtype:
    """The precision that a Python number has beside these tensors."""
    for value in met:
        if value.is_floating_point() or value.is_complex():
            return value.dtype.to_real() if value.is_complex() else value.dtype
    return torch.get_default_dtype()
