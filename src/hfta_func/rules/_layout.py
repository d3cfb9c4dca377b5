"""The layout verbs of every batching rule: fold, its inverse split, and front, with its kin expand and align."""

from __future__ import annotations

from torch import Tensor


def fold(x: Tensor, model_dim: int | None, into: int, num_models: int) -> Tensor:
    """Merge the model axis into axis ``into`` of what one member sees: ``[..., M, ..., C, ...] -> [..., M*C, ...]``.

    An ``x`` without a model axis (``model_dim=None``) is shared and gets repeated, so a rule calls this only where the
    kernel needs a value per member.
    """
    if model_dim is None:
        x, model_dim = x.expand(num_models, *x.shape), 0
    return (x if model_dim == into else x.movedim(model_dim, into)).flatten(into, into + 1)


def front(x: Tensor, model_dim: int) -> Tensor:
    """Move the model axis to the front; where it is there already, autograd gets no node."""
    return x if model_dim == 0 else x.movedim(model_dim, 0)


def expand(x: Tensor, model_dim: int | None, num_models: int) -> Tensor:
    """``[M, ...]`` of a shared tensor too, as a view that repeats it."""
    return x.expand(num_models, *x.shape) if model_dim is None else front(x, model_dim)


def align(x: Tensor, model_dim: int | None, rank: int) -> Tensor:
    """``[M, ...]``, or ``[1, ...]`` if shared, with ``rank`` axes for a member: members then broadcast as one does."""
    x = x.unsqueeze(0) if model_dim is None else front(x, model_dim)
    return x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])


def split(x: Tensor, axis: int, num_models: int) -> Tensor:
    """Inverse of :func:`fold`: ``[..., M*C, ...] -> [..., M, C, ...]``; the model axis is ``axis``."""
    return x.unflatten(axis, (num_models, x.shape[axis] // num_models))
