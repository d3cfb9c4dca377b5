"""Convolutions of M members as batched matrix products, in an order of which compilers make fast programs.

Unlike :mod:`hfta_func.rules._products`, whose dimension letters these functions share, padded images are written to memory
once, and overlapping windows are never added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules import _products
from hfta_func.rules._layout import split
from hfta_func.rules._products import Geometry


def gather(image: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Each output pixel from the input pixels under the filter: ``[M,N,GI,S], [M,GO,I,K] -> [M,N,GO,L]``."""
    image, geometry = _padded(image, geometry)
    return _products.gather(image, weight, geometry)


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
    image = _products.gather(_pad(channels, padding), weight.flip([*range(3, 3 + axes)]), of_phases)
    # [M,N,GIR,U] -> [M,N,GI,R,U] -> [M,N,GI,UR] -> [M,N,GI,S]
    image = image.unflatten(2, (-1, *geometry.stride))
    image = image.permute(0, 1, 2, *(i for axis in range(axes) for i in (3 + axes + axis, 3 + axis)))
    for axis, (start, size) in enumerate(zip(starts, space, strict=True)):
        image = image.flatten(3 + axis, 4 + axis).narrow(3 + axis, start, size)
    return image


def correlate(channels: Tensor, image: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the filters: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K]``."""
    image, geometry = _padded(image, geometry)
    return _products.correlate(channels, image, weight, geometry)


def _padded(image: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """The padded image, and the geometry of a convolution that reads it."""
    padding = [pad for pad in reversed(geometry.padding) for _ in range(2)]
    return _pad(image, padding), geometry._replace(padding=[0] * len(geometry.padding))


def _pad(image: Tensor, padding: Sequence[int]) -> Tensor:
    image = F.pad(image, padding)
    # Asking for strides makes a compiler store the tensor; otherwise it would pad again for every window.
    return image.as_strided(image.shape, image.stride()) if max(padding) > 0 else image
