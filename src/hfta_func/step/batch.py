"""Batches: trees whose leaves have a model axis in front, or are shared by all members."""

from __future__ import annotations

import collections
import copy
import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hfta_func._torch import pytree
from hfta_func._tree import tree_map
from hfta_func._types import Tree
from hfta_func.errors import BatchError, LossError
from hfta_func.verify.held import as_tensor


def plain(batch: Tree) -> Tree:
    """The batch as a tree: mappings of all kinds, such as tokenizers return, and dataclasses become dicts."""
    if (parts := _parts(batch)) is None:
        return batch
    made = {name: plain(child) for name, child in parts.items()}
    if not isinstance(batch, (tuple, list)):
        return made
    # Classes of users are leaves to those who take trees apart, and that of a PackedSequence computes parts from others.
    if hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
        return _filled(batch, made)
    return [*made.values()] if isinstance(batch, list) else tuple(made.values())


def restored(tree: Tree, batch: Tree) -> Any:
    """What :func:`plain` has made of a batch, in the containers of that batch."""
    parts = _parts(batch)
    return tree if parts is None else _filled(batch, {name: restored(tree[name], x) for name, x in parts.items()})


def as_metrics(named: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of one model as tensors, also those that are numbers, as of ``len(batch)`` or scikit-learn."""
    for name, value in named.items():
        if not isinstance(value, (Tensor, numbers.Number)):
            kind = type(value).__qualname__
            raise LossError(f"metric '{name}' of one model is a {kind}; return each metric as one tensor or number")
    return {name: as_tensor(value) for name, value in named.items()}


def apart(output: Any) -> tuple[Any, tuple[Any, ...]]:
    """The tensors in what a model returns, as ``vmap`` takes them, and what :func:`together` needs where there is more."""
    if all([isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)]):
        return output, ()
    parts, spec = pytree.tree_flatten(plain(output))
    return [leaf for leaf in parts if isinstance(leaf, Tensor)], (output, spec, parts)


def together(tensors: Any, rest: Any) -> Any:
    """The inverse of :func:`apart`."""
    if not rest:
        return tensors
    (output, spec, parts), each = rest, iter(tensors)
    filled = [next(each) if isinstance(leaf, Tensor) else leaf for leaf in parts]
    return restored(pytree.tree_unflatten(filled, spec), output)


def is_plain(batch: Tree) -> bool:
    """Whether :func:`plain` would change nothing."""
    parts = _parts(batch)
    known = type(batch) in (dict, tuple, list) or (hasattr(batch, "_fields") and not isinstance(batch, PackedSequence))
    return parts is None or (known and all(map(is_plain, parts.values())))


def is_table(data: Any) -> bool:
    """Whether data is the columns of a table, such as ``(inputs, targets)``, and no sequence of batches or items."""
    if isinstance(data, Mapping) or not isinstance(data, tuple):
        return isinstance(data, Mapping)
    shapes = [leaf.shape for leaf in data if isinstance(leaf, Tensor) and leaf.dim()]
    return len(shapes) == len(data) and len({rows for rows, *_ in shapes}) == 1 < len({*shapes})


def copied(tree: Tree, shared: bool = False) -> Tree:
    """The tree in tensors of its own: a model may write its input, as ReLU(inplace=True) does in a first layer.

    Around a call that makes tensors for each member, what members share of the tree stays ``shared`` or is not.
    """

    def copy(leaf: Tensor) -> Tensor:
        return leaf.to(leaf.dtype, copy=True) if shared else leaf.clone()

    return tree_map(lambda leaf: copy(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def check_batch(dims: Tree, tree: Tree, count: int, path: str = "batch") -> None:
    """Raise a BatchError unless ``dims`` fits what :func:`plain` makes of a batch, and leaves have M parts where it is 0."""
    if dims is None or tree is None:
        return
    parts = _parts(tree)
    if not isinstance(dims, int) and (parts is None or parts.keys() != (_parts(dims) or {}).keys()):
        raise BatchError(f"{path} is {_text(tree)} but batch_dims has {_text(dims)} there; give one entry per part")
    if parts is not None:
        for name, child in parts.items():
            check_batch(dims if isinstance(dims, int) else dims[name], child, count, f"{path}[{name!r}]")
    elif not isinstance(tree, Tensor):
        raise BatchError(f"{path} is a {type(tree).__qualname__}; the leaves of a batch must be tensors")
    elif tree.is_nested or tree.dim() == 0 or tree.shape[0] != count:
        why = f"{path} is {'nested' if tree.is_nested else list(tree.shape)} but the array has {count} models"
        cure = f"give every model its own part [{count}, N, ...], or share one batch by batch_dims=None"
        raise BatchError(f"{why}; {cure}, in an Experiment by options={{'batch_dims': None}}")


def _text(tree: Tree) -> str:
    parts = _parts(tree)
    return f"a {type(tree).__qualname__}" + ("" if parts is None else f" of {[*parts]}")


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
        axis = int(dim is not None)
        return leaf.unflatten(axis, (count, -1)).select(axis, part) if isinstance(leaf, Tensor) else leaf

    return batch if count == 1 else restored(over(rows, dims, plain(batch)), batch)


def over(func: Callable[[Any, Any], Any], dims: Tree, tree: Tree) -> Tree:
    """``func(dim, leaf)`` for each leaf of a batch that :func:`plain` has made, with its entry of ``dims``."""
    if (parts := _parts(tree)) is None:
        return func(dims if isinstance(tree, Tensor) else None, tree)
    each: Any = dims if isinstance(dims, (Mapping, tuple, list)) else None
    return _filled(tree, {name: over(func, dims if each is None else each[name], x) for name, x in parts.items()})


def _parts(tree: Any) -> Mapping[Any, Any] | None:
    """The parts of a container by name or position; None for a leaf."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, (tuple, list)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _filled(tree: Any, parts: dict[Any, Any]) -> Any:
    """A container like another one, of other parts."""
    if type(tree) is dict:
        return parts
    if isinstance(tree, (tuple, list)):
        return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())  # pyright: ignore
    # A compiler knows this one by no other name.
    filled: Any = tree.copy() if isinstance(tree, collections.defaultdict) else copy.copy(tree)
    if isinstance(tree, Mapping):
        filled.update(parts)
        return filled
    for name, part in parts.items():
        # Frozen dataclasses refuse setattr.
        object.__setattr__(filled, name, part)
    return filled
