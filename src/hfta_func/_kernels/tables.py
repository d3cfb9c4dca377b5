"""Rows of tables by the program in ``tables.c``: taken, added to and summed, without sorting them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


def program(dtype: torch.dtype) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    return native.load_file(__file__, dtype, "move_rows:nnnpnpnpnpnpnnn")


def move_rows(
    x: Tensor, start: Tensor | None, source: Tensor | None, target: Tensor | None, weight: Tensor | None, rows: int,
    padding: int,
) -> Tensor:  # fmt: skip
    """``y[target[k]] += weight[k] * x[source[k]]`` for each member: ``[M,X,D], [M,rows,D], [M,K] -> [M,rows,D]``.

    M may be several axes. Numbers that are missing are those of the moves; ``y`` is zero at first, or ``start``.
    """
    lead, width = x.shape[:-2], x.shape[-1]
    if start is not None:
        y = start.clone(memory_format=torch.contiguous_format)
    else:
        y = (x.new_empty if target is None else x.new_zeros)((*lead, rows, width))
    x = x.contiguous()
    indices = [None if one is None else _flat(one) for one in (source, target, weight)]
    moves = x.shape[-2] if source is None and target is None else (source if target is None else target).shape[-1]  # pyright: ignore
    places = [place for one in indices for place in ((None, 0) if one is None else (one.data_ptr(), one.stride(0)))]
    sizes = lead.numel(), moves, width, x.data_ptr(), x.shape[-2], y.data_ptr(), rows
    if program(x.dtype).move_rows(*sizes, *places, padding, torch.get_num_threads()):
        raise IndexError("index out of range in self")
    return y


def _flat(index: Tensor) -> Tensor:
    index = index.flatten(0, -2)
    return index if index.stride(1) == 1 or index.shape[1] == 1 else index.contiguous()
