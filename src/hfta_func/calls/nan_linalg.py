"""Functions that refuse bad values, such as a singular matrix, rewritten to give NaN to the member that has them.

PyTorch's versions raise for a whole batch, or end the process, so one bad member would end all others. The whole result of a
member becomes NaN, even if only one of its matrices is bad.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

linalg: Any = torch.linalg


def _spoiled(outputs: Any, bad: Tensor) -> Any:
    """The outputs, NaN if ``bad``, except integers: pivots and ranks."""
    if isinstance(outputs, Tensor):
        return outputs.masked_fill(bad, math.nan) if outputs.is_floating_point() or outputs.is_complex() else outputs
    return type(outputs)([_spoiled(output, bad) for output in outputs])


def _is_not_finite(x: Tensor) -> Tensor:
    return ~x.isfinite().all()


def _eye(x: Tensor) -> Tensor:
    return torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)


def _masked(func: Callable[..., Any], is_bad: Callable[[Tensor], Tensor] = _is_not_finite) -> Callable[..., Any]:
    """``func`` with a bad matrix replaced by the identity, so that the backward pass never sees the bad one."""

    @functools.wraps(func)
    def masked(*args: Any, **kwargs: Any) -> Any:
        x, *rest = args or (kwargs.pop("A"),)
        if not isinstance(x, Tensor) or x.dim() < 2 or kwargs.get("out") is not None:
            return func(x, *rest, **kwargs)
        bad = is_bad(x.detach())
        return _spoiled(func(torch.where(bad, _eye(x), x), *rest, **kwargs), bad)

    return masked


def _without_info(outputs: Any) -> Any:
    """The outputs of a function that reports failures in ``info``, its last output; NaN if there is one."""
    *results, info = outputs
    return _spoiled(results, (info != 0).any())


def _cholesky(A: Tensor, upper: bool = False, **options: Any) -> Tensor:
    return _without_info(linalg.cholesky_ex(A, upper=upper, **options))[0]


def _inv(A: Tensor, **options: Any) -> Tensor:
    return _without_info(linalg.inv_ex(A, **options))[0]


def _in_float32(x: Tensor) -> Tensor:
    """As autocast casts what it solves: factors of matrices it does not list."""
    is_low = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if is_low and torch.is_autocast_enabled(x.device.type) else x


def _is_singular(x: Tensor) -> Tensor:
    return (linalg.lu_factor_ex(_in_float32(x)).info != 0).any()


# Not by solve_ex, whose derivative under a transform solves with the matrix again.
_solve = _masked(linalg.solve, _is_singular)


def _binary_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """NaN where input or target are no probabilities."""
    bad = ~((input >= 0) & (input <= 1)).all() | ~((target >= 0) & (target <= 1)).all()
    given = torch.where(bad, 0.5, input), torch.where(bad, 0.5, target)
    return _spoiled(F.binary_cross_entropy(*given, *args, **kwargs), bad)


def _grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """NaN where the grid is: PyTorch may read outside of its memory there."""
    bad = grid.isnan().any(-1)
    return F.grid_sample(input, grid.masked_fill(bad.unsqueeze(-1), 0), *args, **kwargs).masked_fill(
        bad.unsqueeze(1), math.nan
    )


_SPECTRAL = "cond eig eigh eigvals eigvalsh matrix_rank pinv svd svdvals".split()

GUARDED: dict[Any, Callable[..., Any]] = {
    **{getattr(linalg, name): _masked(getattr(linalg, name)) for name in _SPECTRAL},
    linalg.cholesky: _cholesky,
    **dict.fromkeys((linalg.inv, torch.inverse, Tensor.inverse), _inv),
    linalg.solve: _solve,
    F.binary_cross_entropy: _binary_cross_entropy,
    F.grid_sample: _grid_sample,
}
"""Replacement by function."""
