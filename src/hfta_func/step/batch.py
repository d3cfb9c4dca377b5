"""Batches: trees whose leaves have a model axis in front, or are shared by all members."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hfta_func._torch import pytree
from hfta_func._tree import tree_map
from hfta_func._types import Tree
from hfta_func.errors import BatchError


def plain(batch: Tree) -> Tree:
    """The batch as a tree: mappings of all kinds, such as tokenizers return, and dataclasses become dicts."""
    if isinstance(batch, Mapping):
        return {name: plain(child) for name, child in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [plain(child) for child in batch]
        # Classes of users are leaves to those who take trees apart, and that of a PackedSequence computes parts from others.
        if hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
            return type(batch)(*parts)
        return parts if isinstance(batch, list) else tuple(parts)
    if _is_record(batch):
        return {field.name: plain(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    return batch


def restored(tree: Tree, batch: Tree) -> Any:
    """What :func:`plain` has made of a batch, in the containers of that batch."""
    if isinstance(batch, Mapping):
        parts = {name: restored(tree[name], child) for name, child in batch.items()}
        if type(batch) is dict:
            return parts
        filled: Any = copy.copy(batch)
        filled.update(parts)
        return filled
    if isinstance(batch, (tuple, list)):
        return _with_parts(batch, [restored(part, child) for part, child in zip(tree, batch, strict=True)])
    if _is_record(batch):
        filled = copy.copy(batch)
        for name, part in tree.items():
            # Frozen dataclasses refuse setattr.
            object.__setattr__(filled, name, restored(part, getattr(batch, name)))
        return filled
    return tree


_TENSOR = object()
"""Stands for a tensor in what a model returns."""


def apart(output: Any) -> tuple[Any, tuple[Any, ...]]:
    """The tensors in what a model returns, as ``vmap`` takes them, and what :func:`together` needs where there is more."""
    if all([isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)]):
        return output, ()
    parts, spec = pytree.tree_flatten(plain(output))
    others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in parts]
    return [leaf for leaf in parts if isinstance(leaf, Tensor)], (output, spec, others)


def together(tensors: Any, rest: Any) -> Any:
    """The inverse of :func:`apart`."""
    if not rest:
        return tensors
    (output, spec, others), each = rest, iter(tensors)
    return restored(pytree.tree_unflatten([next(each) if leaf is _TENSOR else leaf for leaf in others], spec), output)


def is_plain(batch: Tree) -> bool:
    """Whether :func:`plain` would change nothing."""
    if isinstance(batch, Mapping):
        return type(batch) is dict and all([is_plain(child) for child in batch.values()])
    if isinstance(batch, (tuple, list)):
        known = type(batch) in (tuple, list) or hasattr(batch, "_fields")
        return known and not isinstance(batch, PackedSequence) and all([is_plain(child) for child in batch])
    return not _is_record(batch)


def is_table(data: Any) -> bool:
    """Whether data is the columns of a table, such as ``(inputs, targets)``, and no sequence of batches or items."""
    if isinstance(data, Mapping) or not isinstance(data, tuple):
        return isinstance(data, Mapping)
    shapes = [leaf.shape for leaf in data if isinstance(leaf, Tensor) and leaf.dim()]
    return len(shapes) == len(data) and len({rows for rows, *_ in shapes}) == 1 < len({*shapes})


def numbered(tree: Tree) -> tuple[Tree, list[Any]]:
    """The tree with a number for every leaf, and the leaves by number."""
    listed: list[Any] = []

    def number(leaf: Any) -> int:
        listed.append(leaf)
        return len(listed) - 1

    return tree_map(number, tree), listed


def copied(tree: Tree) -> Tree:
    """The tree in tensors of its own: a model may write its input, as ReLU(inplace=True) does in a first layer."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def check_batch(dims: Tree, tree: Tree, count: int, path: str = "batch") -> None:
    """Raise a BatchError unless ``dims`` fits what :func:`plain` makes of a batch, and leaves have M parts where it is 0."""
    if dims is None or tree is None:
        return
    parts = _parts(tree)
    if not isinstance(dims, int):
        dim_parts = _parts(dims)
        if parts is None or dim_parts is None or isinstance(dims, Mapping) is not isinstance(tree, Mapping):
            raise BatchError(
                f"{path} is a {type(tree).__qualname__} but batch_dims has a {type(dims).__qualname__} there; give "
                f"batch_dims the structure of the batch"
            )
        if parts.keys() != dim_parts.keys():
            names, others = ([*each] if isinstance(tree, dict) else f"{len(each)} parts" for each in (parts, dim_parts))
            raise BatchError(f"{path} has {names} but batch_dims has {others}; give one entry per part")
    if parts is not None:
        for name, child in parts.items():
            check_batch(dims if isinstance(dims, int) else dims[name], child, count, f"{path}[{name!r}]")
    elif not isinstance(tree, Tensor):
        raise BatchError(f"{path} is a {type(tree).__qualname__}; the leaves of a batch must be tensors")
    elif tree.is_nested or tree.layout not in (torch.strided, torch.sparse_coo):
        cure = "make it dense, or share it, batch_dims=None, in a step with chunk_size=1"
        raise BatchError(f"{path} is nested or compressed, and has no parts for members; {cure}")
    elif tree.dim() == 0 or tree.shape[0] != count:
        raise BatchError(
            f"{path} is {list(tree.shape)} but the array has {count} models; give every model its own part "
            f"[{count}, N, ...], or share one batch by batch_dims=None, in an Experiment by options={{'batch_dims': None}}"
        )


def take_batch(dims: Tree, batch: Tree, index: slice | Tensor) -> Tree:
    """The parts of a batch that belong to the members at ``index``, along axis 0 where ``dims`` is 0; the rest is shared."""

    def take(dim: int | None, leaf: Any) -> Any:
        if dim is not None and leaf.layout == torch.sparse_coo:
            return leaf.index_select(0, torch.arange(leaf.shape[0], device=leaf.device)[index])
        return leaf if dim is None else leaf[index]

    return restored(over(take, dims, plain(batch)), batch)


def of_member(dims: Tree, batch: Tree, member: int, cast: Callable[[Tree], Tree]) -> Any:
    """What one model alone is given of a batch, in the containers of the batch."""
    return restored(cast(over(lambda dim, leaf: leaf if dim is None else leaf[member], dims, plain(batch))), batch)


def rows_of(dims: Tree, batch: Tree, part: int, count: int) -> Tree:
    """One of ``count`` equal parts of the rows of a batch, which are along axis 1 where ``dims`` is 0, else axis 0."""

    def rows(dim: int | None, leaf: Any) -> Any:
        axis, is_tensor = int(dim is not None), isinstance(leaf, Tensor)
        if is_tensor and (leaf.dim() <= axis or leaf.shape[axis] % count):
            size = [*leaf.shape]
            raise BatchError(
                f"axis {axis} of {size} has no {count} equal parts; batches need multiples of {count} rows"
            )
        return leaf.chunk(count, axis)[part] if is_tensor else leaf

    return batch if count == 1 else restored(over(rows, dims, plain(batch)), batch)


def leaf_dims(dims: Tree, tree: Tree) -> Tree:
    """One entry of ``dims`` for each leaf of a batch that :func:`plain` has made, None where there is no tensor."""
    return over(lambda dim, leaf: dim, dims, tree)


def over(func: Callable[[Any, Any], Any], dims: Tree, tree: Tree) -> Tree:
    """``func(dim, leaf)`` for each leaf of a batch that :func:`plain` has made, with its entry of ``dims``."""
    if isinstance(tree, dict):
        return {name: over(func, dims[name] if isinstance(dims, Mapping) else dims, tree[name]) for name in tree}
    if isinstance(tree, (tuple, list)):
        inner = dims if isinstance(dims, (tuple, list)) else [dims] * len(tree)
        return _with_parts(tree, [over(func, dim, part) for dim, part in zip(inner, tree, strict=True)])
    return func(dims if isinstance(tree, Tensor) else None, tree)


def _parts(tree: Tree) -> Mapping[Any, Tree] | None:
    """The parts of a dict, a tuple, a NamedTuple or a list by name or position; None for a leaf."""
    if isinstance(tree, Mapping):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, (tuple, list)) else None


def _with_parts(sequence: Any, parts: list[Any]) -> Any:
    return type(sequence)(*parts) if hasattr(sequence, "_fields") else type(sequence)(parts)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
