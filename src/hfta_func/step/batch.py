"""Batches: trees whose leaves have a model axis in front, or are shared by all members."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hfta_func._errors import BatchError
from hfta_func._types import Tree


def check_batch(dims: Tree, batch: Tree, count: int, path: str = "batch") -> None:
    """Raise a BatchError unless every leaf has M parts along axis 0 where ``dims`` is 0."""
    if dims is None:
        return
    if isinstance(batch, Mapping):
        for name, child in batch.items():
            if isinstance(dims, Mapping) and name not in dims:
                raise BatchError(f"{path} has '{name}' but batch_dims does not; give one entry per part")
            check_batch(dims[name] if isinstance(dims, Mapping) else dims, child, count, f"{path}['{name}']")
    elif isinstance(batch, (tuple, list)):
        if isinstance(dims, (tuple, list)) and len(dims) != len(batch):
            raise BatchError(f"{path} has {len(batch)} parts but batch_dims has {len(dims)}; give one entry per part")
        for position, child in enumerate(batch):
            inner = dims[position] if isinstance(dims, (tuple, list)) else dims
            check_batch(inner, child, count, f"{path}[{position}]")
    elif not isinstance(batch, Tensor):
        raise BatchError(f"{path} is a {type(batch).__qualname__}; the leaves of a batch must be tensors")
    elif batch.dim() == 0 or batch.shape[0] != count:
        raise BatchError(
            f"{path} is {list(batch.shape)} but the array has {count} models; give every model its own part "
            f"[{count}, N, ...], or make the step with batch_dims=None to share one batch"
        )


def take_batch(dims: Tree, batch: Tree, index: slice | Tensor) -> Tree:
    """The parts of a batch that belong to the members at ``index``, along axis 0 where ``dims`` is 0; the rest is shared."""
    if dims is None:
        return batch
    if isinstance(batch, Mapping):
        return {
            name: take_batch(dims[name] if isinstance(dims, Mapping) else dims, child, index)
            for name, child in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        inner = dims if isinstance(dims, (tuple, list)) else [dims] * len(batch)
        parts = [take_batch(dim, child, index) for dim, child in zip(inner, batch, strict=True)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[index]
