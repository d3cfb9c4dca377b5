"""Maxima over windows by the program in ``pooling.c``, to the bits of PyTorch's, whose kernel takes one number at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


def program(dtype: torch.dtype) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    return native.load_file(__file__, dtype, "max_pool:ppppn max_pool_backward:nnnpppn")


def max_pool(
    x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Maxima over windows of an image with two axes, and their places in it."""
    windows = zip(x.shape[-2:], taps, stride, padding, dilation, strict=True)
    space = [(size + 2 * pad - far * (count - 1) - 1) // step + 1 for size, count, step, pad, far in windows]
    y, places = (x.new_empty((*x.shape[:-2], *space), dtype=dtype) for dtype in (x.dtype, torch.int64))
    planes = x.numel() // (x.shape[-2] * x.shape[-1])
    numbers = planes, *x.shape[-2:], *space, *taps, *stride, *padding, *dilation
    x = x.contiguous()
    pointers = x.data_ptr(), y.data_ptr(), places.data_ptr()
    geometry = struct.pack(f"{len(numbers)}q", *numbers)
    native.check_memory(program(x.dtype).max_pool(geometry, *pointers, torch.get_num_threads()))
    return y, places


def max_pool_backward(grad: Tensor, places: Tensor, space: Sequence[int]) -> Tensor:
    """The gradient of an image with two axes from that of its maxima."""
    dx = grad.new_empty((*grad.shape[:-2], *space))
    size, outputs = space[0] * space[1], grad.shape[-2] * grad.shape[-1]
    grad, places = grad.contiguous(), places.contiguous()
    pointers = grad.data_ptr(), places.data_ptr(), dx.data_ptr()
    program(grad.dtype).max_pool_backward(dx.numel() // size, size, outputs, *pointers, torch.get_num_threads())
    return dx
