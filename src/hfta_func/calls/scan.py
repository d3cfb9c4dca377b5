"""A loop over the first axis of tensors, which a compiler takes into its graph as one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._torch import function_modes, inside_transform, operator_scan, pytree
from hfta_func._tree import difference, leaves, paths, tree_map
from hfta_func._types import TraceError, Tree
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed


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
    model calls it or it is inside a transform such as ``vmap``: there it is unrolled. It can be differentiated. Where random
    calls draw from a key around the loop, every iteration draws other numbers.

    Args:
        body: ``body(carry, x) -> (carry, y)``, or ``body(carry, x, key)`` if there is a key. The new carry has the structure,
            shapes and dtypes of the old one; ``y`` is a tensor, None, or a tree in dicts, tuples and lists. It writes none of
            its arguments.
        carry: The carry before the first iteration, a tree of tensors.
        xs: A tree of tensors ``[length, ...]``, of which every iteration is given its part.
        length: Number of iterations; needed only without ``xs``, for which ``x`` is None.
        key: Keys ``[...]``; every iteration is given them folded with its number.

    Returns:
        The carry after the last iteration, and a tree of all ``y``, ``[length, ...]``.

    Raises:
        ValueError: if lengths differ or are zero.
        TraceError: if the carry changes its structure, a shape or a dtype; it names the leaf.

    Example:
        >>> def body(total, x):
        ...     return total + x, total
        >>> scan(body, torch.tensor(0), torch.tensor([1, 2, 3]))
        (tensor(6), tensor([0, 1, 3]))
    """
    count = _length(xs, length)

    def iteration(carry: Any, x: Any, index: Any) -> tuple[Any, Any]:
        keys = () if key is None else (random.fold_in(key, index),)
        after, y = body(carry, x, *keys)
        check_kept(carry, after)
        return after, y

    modes = [mode for mode in function_modes() if isinstance(mode, (routed, lowered))]
    if torch.compiler.is_dynamo_compiling() and not modes and not inside_transform():
        return _in_graph(iteration, carry, xs, count)
    around = next((mode for mode in reversed(modes) if isinstance(mode, routed)), None)
    call, ys = (_plainly if around is None else around.next_call()), []
    for index in range(count):
        x = None if xs is None else tree_map(lambda leaf, index=index: leaf[index], xs)
        carry, y = call(index, iteration, carry, x, index)
        ys.append(y)
    return carry, None if ys[0] is None else tree_map(lambda *parts: torch.stack(parts), *ys)


def _plainly(part: int, func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def _in_graph(iteration: Callable[..., tuple[Any, Any]], carry: Any, xs: Tree, count: int) -> tuple[Any, Any]:
    # PyTorch's loop lets modes be entered inside of it if one has been entered before it.
    with routed(None):
        numbers = torch.arange(count, device=leaves(carry)[0].device)

    def step(flat: Any, given: Any) -> tuple[Any, Any]:
        carry, y = iteration(pytree.tree_unflatten(flat, spec), given[1] if len(given) > 1 else None, given[0])
        return leaves(_settled(carry)), () if y is None else _settled(y)

    # PyTorch's loop takes no NamedTuples out of its body.
    flat, spec = pytree.tree_flatten(_settled(carry))
    flat, ys = operator_scan(step, flat, (numbers,) if xs is None else (numbers, xs))
    return pytree.tree_unflatten(flat, spec), ys if leaves(ys) else None


def _settled(tree: Tree) -> Any:
    """The tree in tensors of its own that lie in order: a loop's strides must agree, also those of axes of size one."""
    return tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def _length(xs: Tree, length: int | None) -> int:
    given = [leaf for leaf in leaves(xs) if leaf is not None]
    counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in given}
    counts |= set() if length is None else {length}
    if len(counts) != 1 or min(counts) < 1:
        raise ValueError(
            f"the lengths of xs and length are {sorted(counts)}; give one length of at least 1: tensors [length, ...] in xs, "
            f"or length="
        )
    return counts.pop()


def check_kept(before: Any, after: Any) -> None:
    """Raise a TraceError if a carry has another structure, shape or dtype after an iteration; it names the leaf."""
    if torch.compiler.is_compiling():
        same = pytree.tree_structure(before) == pytree.tree_structure(after)
        mismatch = None if same else "the carry has another structure after an iteration"
    else:
        mismatch = difference(after, before, "carry", "an iteration's result", "its argument")
    if mismatch is not None:
        raise TraceError(f"{mismatch}; return a carry of the structure that was given")
    for index, (old, new) in enumerate(zip(leaves(before), leaves(after), strict=True)):
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in (old, new)]
        if not isinstance(old, Tensor) or kinds[0] != kinds[1]:
            name = f"leaf {index} of carry" if torch.compiler.is_compiling() else paths(before, "carry")[index]
            raise TraceError(
                f"{name} is {_text(old)} but {_text(new)} after an iteration; carry tensors that keep shape and dtype"
            )


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__qualname__}"
