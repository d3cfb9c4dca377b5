"""A ring buffer of what each member has seen, as tensors of its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._tree import leaves, tree_map, where
from hfta_func._types import PerModel, Tree, check_counts
from hfta_func.calls.scan import alike
from hfta_func.errors import BatchError
from hfta_func.rl.environment import check_keys, chosen
from hfta_func.rl.rollouts import check_rows, ended, per_member, rows_at


class Replay(NamedTuple):
    """The rows that each of M members has seen last; every leaf is ``[M, ...]``.

    Args:
        rows: A tree of tensors ``[M, capacity, ...]``.
        position: Where each member's next row goes.
        size: Number of rows that it has.
    """

    rows: Tree
    position: Tensor
    size: Tensor


def replay(rows: Tree, capacity: int) -> Replay:
    """An empty buffer.

    Args:
        rows: A tree of tensors ``[M, n, ...]``, as they will be written; their values do not matter.
        capacity: Number of rows kept for each member.

    Raises:
        ValueError: if the capacity is less than 1.
        BatchError: if rows are not ``[M, n, ...]``; it names the leaf.

    Example:
        >>> buffer = replay({"x": torch.zeros(2, 1, 3)}, capacity=10)
        >>> buffer = written(buffer, {"x": torch.randn(2, 4, 3)})
        >>> sampled, index = sample(buffer, random.keys([0, 1]), 5)
        >>> sampled["x"].shape, buffer.size
        (torch.Size([2, 5, 3]), tensor([4, 4]))
    """
    check_counts(capacity=capacity)
    check_rows(rows)
    empty = tree_map(lambda leaf: leaf.new_zeros(leaf.shape[0], capacity, *leaf.shape[2:]), rows)
    zeros = torch.zeros_like(leaves(empty)[0].flatten(1)[:, 0], dtype=torch.int64)
    return Replay(empty, zeros, zeros.clone())


def written(buffer: Replay, rows: Tree, *, donate: bool = False) -> Replay:
    """The buffer with further rows, in place of the oldest ones once it is full.

    Args:
        buffer: The buffer before.
        rows: A tree of tensors ``[M, n, ...]``.
        donate: Write the buffer's own tensors, which takes as long for any capacity; the given buffer is then not to be used.

    Raises:
        BatchError: if there are more rows than the buffer holds, or they are of another structure, shape or dtype; it names
            the leaf.
    """
    n, capacity = check_rows(rows), leaves(buffer.rows)[0].shape[1]
    if n > capacity:
        raise BatchError(f"{n} rows do not fit into a buffer of {capacity}; write fewer at once, or make it larger")
    alike(tree_map(lambda leaf: leaf[:, :n], buffer.rows), "rows", ("the buffer", "what is written"), BatchError)(rows)
    place = (buffer.position.unsqueeze(-1) + torch.arange(n, device=buffer.position.device)) % capacity
    member = torch.arange(len(place), device=place.device).unsqueeze(-1)

    def put(old: Tensor, new: Tensor) -> Tensor:
        return old.index_put_((member, place), new) if donate else old.index_put((member, place), new)

    size = (buffer.size + n).clamp(max=capacity)
    return Replay(tree_map(put, buffer.rows, rows), (buffer.position + n) % capacity, size)


def sample(buffer: Replay, keys: Tensor, n: int) -> tuple[Any, Tensor]:
    """Rows of each member, all equally likely.

    Args:
        buffer: The buffer.
        keys: One key per member.
        n: How many.

    Returns:
        A tree of tensors ``[M, n, ...]`` and their places ``[M, n]``. Rows of an empty buffer are NaN, so that this member
        fails in its step, and the others do not.

    Raises:
        BatchError: if there are not as many keys as members.
        ValueError: if there is nothing to draw.
    """
    check_counts(n=n)
    check_keys(keys, len(buffer.size))
    index = (random.uniform(keys, (n,), dtype=torch.float64) * buffer.size.unsqueeze(-1)).long()
    rows = tree_map(lambda leaf: rows_at(leaf, index), buffer.rows)
    nothing = tree_map(lambda leaf: torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf, rows)
    return where(buffer.size > 0, rows, nothing), index


def n_step(steps: dict[str, Tensor], n: int, *, discount: PerModel = 0.99) -> dict[str, Tensor]:
    """Transitions over up to n steps: ``reward`` is their discounted sum, ``next_observation`` the one after the last.

    Args:
        steps: What :func:`~hfta_func.rl.rollout` returned, ``[M, T, N, ...]``.
        n: Number of steps; fewer where an episode ends.
        discount: A number or one per member.

    Returns:
        The steps with ``discount``, what the value after them counts: ``[M, T - n + 1, N, ...]``.

    Raises:
        BatchError: if there are fewer than n steps.
    """
    length = steps["reward"].shape[1] - n + 1
    check_counts(n=n)
    if length < 1:
        raise BatchError(f"{steps['reward'].shape[1]} steps have no {n} in a row; take more, or a smaller n")
    rate = per_member(discount, steps["reward"])
    result = {name: leaf[:, :length] for name, leaf in steps.items()}
    total, factor = torch.zeros_like(result["reward"]), torch.ones_like(result["reward"])
    done, going = ended(steps), torch.ones_like(result["terminated"])
    ends = ("next_observation", "terminated", "truncated")
    for ahead in range(n):
        part = {name: steps[name][:, ahead : ahead + length] for name in ("reward", *ends)}
        total = total + torch.where(going, factor * part["reward"], 0)
        factor = torch.where(going, factor * rate, factor)
        for name in ends:
            result[name] = chosen(going, part[name], result[name])
        going = going & ~done[:, ahead : ahead + length]
    return result | {"reward": total, "discount": factor}
