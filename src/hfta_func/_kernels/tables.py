"""Rows of tables by the program in ``tables.c``: taken, added to and summed, without sorting them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


@functools.cache
def program(dtype: torch.dtype) -> Any:
    """The function for a type of numbers; None if there is none, or it cannot be compiled."""
    library = native.load_file(Path(__file__).with_suffix(".c"), dtype)
    if library is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        indices = pointer, size, pointer, size, pointer, size
        library.move_rows.argtypes = [size, size, size, pointer, size, pointer, size, *indices, size, size]
    return library


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
