"""Shared code of the law-suites: errors that name the broken law, the element and both values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import leaves, paths


@contextlib.contextmanager
def law(name: str, about: str = "") -> Iterator[None]:
    """Convert errors inside the block to an AssertionError that names the law and the input."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"law '{name}'{about and f', {about}'}: {kind}{error}") from error


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest magnitude."""
    # On XLA, this would be compiled for every shape.
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = (x.to(torch.complex128) if x.is_complex() else x.double() for x in (a, b))
    return float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()))


def assert_close(got: Any, expected: Any, name: str, rtol: float) -> None:
    """Raise unless two trees have the same structure, shapes and dtypes, and values that differ by less than ``rtol``."""
    names, expected_names = paths(got, name), paths(expected, name)
    assert names == expected_names, f"{name} has the leaves {names}, not {expected_names}"
    for path, a, b in zip(names, leaves(got), leaves(expected), strict=True):
        kinds = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__qualname__ for x in (a, b)]
        assert kinds[0] == kinds[1], f"{path} is {kinds[0]}, not {kinds[1]}"
        if isinstance(a, Tensor) and not difference(a, b) <= rtol:
            far = (a - b).abs().nan_to_num(torch.inf) if a.dtype != torch.bool else (a ^ b).int()
            index = [int(x) for x in torch.unravel_index(far.argmax(), a.shape)]
            one, two = (x[tuple(index)].item() for x in (a, b))
            member = f"model {index[0]}: " if index else ""
            raise AssertionError(f"{member}{path}{index} is {one!r}, not {two!r}")
