"""Layouts for batching rules: fold and its inverse split; models_first, expand and align; each, for several; rows_of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import expand as expand
from hfta_func._torch import is_wrapped, models_first, num_dispatch_modes


def fold(x: Tensor, model_dim: int | None, into: int, num_models: int) -> Tensor:
    """Merge the model axis into axis ``into`` of one member's tensor: ``[..., M, ..., C, ...] -> [..., M*C, ...]``.

    A shared ``x`` (``model_dim=None``) is repeated, so call this only if the kernel needs a value per member.
    """
    if model_dim is None:
        x, model_dim = x.expand(num_models, *x.shape), 0
    return (x if model_dim == into else x.movedim(model_dim, into)).flatten(into, into + 1)


def split(x: Tensor, axis: int, num_models: int) -> Tensor:
    """Inverse of :func:`fold`: ``[..., M*C, ...] -> [..., M, C, ...]``; the model axis is ``axis``."""
    return x.unflatten(axis, (num_models, x.shape[axis] // num_models))


def align(x: Tensor, model_dim: int | None, rank: int, after: int = 0) -> Tensor:
    """``[M, ...]``, or ``[1, ...]`` if shared, so that members broadcast like single tensors of ``rank`` axes.

    Axes of size 1 are added: ``after`` of them at the end, the others behind the model axis.
    """
    x = x.unsqueeze(0) if model_dim is None else models_first(x, model_dim)
    return x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim() - after), *x.shape[1:], *(1,) * after)


def each(verb: Callable[..., Tensor], values: Sequence[Any], dims: Sequence[Any], *args: int) -> list[Any]:
    """``verb(x, dim, *args)`` for every tensor among the values; other values are returned as they are.

    ``dims`` may go on behind the values, as the ``dims`` of a call do.
    """
    pairs = zip(values, dims[: len(values)], strict=True)
    return [verb(x, dim, *args) if isinstance(x, Tensor) else x for x, dim in pairs]


def rows_of(indices: Tensor, size: int) -> Tensor:
    """Rows of the folded table for indices ``[M,N]`` into tables of one size."""
    starts = torch.arange(0, len(indices) * size, size, dtype=indices.dtype, device=indices.device)
    rows = indices + starts.reshape(-1, *(1,) * (indices.dim() - 1))
    # An index outside its member's table must not become a row of another member. Reading values is faster, but a tracing
    # compiler and outer transforms do not allow it.
    if indices.device.type == "cpu" and indices.numel() > 0 and not (num_dispatch_modes() or is_wrapped(indices)):
        least, most = indices.aminmax()
        if int(least) >= 0 and int(most) < size:
            return rows
    return torch.where((indices >= 0) & (indices < size), rows, -1)
