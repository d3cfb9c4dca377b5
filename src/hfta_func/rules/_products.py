"""Convolutions of M members as batched matrix products, of unfolded images or, for 1x1 filters, of images as they are.

Dimension letters as in :mod:`hfta_func.rules.conv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules._layout import split


class Geometry(NamedTuple):
    """The arguments of a convolution that are not tensors, in PyTorch's order."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm``; when compiled, without single rows or columns.

    Inductor turns such products into sums, and its CPU code for sums over operands of different layouts writes out of bounds
    (pytorch/pytorch#196681).
    """
    rows, columns = a.shape[1], b.shape[2]
    if not torch.compiler.is_compiling() or (rows != 1 and columns != 1):
        return torch.bmm(a, b)
    return torch.bmm(F.pad(a, (0, 0, 0, rows == 1)), F.pad(b, (0, columns == 1)))[:, :rows, :columns]


def transposed_space(small: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> list[int]:
    """The output space of a transposed convolution of an input with space ``L``."""
    sizes = zip(small, kernel, *geometry[:3], geometry.output_padding, strict=True)
    return [
        (size - 1) * stride - 2 * pad + dilation * (taps - 1) + extra + 1
        for size, taps, stride, pad, dilation, extra in sizes
    ]


def convolve(image: Tensor, weight: Tensor, geometry: Geometry, space: Sequence[int] | None) -> Tensor:
    """Each output pixel from the input pixels under the filter: ``[M,N,GI,S], [M,GO,I,K] -> [M,N,GO,L]``.

    With a ``space`` of the output, each input pixel onto the output pixels under the filter:
    ``[M,N,GO,L], [M,GO,I,K] -> [M,N,GI,S]``.
    """
    if space is None:
        columns, space = _columns(image, weight, geometry)
        # [MG,NL,IK] @ [MG,IK,O] -> [MG,NL,O] -> [M,G,N,L,O] -> [M,N,GO,L]
        products = bmm(columns, _matrix(weight, geometry).transpose(1, 2))
        return _channels_first(products, image.shape[:2], space, geometry)
    num_models, batch, _, *small = image.shape
    kernel = weight.shape[3:]
    # [MG,NL,O] @ [MG,O,IK] -> [MG,NL,IK]
    columns = bmm(_rows(image, geometry), _matrix(weight, geometry))
    if is_pointwise(kernel, geometry):
        return _channels_first(columns, image.shape[:2], small, geometry)
    if math.prod(small) == 1 and list(space) == list(kernel) and not any(geometry.padding):
        # [MG,N,IK] -> [M,G,N,I,K] -> [M,N,GI,K]
        columns = columns.reshape(num_models, geometry.groups, batch, weight.shape[2], *space)
        return columns.transpose(1, 2).flatten(2, 3)
    # [M,G,N,L,I,K] -> [MN,GIK,L] -> [MN,GI,S]
    columns = columns.reshape(num_models, geometry.groups, batch, math.prod(small), columns.shape[2])
    columns = columns.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)
    window = (_two(kernel, 1), _two(geometry.dilation, 1), _two(geometry.padding, 0), _two(geometry.stride, 1))
    y = F.fold(columns, _two(space, 1), *window)
    return y.reshape(num_models, batch, y.shape[1], *space)


def correlate(channels: Tensor, image: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, None]:
    """The gradient of the filters: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K]``, and none of a bias."""
    # [MG,O,NL] @ [MG,NL,IK] -> [MG,O,IK]
    columns, _ = _columns(image, weight, geometry)
    return bmm(_rows(channels, geometry).transpose(1, 2), columns).reshape(weight.shape), None


def convolve_samples(image: Tensor, weight: Tensor, geometry: Geometry, space: Sequence[int] | None) -> Tensor:
    """:func:`convolve` of 1x1 filters, one product per sample: ``[M,O,I] @ [M,N,I,S]``, or ``[M,I,O] @ [M,N,O,S]``."""
    matrices = weight.flatten(2) if space is None else weight.flatten(2).transpose(1, 2)
    # Samples come before members in memory: [N,M,O,I] @ [N,M,I,S]; the matrices are small and repeated.
    pixels = image.transpose(0, 1).flatten(3)
    y = torch.matmul(matrices.expand(pixels.shape[0], *matrices.shape), pixels)
    return y.reshape(*y.shape[:3], *image.shape[3:]).transpose(0, 1)


def correlate_samples(channels: Tensor, image: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, None]:
    """:func:`correlate` of 1x1 filters: ``[M,N,O,S], [M,N,I,S] -> [M,O,I,1]``, summed over samples and pixels."""
    left, right = (one.transpose(0, 1).flatten(3) for one in (channels, image))
    return torch.matmul(left, right.transpose(2, 3)).sum(0).reshape(weight.shape), None


def _columns(image: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, list[int]]:
    """The pixels under the filter at each position: ``[M,N,GI,S] -> [MG,NL,IK]``, and L."""
    kernel = weight.shape[3:]
    if is_pointwise(kernel, geometry):
        return _rows(image, geometry), list(image.shape[3:])
    axes = len(kernel)
    windows = F.pad(image, [pad for pad in reversed(geometry.padding) for _ in range(2)])
    for axis, (taps, stride, dilation) in enumerate(zip(kernel, geometry.stride, geometry.dilation, strict=True)):
        windows = windows.unfold(3 + axis, dilation * (taps - 1) + 1, stride)[..., ::dilation]
    # [M,N,GI,L,K] -> [M,N,G,I,L,K] -> [M,G,N,L,I,K]
    space = list(windows.shape[3 : 3 + axes])
    windows = split(windows, 2, geometry.groups)
    order = (0, 2, 1, *range(4, 4 + axes), 3, *range(4 + axes, 4 + 2 * axes))
    windows = windows.permute(order)
    shape = image.shape[0] * geometry.groups, image.shape[1] * math.prod(space), math.prod(weight.shape[2:])
    return windows.reshape(shape), space


def _rows(channels: Tensor, geometry: Geometry) -> Tensor:
    # [M,N,GO,L] -> [M,N,G,O,L] -> [M,G,N,L,O] -> [MG,NL,O]
    rows = split(channels, 2, geometry.groups).flatten(4).permute(0, 2, 1, 4, 3)
    return rows.reshape(rows.shape[0] * rows.shape[1], rows.shape[2] * rows.shape[3], rows.shape[4])


def _matrix(weight: Tensor, geometry: Geometry) -> Tensor:
    # [M,GO,I,K] -> [MG,O,IK]
    return split(weight.flatten(2), 1, geometry.groups).flatten(0, 1)


def _channels_first(products: Tensor, lead: Sequence[int], space: Sequence[int], geometry: Geometry) -> Tensor:
    # [MG,NL,O] -> [M,G,N,L,O] -> [M,N,G,O,L] -> [M,N,GO,L]
    products = products.reshape(lead[0], geometry.groups, lead[1], math.prod(space), products.shape[2])
    products = products.permute(0, 2, 1, 4, 3)
    return products.reshape(*lead, geometry.groups * products.shape[3], *space)


def crop(weight: Sequence[int], geometry: Geometry, space: Sequence[int]) -> tuple[list[int] | None, Geometry]:
    """Leave out taps at the edges that meet only padding: a 3x3 filter on a 1x1 image uses one of its nine taps."""
    if geometry.transposed:
        return None, geometry
    padding, cropped, left = list(geometry.padding), [], 1
    for axis, (size, stride, pad, dilation) in enumerate(zip(space, *geometry[:3], strict=True)):
        taps = count = weight[2 + axis]
        first = 0
        if pad and isinstance(size, int) and size <= pad + dilation * (taps - 1):
            starts = range(-pad, size + pad - dilation * (taps - 1), stride)
            used = [tap for tap in range(taps) if any(0 <= start + dilation * tap < size for start in starts)]
            rest = pad - dilation * used[0] if used else -1
            # PyTorch pads both sides alike, so the last position of the filter must stay the same.
            width = dilation * (used[-1] - used[0]) + 1 if used else 0
            if rest >= 0 and (size + 2 * rest - width) // stride + 1 == len(starts):
                first, count, padding[axis] = used[0], used[-1] - used[0] + 1, rest
        cropped = [-first, first + count - taps, *cropped]
        left *= count
    # Cropping copies the remaining taps, which is worth it only if they are few.
    if 4 * left > math.prod(weight[2:]):
        return None, geometry
    return cropped, geometry._replace(padding=padding)


def is_pointwise(kernel: Sequence[int], geometry: Geometry) -> bool:
    """Whether each output pixel is made of one input pixel."""
    return all(taps == 1 for taps in kernel) and set(geometry.stride) == {1} and not any(geometry.padding)


def _two(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Values for two space axes; with one axis, the first is trivial."""
    return (*[fill] * (2 - len(values)), *values)
