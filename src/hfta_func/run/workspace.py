"""Bytes that kernels on a CPU allocate besides their results, by what PyTorch and oneDNN do."""

from __future__ import annotations

import functools
import math

import torch

from hfta_func.run.walk import Like, Operator

_BLOCK = 16
"""Channels that oneDNN keeps together: the floats of a vector of AVX-512."""


def workspace(operator: Operator, threads: int) -> int:
    """Bytes that an operator allocates on a CPU besides its results."""
    if operator.name in ("convolution", "convolution_backward"):
        return _of_convolution(operator, threads)
    if operator.name == "native_batch_norm_backward":
        # PyTorch allocates the gradient of the input twice.
        return operator.inputs[0][1].bytes
    whole = [like for like in operator.tensors if like.shape]
    if torch.Tag.pointwise in operator.call.tags and operator.name not in ("where", "masked_fill") and whole:
        dtype = functools.reduce(torch.promote_types, (like.dtype for like in whole))
        # Operands of another dtype are converted first.
        return sum(math.prod(like.shape) * dtype.itemsize for like in whole if like.dtype != dtype)
    return 0


def _of_convolution(operator: Operator, threads: int) -> int:
    args = operator.inputs[0]
    is_backward = operator.name.endswith("backward")
    if is_backward:
        y, x, weight, _, stride, _, dilation, transposed, _, groups, (for_x, *_) = args
    else:
        (x, weight, _, stride, _, dilation, transposed, _, groups), (y,), for_x = args, operator.results, False
    taps, dtype = math.prod(weight.shape[2:]), weight.dtype
    channels = weight.shape[0] // groups, weight.shape[1]
    unfolded = dtype.itemsize * channels[1] * taps * math.prod((x if transposed else y).shape[2:])
    is_product = taps == groups == max(stride) == threads == 1 and x.shape[0] < _BLOCK and dtype == torch.float32
    if is_product or dtype == torch.float64:
        # Not by oneDNN: a product of all images, unfolded if filters are larger than 1x1.
        return x.shape[0] * unfolded if taps > 1 else 0
    blocks = dtype.itemsize * groups * taps * math.prod(map(_in_blocks, channels))
    is_channels_last = any(like.stride[1] == 1 < math.prod(like.shape[2:]) for like in (x, y))
    if channels == (1, 1) and groups > 1 and (not is_backward or _has_small_filters(x, weight, dilation)):
        # Kernels for one channel per group, which others fill up to a block.
        blocks = weight.bytes
    elif groups > 1 and not is_channels_last and any(count % (_BLOCK // 2) for count in channels):
        # A product of each unfolded image, and a copy of the result.
        return max(x.bytes, threads * (4 * weight.bytes + unfolded)) if is_backward else y.bytes + weight.bytes
    if is_channels_last:
        return blocks + weight.bytes * (2 if is_backward else 1)
    if transposed and not is_backward:
        # The result as it was computed, and converted.
        return 2 * y.bytes
    in_blocks = [like.bytes // like.shape[1] * _in_blocks(like.shape[1]) for like in (x, y)]
    few = y if transposed else x
    if groups == 1 and few.shape[1] < _BLOCK:
        # An image of few channels is read as it is, and its gradient copied as it is.
        in_blocks[1 if transposed else 0] = few.bytes if for_x else 0
    moved = blocks + sum(in_blocks)
    # Results are allocated after what they are converted from.
    return max(blocks, moved - weight.bytes) if is_backward else max(in_blocks[1], moved - y.bytes)


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _has_small_filters(x: Like, weight: Like, dilation: list[int]) -> bool:
    """Whether there is a kernel for the gradient of filters with one channel per group."""
    taps = weight.shape[2:]
    return max(taps) <= 3 and max(dilation) == 1 and all(map(int.__ge__, x.shape[2:], taps))
