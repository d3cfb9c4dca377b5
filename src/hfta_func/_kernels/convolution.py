"""Convolutions by the program in ``convolution.c``: sums under filters, and the gradient of filters."""

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

_KINDS = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def program(dtype: torch.dtype | None) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    if dtype not in _KINDS:
        return None
    head = f"#define REAL {_KINDS[dtype]}\n#define SIZE {dtype.itemsize}\n"
    # A sum of products is as exact with fused operations, and the same in every lane.
    library = native.load(head + Path(__file__).with_suffix(".c").read_text(), ("-ffp-contract=fast",))
    if library is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        library.convolve.argtypes = [pointer] * 5 + [size]
        library.correlate.argtypes = [pointer] * 3 + [size, size, pointer, size]
    return library


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, space: Sequence[int], window: Sequence[Sequence[int]], groups: int,
    scatters: bool,
) -> Tensor:  # fmt: skip
    """Sums under the filters: ``[M,N,GO,L], [M,GO,I,K] -> [M,N,GI,S]`` if it scatters, otherwise from images to channels.

    ``window`` are strides, padding and dilation of all space axes.
    """
    x, weight, bias = _images(x, len(space)), weight.contiguous(), None if bias is None else bias.contiguous()
    small, big = weight.shape[1] // groups, weight.shape[2]
    taps = weight[0, 0, 0].numel()
    channels, strides = ((small, big), (taps, big * taps)) if scatters else ((big, small), (big * taps, taps))
    y = x.new_empty((*x.shape[:2], groups * channels[1], *space))
    geometry = _geometry(x, groups, channels, strides, scatters, space, weight.shape[3:], window)
    pointer = None if bias is None else bias.data_ptr()
    program(x.dtype).convolve(
        geometry, x.data_ptr(), weight.data_ptr(), pointer, y.data_ptr(), torch.get_num_threads()
    )
    return y


def correlate(
    channels: Tensor, image: Tensor, taps: Sequence[int], window: Sequence[Sequence[int]], groups: int
) -> Tensor:
    """The gradient of the filters: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K]``."""
    channels, image = _images(channels, len(taps)), _images(image, len(taps))
    sides = image.shape[2] // groups, channels.shape[2] // groups
    gradient = image.new_empty((image.shape[0], channels.shape[2], sides[0], *taps))
    geometry = _geometry(image, groups, sides, (0, 0), False, channels.shape[3:], taps, window)
    program(image.dtype).correlate(
        geometry, image.data_ptr(), channels.data_ptr(), *channels.stride()[:2], gradient.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return gradient


def _images(x: Tensor, axes: int) -> Tensor:
    """Images whose channels and pixels are contiguous; members and samples may be anywhere."""
    return x if x[0, 0].is_contiguous() else x.contiguous()


def _geometry(
    x: Tensor, groups: int, channels: Sequence[int], strides: Sequence[int], scatters: bool, space: Sequence[int],
    taps: Sequence[int], window: Sequence[Sequence[int]],
) -> bytes:  # fmt: skip
    missing = 3 - len(space)
    ones, zeros = [1] * missing, [0] * missing
    axes = (*ones, *x.shape[3:], *ones, *space, *ones, *taps, *ones, *window[0], *zeros, *window[1], *ones, *window[2])
    numbers = (*x.shape[:2], groups, *channels, *x.stride()[:2], *strides, missing, scatters, *axes)
    return struct.pack(f"{len(numbers)}q", *numbers)
