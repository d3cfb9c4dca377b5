"""Trees of stacked tensors: count, select, join and mask members.

Public: :func:`num_models`, :func:`take`, :func:`concat`. Axis 0 of every leaf is the model axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from hfta_func._errors import StackError
from hfta_func._torch import pytree
from hfta_func._types import Tree

T = TypeVar("T")


def tree_map(func: Callable[..., Any], tree: Tree, *rest: Tree) -> Any:
    """``func`` of every leaf, or of the corresponding leaves of several trees."""
    # Older compilers cannot look into optree's compiled code.
    if torch.compiler.is_compiling():
        return pytree.tree_map(func, tree, *rest)
    return optree.tree_map(func, tree, *rest)


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return optree.tree_leaves(tree)


def paths(tree: Tree, name: str) -> list[str]:
    """How the leaves of a tree called ``name`` are reached in Python, in the same order."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree)]


def num_models(tree: Tree) -> int:
    """Number of members M of a stacked tree.

    Raises:
        StackError: if the tree has no leaves or its leaves disagree about M.

    Example:
        >>> num_models({"weight": torch.zeros(4, 10, 2), "bias": torch.zeros(4, 10)})
        4
    """
    found = zip(paths(tree, "tree"), leaves(tree), strict=True)
    sizes = {path: (leaf.shape[0] if leaf.dim() else None) for path, leaf in found}
    if not sizes:
        raise StackError("tree has no tensors, so it has no members; pass the result of stack_params or a state")
    (first, size), *rest = sizes.items()
    for path, other in rest:
        if other != size:
            raise StackError(
                f"{path} has {other} members but {first} has {size}; axis 0 of every leaf must be the model axis"
            )
    if size is None:
        raise StackError(f"{first} has no axes; axis 0 of every leaf must be the model axis")
    return size


def take(tree: T, index: int | slice | Sequence[int] | Tensor) -> T:
    """Select members, in the order given, from any stacked tree or state.

    Args:
        tree: A tree whose leaves are ``[M, ...]``.
        index: One member, a slice, a list of members, or a boolean mask ``[M]``. One member stays an array of one.

    Returns:
        The same tree with leaves ``[len(index), ...]`` in storage of their own.

    Raises:
        StackError: if no member is selected or an index is out of range.

    Example:
        >>> take({"bias": torch.tensor([[0.0], [1.0], [2.0]])}, [2, 0])
        {'bias': tensor([[2.], [0.]])}
    """
    count = num_models(tree)
    chosen = _indices(index, count)
    return tree_map(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)), tree)


def _indices(index: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    if isinstance(index, slice):
        chosen = torch.arange(count)[index]
    else:
        chosen = torch.atleast_1d(torch.as_tensor(index))
    if chosen.dtype == torch.bool:
        if chosen.shape != (count,):
            raise StackError(f"mask has shape {list(chosen.shape)} but the array has {count} members; pass [{count}]")
        chosen = chosen.nonzero().flatten()
    if chosen.dim() > 1 or (chosen.numel() and chosen.dtype.is_floating_point):
        raise StackError(
            f"index is {chosen.dtype}{list(chosen.shape)}; pass one integer, a list of them, a slice or a mask"
        )
    if chosen.numel() == 0:
        raise StackError("no member selected; an array keeps at least one member")
    chosen = chosen.to(torch.int64)
    outside = chosen[(chosen < -count) | (chosen >= count)]
    if outside.numel():
        raise StackError(f"member {int(outside[0])} does not exist; the array has members 0 to {count - 1}")
    return chosen.remainder(count)


def concat(trees: Sequence[T]) -> T:
    """Join arrays of the same model into one, in the order given.

    Args:
        trees: Stacked trees or states of one structure.

    Raises:
        StackError: if the list is empty or two trees differ in structure, shape or dtype.

    Example:
        >>> concat([{"bias": torch.zeros(1, 2)}, {"bias": torch.ones(1, 2)}])
        {'bias': tensor([[0., 0.], [1., 1.]])}
    """
    if not trees:
        raise StackError("nothing to join; pass at least one array")
    for position, tree in enumerate(trees):
        num_models(tree)
        found = difference(tree, trees[0], "tree", f"array {position}", "array 0")
        if found is not None:
            raise StackError(f"{found}; join arrays of one model and optimizer")
    joined = []
    for path, *column in zip(paths(trees[0], "tree"), *map(leaves, trees), strict=True):
        for position, leaf in enumerate(column):
            if leaf.shape[1:] != column[0].shape[1:] or leaf.dtype != column[0].dtype:
                raise StackError(
                    f"array {position}: {path} is {leaf.dtype}{list(leaf.shape[1:])} per member but array 0 has "
                    f"{column[0].dtype}{list(column[0].shape[1:])}; join arrays of one model and dtype"
                )
        joined.append(torch.cat(column))
    return optree.tree_unflatten(optree.tree_structure(trees[0]), joined)  # pyright: ignore


def per_model(value: Tensor, leaf: Tensor) -> Tensor:
    """Shape a vector ``[M]`` so that it broadcasts over a leaf ``[M, ...]``, in the leaf's dtype."""
    return value.to(leaf.dtype).reshape(-1, *(1,) * (leaf.dim() - 1))


def where(mask: Tensor, new: T, old: T) -> T:
    """Take ``new`` for members where ``mask`` (``[M]``, bool) holds and ``old`` elsewhere, leaf by leaf."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.reshape(-1, *(1,) * (a.dim() - 1)), a, b)

    return tree_map(choose, new, old)


def write(old: Tree, new: Tree, keep: Tensor | None = None) -> None:
    """Copy every leaf of ``new`` into that of ``old``, for members where ``keep`` holds; None copies all."""

    def copy(a: Tensor, b: Tensor) -> None:
        if a is not b:
            a.copy_(b if keep is None else torch.where(keep.reshape(-1, *(1,) * (a.dim() - 1)), b, a))

    tree_map(copy, old, new)


def difference(tree: Tree, other: Tree, name: str, owner: str, other_owner: str) -> str | None:
    """Where the structures of two trees first differ, in one sentence; None if they do not.

    Args:
        tree: One tree.
        other: Another one.
        name: How both are reached in Python.
        owner: Who has the first one.
        other_owner: Who has the other one.
    """
    mine, theirs = optree.tree_structure(tree), optree.tree_structure(other)
    if mine == theirs:
        return None
    if mine.type is not theirs.type:
        kinds = ["tensor" if spec.type is None else spec.type.__qualname__ for spec in (mine, theirs)]
        return f"{name} is a {kinds[0]} in {owner} but a {kinds[1]} in {other_owner}"
    children, _, keys, _ = optree.tree_flatten_one_level(tree)
    other_children, _, other_keys, _ = optree.tree_flatten_one_level(other)
    if keys != other_keys:
        extra, missing = (
            ", ".join(repr(key) for key in a if key not in b) or "none"
            for a, b in ((keys, other_keys), (other_keys, keys))
        )
        return f"{name} has {extra} in {owner} where {other_owner} has {missing}"
    fields = getattr(mine.type, "_fields", None)
    for position, (key, a, b) in enumerate(zip(keys, children, other_children, strict=True)):
        path = f"{name}.{fields[position]}" if fields else f"{name}[{key!r}]"
        if (found := difference(a, b, path, owner, other_owner)) is not None:
            return found
    return None
