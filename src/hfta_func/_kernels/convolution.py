"""Convolutions by the program in ``convolution.c``: sums under filters, and the gradient of filters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


@functools.cache
def block() -> int:
    """The channels in a block of PyTorch's kernels, which take a vector of them at a time."""
    return 16 if "avx512f" in native.processor() else 8


def program(dtype: torch.dtype | None) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    # A sum of products is as exact with fused operations, and the same in every lane.
    flags = ("-ffp-contract=fast",)
    return native.load_file("convolution", dtype, "convolve:pppppn correlate:pppnnppn", flags)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, space: Sequence[int], window: Sequence[Sequence[int]], groups: int,
    scatters: bool,
) -> Tensor:  # fmt: skip
    """Sums under the filters: ``[M,N,GO,L], [M,GO,I,K] -> [M,N,GI,S]`` if it scatters, otherwise from images to channels.

    M may be several axes. ``window`` are strides, padding and dilation of all space axes.
    """
    axes = len(space)
    lead, (image, weight) = x.shape[: -axes - 1], (_flat(x, axes), weight.flatten(0, -axes - 3).contiguous())
    small, big = weight.shape[1] // groups, weight.shape[2]
    taps = weight.shape[3:].numel()
    channels, strides = ((small, big), (taps, big * taps)) if scatters else ((big, small), (big * taps, taps))
    y = x.new_empty((*lead, groups * channels[1], *space))
    geometry = _geometry(image, groups, channels, strides, scatters, space, weight.shape[3:], window)
    bias = None if bias is None else bias.contiguous()
    native.check_memory(native.call(program(x.dtype).convolve, geometry, image, weight, bias, y))
    return y


def correlate(
    channels: Tensor, image: Tensor, taps: Sequence[int], window: Sequence[Sequence[int]], groups: int
) -> tuple[Tensor, Tensor]:
    """The gradients of the filters and of the bias: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K], [M,GO]``."""
    axes = len(taps)
    lead, (channels, image) = image.shape[: -axes - 2], (_flat(channels, axes), _flat(image, axes))
    sides = image.shape[2] // groups, channels.shape[2] // groups
    gradient, of_bias = (image.new_empty((*lead, channels.shape[2], *shape)) for shape in ((sides[0], *taps), ()))
    geometry = _geometry(image, groups, sides, (0, 0), False, channels.shape[3:], taps, window)
    given = geometry, image, channels, *channels.stride()[:2], gradient, of_bias
    native.check_memory(native.call(program(image.dtype).correlate, *given))
    return gradient, of_bias


def _flat(x: Tensor, axes: int) -> Tensor:
    """``[M,N,C,S]``, with the channels and pixels of an image contiguous; members and samples may be anywhere."""
    x = x.flatten(0, -axes - 3)
    return x if x[0, 0].is_contiguous() else x.contiguous()


def _geometry(
    x: Tensor, groups: int, channels: Sequence[int], strides: Sequence[int], scatters: bool, space: Sequence[int],
    taps: Sequence[int], window: Sequence[Sequence[int]],
) -> bytes:  # fmt: skip
    missing = 3 - len(space)
    ones, zeros = [1] * missing, [0] * missing
    axes = (*ones, *x.shape[3:], *ones, *space, *ones, *taps, *ones, *window[0], *zeros, *window[1], *ones, *window[2])
    numbers = (*x.shape[:2], groups, *channels, *x.stride()[:2], *strides, missing, scatters, *axes)
    return native.packed(numbers)
