"""Functions of ``torch.nn.functional`` that do not work under vmap, rewritten with the same mathematics.

PyTorch's versions read the values of their tensors, or properties that tensors do not have under vmap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class lowered(TorchFunctionMode):
    """Replaces the functions in :data:`LOWERED` inside the ``with`` block, as :class:`hfta_func.routed` does too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace one call of a torch function."""
        return LOWERED.get(func, func)(*args, **(kwargs or {}))


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Clamps negative variances to ``eps``, as it does all below ``eps``; refusing them would read their values."""
    if isinstance(var, Tensor):
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        differing = [size for size, own in zip(var.shape, input.shape, strict=False) if size != own]
        if var.dim() != input.dim() or differing not in ([], [1]):
            raise ValueError("var is of incorrect size")
    else:
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = torch.full_like(input, var)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    # The gradient ignores the clamp.
    var = torch.where(var < eps, eps + (var - var.detach()), var)
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """Never in chunks: that operator reads ``requires_grad`` of its arguments, which is unknown under vmap."""
    return F.linear_cross_entropy(*args, **kwargs)


def _binary_cross_entropy_with_logits(*args: Any, **kwargs: Any) -> Tensor:
    """Casts to float32 under autocast, which never sees the operator, because vmap decomposes it first."""
    return F.binary_cross_entropy_with_logits(
        *map(_float32, args), **{name: _float32(value) for name, value in kwargs.items()}
    )


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float() if torch.is_autocast_enabled(value.device.type) else value
    return value


def _without_layout(func: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves out a memory format that needs four or five axes, of which an array has one more; it changes no values."""

    @functools.wraps(func)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
            del kwargs["memory_format"]
        return func(*args, **kwargs)

    return plain


_CASTS = "bfloat16 bool byte cdouble cfloat chalf char double float half int long short to".split()

LOWERED: dict[Any, Callable[..., Any]] = {
    **{func: _without_layout(func) for func in (Tensor.contiguous, Tensor.clone, torch.clone)},
    **{func: _without_layout(func) for func in (torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like)},
    **{func: _without_layout(func) for func in (getattr(Tensor, name) for name in _CASTS)},
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.binary_cross_entropy_with_logits: _binary_cross_entropy_with_logits,
}
"""Replacement by function."""

if hasattr(F, "linear_cross_entropy"):
    LOWERED[F.linear_cross_entropy] = _linear_cross_entropy
