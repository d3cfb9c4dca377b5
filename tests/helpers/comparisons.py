"""Comparisons of stacked trees whose errors name the member, the path and both values."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor


def differing_entry(found: Tensor, expected: Tensor, member_dim: int | None = 0) -> str:
    """The member, the index and both values of the entry that differs most."""
    if found.shape != expected.shape or not found.numel():
        return f"shapes {[*found.shape]} and {[*expected.shape]}"
    wide = torch.complex128 if found.is_complex() or expected.is_complex() else torch.float64
    distance = (found.detach().to(wide) - expected.detach().to(wide)).abs()
    # An entry that is not a number on both sides is the same.
    distance[found.isnan() & expected.isnan()] = 0
    distance[found.isnan() ^ expected.isnan()] = torch.inf
    index = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    member = f"member {index[member_dim]}, " if member_dim is not None and len(index) > member_dim else ""
    return f"{member}entry {[*index]} is {found[index].item()!r}, expected {expected[index].item()!r}"


def assert_tensors_close(
    found: Tensor, expected: Tensor, tolerance: float, path: str, member_dim: int | None = 0
) -> None:
    """Two tensors agree, relatively or absolutely; ``member_dim`` is the dimension of the members, None without one."""
    torch.testing.assert_close(
        found,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{path}: {differing_entry(found, expected, member_dim)}\n{text}",
    )


def identical(found: Any, expected: Any) -> bool:
    """Whether two trees have leaves of the same types and values."""
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def assert_trees_close(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Two stacked trees have the same paths, and leaves that agree."""
    paths, leaves, _ = optree.tree_flatten_with_accessor(found)
    expected_paths, expected_leaves, _ = optree.tree_flatten_with_accessor(expected)
    names = [path.codify(what) for path in paths]
    assert names == [path.codify(what) for path in expected_paths]
    for name, leaf, other in zip(names, leaves, expected_leaves, strict=True):
        assert_tensors_close(leaf, other, tolerance, name)
