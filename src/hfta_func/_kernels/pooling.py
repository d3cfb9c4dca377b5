"""Maxima over windows by the program in ``pooling.c``, to the bits of PyTorch's, whose kernel takes one number at a time."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
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
        library.max_pool.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64]
    return library


def max_pool(
    x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Maxima over windows of an image with two axes, and their places in it."""
    windows = zip(x.shape[-2:], taps, stride, padding, dilation, strict=True)
    space = [(size + 2 * pad - far * (count - 1) - 1) // step + 1 for size, count, step, pad, far in windows]
    y, places = (x.new_empty((*x.shape[:-2], *space), dtype=dtype) for dtype in (x.dtype, torch.int64))
    planes = x.numel() // (x.shape[-2] * x.shape[-1])
    numbers = planes, *x.shape[-2:], *space, *taps, *stride, *padding, *dilation
    pointers = x.contiguous().data_ptr(), y.data_ptr(), places.data_ptr()
    program(x.dtype).max_pool(struct.pack(f"{len(numbers)}q", *numbers), *pointers, torch.get_num_threads())
    return y, places
