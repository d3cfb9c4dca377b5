"""Convolutions of M members as batched matrix products, as compilers make fast programs of them.

Other than in :mod:`hfta_func.rules._products`, whose dimension letters these functions share, padded images and windows are
written to memory, each once, and overlapping windows are never added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules._layout import split
from hfta_func.rules._products import Geometry, bmm, channels_first, matrix


def gather(image: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Each output pixel from the input pixels under the filter: ``[M,N,GI,S], [M,GO,I,K] -> [M,N,GO,L]``."""
    windows, space = _windows(image, weight.shape[3:], geometry)
    # [MG,NL,IK] @ [MG,IK,O] -> [MG,NL,O] -> [M,G,N,L,O] -> [M,N,GO,L]
    products = bmm(windows, matrix(weight, geometry).transpose(1, 2))
    return channels_first(products, image.shape[:2], space, geometry)


def scatter(channels: Tensor, weight: Tensor, geometry: Geometry, space: Sequence[int]) -> Tensor:
    """Each input pixel onto the output pixels under the filter: ``[M,N,GO,L], [M,GO,I,K] -> [M,N,GI,S]``.

    Output pixel ``stride * u + r`` of phase ``r`` reads input pixels ``u - a`` with taps ``r + stride * a``, so all phases
    are channels of one convolution with stride 1. Filters with a stride must not be dilated.
    """
    axes, groups = len(space), geometry.groups
    padding, starts, taps, missing = [], [], [], []
    for axis, size in enumerate(space):
        stride, pad, dilation = (option[axis] for option in geometry[:3])
        taps.append(-(-weight.shape[3 + axis] // stride))
        missing = [0, taps[-1] * stride - weight.shape[3 + axis], *missing]
        first, last = pad // stride, (pad + size - 1) // stride
        padding = [dilation * (taps[-1] - 1) - first, last + 1 - channels.shape[3 + axis], *padding]
        starts.append(pad - first * stride)
    # [M,GO,I,K] -> [M,G,O,I,A,R] -> [M,G,I,R,O,A] -> [M,GIR,O,A]
    weight = split(F.pad(weight, missing), 1, groups)
    weight = weight.reshape(*weight.shape[:4], *(n for pair in zip(taps, geometry.stride, strict=True) for n in pair))
    weight = weight.permute(0, 1, 3, *range(5, 5 + 2 * axes, 2), 2, *range(4, 4 + 2 * axes, 2)).flatten(1, 2 + axes)
    one, zero = [1] * axes, [0] * axes
    of_phases = Geometry(one, zero, geometry.dilation, False, zero, groups)
    image = gather(F.pad(channels, padding), weight.flip([*range(3, 3 + axes)]), of_phases)
    # [M,N,GIR,U] -> [M,N,GI,R,U] -> [M,N,GI,UR] -> [M,N,GI,S]
    image = image.unflatten(2, (-1, *geometry.stride))
    image = image.permute(0, 1, 2, *(i for axis in range(axes) for i in (3 + axes + axis, 3 + axis)))
    for axis, (start, size) in enumerate(zip(starts, space, strict=True)):
        image = image.flatten(3 + axis, 4 + axis).narrow(3 + axis, start, size)
    return image


def correlate(channels: Tensor, image: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the filters: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K]``."""
    windows, _ = _windows(image, weight.shape[3:], geometry)
    # [M,N,GO,L] -> [M,GO,N,L] -> [MG,O,NL]; [MG,O,NL] @ [MG,NL,IK] -> [MG,O,IK]
    rows = channels.transpose(1, 2).reshape(windows.shape[0], -1, windows.shape[1])
    return bmm(rows, windows).reshape(weight.shape)


def _windows(image: Tensor, kernel: Sequence[int], geometry: Geometry) -> tuple[Tensor, list[int]]:
    """The pixels under the filter at each position: ``[M,N,GI,S] -> [MG,NL,IK]``, and L."""
    # A compiler must write an image whose strides are asked for. It would compute pixels anew for every window otherwise.
    image = F.pad(image, [pad for pad in reversed(geometry.padding) for _ in range(2)]).contiguous()
    num_models, batch, channels, *sizes = image.shape
    of_model, of_sample, of_channel, *of_pixel = image.stride()
    options = zip(sizes, kernel, geometry.stride, geometry.dilation, strict=True)
    space = [(size - dilation * (taps - 1) - 1) // stride + 1 for size, taps, stride, dilation in options]
    shape = (num_models, geometry.groups, batch, *space, channels // geometry.groups, *kernel)
    strides = (
        *(of_model, channels // geometry.groups * of_channel, of_sample),
        *(step * stride for step, stride in zip(of_pixel, geometry.stride, strict=True)),
        of_channel,
        *(step * dilation for step, dilation in zip(of_pixel, geometry.dilation, strict=True)),
    )
    windows = image.as_strided(shape, strides)
    return windows.reshape(num_models * geometry.groups, batch * math.prod(space), -1), space
