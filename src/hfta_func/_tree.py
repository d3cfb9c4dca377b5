"""Count, select, join and mask the members of stacked trees; axis 0 of every leaf is the model axis."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from hfta_func._torch import pytree
from hfta_func._types import Shared, Tree
from hfta_func.errors import StackError

T = TypeVar("T")


def tree_map(func: Callable[..., Any], tree: Tree, *rest: Tree) -> Any:
    """Apply ``func`` to every leaf, or to the corresponding leaves of several trees."""
    # The compiler cannot trace optree's C++, to which None is no leaf.
    if torch.compiler.is_compiling():
        return pytree.tree_map(lambda leaf, *others: None if leaf is None else func(leaf, *others), tree, *rest)
    return optree.tree_map(func, tree, *rest)


def is_shared(node: Any) -> bool:
    """Whether a node of a tree holds shared leaves, which have no model axis."""
    return isinstance(node, Shared)


def without_shared(tree: Tree) -> Any:
    """The tree without shared leaves."""
    return optree.tree_map(lambda leaf: () if is_shared(leaf) else leaf, tree, is_leaf=is_shared)


def shared_paths(tree: Tree, name: str) -> set[str]:
    """The :func:`paths` of shared leaves."""
    return set(paths(tree, name)) - set(paths(without_shared(tree), name))


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if torch.compiler.is_compiling():
        return [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    return optree.tree_leaves(tree)


def paths(tree: Tree, name: str) -> list[str]:
    """The Python expression for each leaf of a tree called ``name``, in the order of :func:`leaves`."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree)]


def names(trees: dict[str, Tree]) -> list[str]:
    """The :func:`paths` of the leaves of trees by name."""
    return [accessor[1:].codify(accessor[0].entry) for accessor in optree.tree_accessors(cast(Any, trees))]


def num_models(tree: Tree) -> int:
    """Number of members M of a stacked tree.

    Raises:
        StackError: if the tree has no leaves or two leaves have different M.

    Example:
        >>> num_models({"weight": torch.zeros(4, 10, 2), "bias": torch.zeros(4, 10)})
        4
    """
    tree = without_shared(tree)
    fronts = {leaf.shape[:1] if isinstance(leaf, Tensor) else None for leaf in leaves(tree)}
    if len(fronts) == 1 and (front := fronts.pop()):
        return front[0]
    if not (named := dict(zip(paths(tree, "tree"), leaves(tree), strict=True))):
        raise StackError("tree has no tensors, so it has no members; pass the result of stack_params or a state")
    sizes: dict[str, str] = {}
    for path, leaf in named.items():
        if not isinstance(leaf, Tensor):
            raise StackError(f"{path} is a {type(leaf).__qualname__}; every leaf must be a tensor [M, ...]")
        sizes.setdefault(f"{leaf.shape[0]} members" if leaf.dim() else "no axes", path)
    listed = " but ".join(f"{path} has {size}" for size, path in reversed(sizes.items()))
    raise StackError(f"{listed}; axis 0 of every leaf must be the model axis")


def take(tree: T, index: int | slice | Sequence[int] | Tensor) -> T:
    """Select members, in the order given, from any stacked tree or state.

    Args:
        tree: A tree whose leaves are ``[M, ...]``.
        index: One member (the result is an array of one), a slice, a list of members, or a boolean mask ``[M]``.

    Returns:
        A tree of the same structure with new leaves ``[len(index), ...]``; shared leaves are copied.

    Raises:
        StackError: if no member is selected or an index is out of range.

    Example:
        >>> take({"bias": torch.tensor([[0.0], [1.0], [2.0]])}, [2, 0])
        {'bias': tensor([[2.], [0.]])}
    """
    count = num_models(tree)
    chosen = indices(index, count)

    def taken(leaf: Any) -> Any:
        if is_shared(leaf):
            return tree_map(torch.clone, leaf)
        selected = leaf.index_select(0, chosen.to(leaf.device))
        if (places := _places_of(leaf)) is not None:
            _note(selected, [places[index] for index in chosen.tolist()])
        return selected

    return optree.tree_map(taken, tree, is_leaf=is_shared)  # pyright: ignore


def put(tree: T, index: Tensor, part: T) -> T:
    """The inverse of :func:`take`: the tree with the members of ``part`` at ``index``, and the shared leaves of ``part``."""

    def replaced(old: Any, new: Any) -> Any:
        return new if is_shared(old) else old.index_copy(0, index, new)

    return optree.tree_map(replaced, tree, part, is_leaf=is_shared)  # pyright: ignore


def indices(index: int | slice | Sequence[int] | Tensor, count: int) -> Tensor:
    """The indices, from 0 to ``count - 1``, of the members that :func:`take` selects."""
    given = index if isinstance(index, slice) else torch.as_tensor(index).cpu()
    try:
        chosen = torch.atleast_1d(torch.arange(count, device="cpu")[given])
    except IndexError as error:
        raise StackError(f"index {index} selects no members of an array of {count}: {error}") from None
    if chosen.dim() > 1 or not len(chosen):
        raise StackError(f"index {index} selects no list of at least one member; pass integers, a slice or a mask")
    return chosen


def concat(trees: Sequence[T]) -> T:
    """Join arrays of the same model into one, in the order given.

    Args:
        trees: Stacked trees or states of the same structure.

    Raises:
        StackError: if the list is empty or two trees differ in structure, shape or dtype, or in shared leaves; it names
            the leaf.

    Example:
        >>> concat([{"bias": torch.zeros(1, 2)}, {"bias": torch.ones(1, 2)}])
        {'bias': tensor([[0., 0.], [1., 1.]])}
    """
    if not trees:
        raise StackError("nothing to join; pass at least one array")
    for position, tree in enumerate(trees):
        num_models(tree)
        mismatch = difference(tree, trees[0], "tree", f"array {position}", "array 0")
        if mismatch is not None:
            raise StackError(f"{mismatch}; join arrays of the same model, optimizer and step options")
    joined, shared = [], shared_paths(trees[0], "tree")
    for path, *column in zip(paths(trees[0], "tree"), *map(leaves, trees), strict=True):
        first = column[0]
        for position, leaf in enumerate(column):
            if path in shared and not torch.equal(leaf, first):
                cure = "arrays that share parameters can be joined as long as they have not been trained apart"
                raise StackError(f"array {position}: {path}, which members share, is not that of array 0; {cure}")
            if leaf.shape[1:] != first.shape[1:] or leaf.dtype != first.dtype:
                one, other = (f"{each.dtype}{list(each.shape[1:])}" for each in (leaf, first))
                text = f"array {position}: {path} is {one} per member but array 0 has {other}"
                raise StackError(f"{text}; join arrays of the same model and dtype")
        joined.append(first.clone() if path in shared else torch.cat(column))
        if _followed.get() is not None and path not in shared:
            _note(joined[-1], [at for leaf in column for at in _places_of(leaf) or [-1] * len(leaf)])
    return optree.tree_unflatten(optree.tree_structure(trees[0]), joined)  # pyright: ignore


_Known = dict[int, tuple[Tensor, list[int]]]
_followed: contextvars.ContextVar[_Known | None] = contextvars.ContextVar("followed", default=None)
"""By id, tensors of members that are followed, with their places; kept, so that no other tensor gets the id of one."""


@contextlib.contextmanager
def followed(leaf: Tensor) -> Iterator[Callable[[Tensor], list[int] | None]]:
    """A block that follows members by a tensor ``[M]`` of theirs, through :func:`take` and :func:`concat`.

    It yields a function that tells the place that each member of another tensor had, -1 for new ones; None if it was made in
    another way. Members may have equal seeds and be equal in all values, so that what they hold does not tell which they are.
    """
    token = _followed.set({id(leaf): (leaf, [*range(len(leaf))])})
    try:
        yield _places_of
    finally:
        _followed.reset(token)


def _places_of(leaf: Tensor) -> list[int] | None:
    return (_followed.get() or {}).get(id(leaf), (None, None))[1]


def _note(leaf: Tensor, places: list[int]) -> None:
    if (known := _followed.get()) is not None and max(places) >= 0:
        known[id(leaf)] = leaf, places


def per_model(value: Tensor, leaf: Tensor) -> Tensor:
    """Reshape a vector ``[M]`` to broadcast over a leaf ``[M, ...]``, in the leaf's dtype."""
    return _broadcastable(value.to(leaf.dtype), leaf)


def _broadcastable(vector: Tensor, leaf: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (leaf.dim() - 1))


def where(mask: Tensor, new: T, old: T) -> T:
    """Take ``new`` for members where ``mask`` (``[M]``, bool) holds and ``old`` elsewhere, leaf by leaf."""
    return tree_map(lambda a, b: torch.where(_broadcastable(mask, a), a, b), new, old)


def write(old: Tree, new: Tree, keep: Tensor | None = None) -> None:
    """Copy every leaf of ``new`` into ``old`` for members where ``keep`` holds; None copies all members."""
    tree_map(lambda a, b: write_leaf(a, b, keep), old, new)


def write_leaf(old: Tensor, new: Tensor, keep: Tensor | None = None) -> None:
    """:func:`write` for a single leaf."""
    if old is not new:
        old.copy_(new if keep is None else torch.where(_broadcastable(keep, old), new, old))


def difference(tree: Tree, other: Tree, name: str, owner: str, other_owner: str) -> str | None:
    """Describe the first difference between the structures of two trees called ``name``; None if they are the same."""
    if optree.tree_structure(tree) == optree.tree_structure(other):
        return None
    one, two = (paths(tree, name), owner), (paths(other, name), other_owner)
    for (present, holder), (others, missing) in ((one, two), (two, one)):
        for path in present:
            # A leaf that the other tree divides further is reported by one of its parts, in the other pass.
            if path not in others and not any(part.startswith((f"{path}[", f"{path}.")) for part in others):
                return f"{holder} has {path} but {missing} does not"
    return f"the containers of {name} have other types in {owner} than in {other_owner}"
