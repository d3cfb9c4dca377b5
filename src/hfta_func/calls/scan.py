"""A loop over the first axis of tensors, which a compiler takes into its graph as one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func import random
from hfta_func._torch import constant_to_compiler, function_modes, inside_transform, operator_scan
from hfta_func._tree import difference, leaves, paths, tree_map
from hfta_func._types import Tree
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed
from hfta_func.errors import TraceError


def scan(
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Tree = None,
    *,
    length: int | None = None,
    key: Tensor | None = None,
) -> tuple[Any, Any]:
    """Carry values through the iterations of a loop and stack what each of them returns.

    Uncompiled it is a loop in Python. In a graph it is one loop, which takes as long to compile as one iteration, unless a
    model calls it or it is inside a transform such as ``vmap``: there it is unrolled. PyTorch compiles it for one length,
    with ``dynamic=False``. It can be differentiated. Where random calls draw from a key around it, every iteration draws
    other numbers.

    Args:
        body: ``body(carry, x) -> (carry, y)``, or ``body(carry, x, key)`` if there is a key. The new carry has the structure,
            shapes and dtypes of the old one, ``y`` those of the first ``y``: tensors and None in a tree, or None. It writes
            none of its arguments in place.
        carry: The carry before the first iteration, a tree of tensors.
        xs: A tree of tensors ``[length, ...]``, of which every iteration is given its part.
        length: Number of iterations; needed only without ``xs``, for which ``x`` is None.
        key: Keys ``[...]``; every iteration is given them folded with its number.

    Returns:
        The carry after the last iteration, and a tree of all ``y``, ``[length, ...]``.

    Raises:
        ValueError: if lengths differ or are zero.
        TraceError: if the carry or ``y`` changes its structure, a shape or a dtype; it names the leaf.

    Example:
        >>> def body(total, x):
        ...     return total + x, total
        >>> scan(body, torch.tensor(0), torch.tensor([1, 2, 3]))
        (tensor(6), tensor([0, 1, 3]))
    """
    count = _length(xs, length)

    def iteration(carry: Any, x: Any, index: Any) -> tuple[Any, Any]:
        keys = () if key is None else (random.fold_in(key, index),)
        carry, y = body(carry, x, *keys)
        return carry, y

    return looped(iteration, carry, xs, count)


def looped(iteration: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, xs: Tree, count: int) -> tuple[Any, Any]:
    """The loop of :func:`scan` with ``iteration(carry, x, index)``, which uncompiled may write the carry that it returns."""
    modes = [mode for mode in function_modes() if isinstance(mode, (routed, lowered))]
    if torch.compiler.is_dynamo_compiling() and not modes and not inside_transform():
        return _in_graph(iteration, carry, xs, count)
    around = next((mode for mode in reversed(modes) if isinstance(mode, routed)), None)
    call, ys = (lambda index, func, *args: func(*args)) if around is None else around.next_loop(), []
    check = alike(carry)
    check(carry)
    for index in range(count):
        x = None if xs is None else tree_map(lambda leaf, index=index: leaf[index], xs)
        carry, y = call(index, iteration, carry, x, index)
        check(carry)
        ys.append(y)
    check = alike(ys[0], "y")
    for y in ys:
        check(y)
    return carry, tree_map(lambda *parts: torch.stack(parts), *ys)


def _in_graph(iteration: Callable[..., tuple[Any, Any]], carry: Any, xs: Tree, count: int) -> tuple[Any, Any]:
    check = alike(carry)
    check(carry)
    start, given = leaves(carry), leaves(xs)
    # PyTorch's loop lets modes be entered inside of it if one has been entered before it.
    with routed(None):
        numbers = torch.arange(count, device=[*start, *given][0].device if start or given else None)

    def step(flat: Any, parts: Any) -> tuple[Any, Any]:
        index, x = _filled((numbers, xs), parts)
        after, y = iteration(_filled(carry, flat), x, index)
        check(after)
        alike(y, "y")(y)
        _note([tree_map(lambda leaf: leaf.dtype, y)])
        # The keys of its dicts may be in another order.
        after = tree_map(lambda _, leaf: leaf, carry, after)
        return _settled(after) or [flat[0].clone()], _settled(y)

    # It takes nothing but lists of tensors, at least one to carry.
    carried = _settled(carry) or [numbers.new_zeros((), dtype=torch.float32)]
    flat, ys = operator_scan(step, carried, [_as_float(leaf) for leaf in (numbers, *given)])
    return _filled(carry, flat), _filled(getattr(_Layouts, _latest()), ys)


def _settled(tree: Tree) -> list[Tensor]:
    """The tensors of a tree as copies that lie in order: a loop's strides must agree, also those of axes of size one."""
    return [_as_float(leaf.clone(memory_format=torch.contiguous_format)) for leaf in leaves(tree)]


def _as_float(leaf: Tensor) -> Tensor:
    """Integers and booleans as numbers of 64 bits, where PyTorch might differentiate a loop: it cannot if it has others."""
    if leaf.is_floating_point() or leaf.is_complex() or not torch.is_grad_enabled():
        return leaf
    return leaf.view(torch.float64) if leaf.dtype == torch.int64 else leaf.to(torch.float64)


def _as_before(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf.view(dtype) if dtype == torch.int64 and leaf.dtype != dtype else leaf.to(dtype)


def _filled(tree: Tree, tensors: Any) -> Any:
    """The tree with other tensors of the dtypes of its leaves, or of those that its leaves are."""
    given = iter(tensors)
    return tree_map(lambda leaf: _as_before(next(given), getattr(leaf, "dtype", leaf)), tree)


class _Layouts:
    """What loops in graphs return in each iteration, without the tensors: nothing else leaves a loop.

    They are attributes, because of a dict the compiler does not see what is added while it traces.
    """

    count = 0


@constant_to_compiler
def _note(layouts: list[Tree]) -> bool:
    # In a list, as for all such functions: a NamedTuple by itself reaches them without its fields.
    _Layouts.count += 1
    setattr(_Layouts, f"of_{_Layouts.count}", layouts[0])
    return True


@constant_to_compiler
def _latest() -> str:
    return f"of_{_Layouts.count}"


def _length(xs: Tree, length: int | None) -> int:
    sizes = [leaf.shape[0] for leaf in leaves(xs)] + ([] if length is None else [length])
    if not sizes or min(sizes) < 1 or any([size != sizes[0] for size in sizes]):
        raise ValueError(f"the loop has the lengths {sizes}; give tensors [length, ...] in xs, or length=, at least 1")
    return sizes[0]


_ITERATIONS = "the first iteration", "a later one"


def alike(
    tree: Any, name: str = "carry", owners: tuple[str, str] = _ITERATIONS, error: type[Exception] = TraceError
) -> Callable[[Any], None]:
    """A function that raises an ``error`` unless it is given tensors in the structure, shapes and dtypes of ``tree``.

    Args:
        tree: Tensors.
        name: What the trees are called.
        owners: Where the one comes from, and where the other does.
        error: The class of the error, which names a leaf that differs.
    """
    if torch.compiler.is_compiling():
        # A compiler's own loop checks by itself, and one that is unrolled may change.
        return lambda after: None
    kinds = tree_map(_kind, tree)
    known, bad = optree.tree_flatten(kinds), [kind for kind in optree.tree_leaves(kinds) if kind.startswith("a ")]

    def check(after: Any) -> None:
        if optree.tree_flatten(other := tree_map(_kind, after)) != known or bad:
            _refuse(kinds, other, name, owners, error)

    return check


def _refuse(before: Tree, after: Tree, name: str, owners: tuple[str, str], error: type[Exception]) -> None:
    mismatch = difference(after, before, name, *owners[::-1])
    for path, old, new in zip(paths(before, name), *map(leaves, (before, after)), strict=not mismatch):
        if mismatch is None and (old != new or old.startswith("a ")):
            mismatch = f"{path} is {old}" if old == new else f"{path} is {old} in {owners[0]} but {new} in {owners[1]}"
    raise error(f"{mismatch}; give tensors of one structure, and of the same shapes and dtypes")


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__qualname__}"
