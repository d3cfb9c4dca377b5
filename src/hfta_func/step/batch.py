"""Batches: trees whose leaves have a model axis in front, or are shared by all members."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hfta_func._errors import BatchError
from hfta_func._tree import tree_map
from hfta_func._types import Tree

# Of these the transforms take the parts; anything else, such as another mapping, would be a leaf to them.
_DICTS = (dict, OrderedDict, defaultdict)


def check_batch(dims: Tree, batch: Tree, count: int, path: str = "batch") -> None:
    """Raise a BatchError unless ``dims`` has the structure of the batch, whose leaves have M parts where it is 0."""
    if dims is None:
        return
    parts = _parts(batch)
    if not isinstance(dims, int):
        own = _parts(dims)
        if parts is None or own is None or _kind(dims) is not _kind(batch):
            raise BatchError(
                f"{path} is a {type(batch).__qualname__} but batch_dims has a {type(dims).__qualname__} there; give "
                f"batch_dims the structure of the batch"
            )
        if parts.keys() != own.keys():
            names, others = ([*held] if isinstance(batch, dict) else f"{len(held)} parts" for held in (parts, own))
            raise BatchError(f"{path} has {names} but batch_dims has {others}; give one entry per part")
    if parts is not None:
        for name, child in parts.items():
            check_batch(dims if isinstance(dims, int) else dims[name], child, count, f"{path}[{name!r}]")
    elif not isinstance(batch, Tensor):
        cure = "; pass dict(...) of it" if isinstance(batch, Mapping) else ""
        raise BatchError(f"{path} is a {type(batch).__qualname__}; the leaves of a batch must be tensors{cure}")
    elif batch.dim() == 0 or batch.shape[0] != count:
        raise BatchError(
            f"{path} is {list(batch.shape)} but the array has {count} models; give every model its own part "
            f"[{count}, N, ...], or make the step with batch_dims=None to share one batch"
        )


def _kind(tree: Tree) -> type:
    return dict if type(tree) in _DICTS else type(tree)


def _parts(tree: Tree) -> dict[Any, Tree] | None:
    """The parts of a dict, a tuple, a NamedTuple or a list by name or position; None for a leaf."""
    if type(tree) in _DICTS:
        return tree
    return dict(enumerate(tree)) if type(tree) in (tuple, list) or hasattr(tree, "_fields") else None


def own_copy(batch: Tree) -> Tree:
    """A copy for a model to write, as ReLU(inplace=True) does in a first layer; the batch is the caller's."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def take_batch(dims: Tree, batch: Tree, index: slice | Tensor) -> Tree:
    """The parts of a batch that belong to the members at ``index``, along axis 0 where ``dims`` is 0; the rest is shared."""
    if dims is None:
        return batch
    if isinstance(batch, dict):
        return {
            name: take_batch(dims[name] if isinstance(dims, dict) else dims, child, index)
            for name, child in batch.items()
        }
    if isinstance(batch, (tuple, list)):
        inner = dims if isinstance(dims, (tuple, list)) else [dims] * len(batch)
        parts = [take_batch(dim, child, index) for dim, child in zip(inner, batch, strict=True)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[index]
