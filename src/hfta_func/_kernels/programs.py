"""Programs in files of C beside this one: layer normalisation, cross entropy, maxima over windows, and rows of tables.

For a type of numbers, :func:`norm`, :func:`losses`, :func:`pooling` and :func:`tables` give the functions of their files, or
None, where there are none or they cannot be compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


def norm(dtype: torch.dtype) -> Any:
    """Layer normalisation with scale and shift of each member."""
    return native.load_file("norm", dtype, "layer_norm:nnnppppppn layer_norm_backward:nnnpppppppn")


def losses(dtype: torch.dtype) -> Any:
    """Cross entropy, for which PyTorch takes short rows number by number, and writes three tables of the logits' size."""
    return native.load_file("losses", dtype, "cross_entropy:nnppnppn cross_entropy_backward:nnpppnppn")


def pooling(dtype: torch.dtype) -> Any:
    """Maxima over windows, to the bits of PyTorch's, whose kernel takes one number at a time."""
    return native.load_file("pooling", dtype, "max_pool:ppppn max_pool_backward:nnnpppn")


def tables(dtype: torch.dtype) -> Any:
    """Rows of tables taken, added to and summed, without sorting them."""
    return native.load_file("tables", dtype, "move_rows:nnnpnpnpnpnpnnn")


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, axes: int, eps: float) -> tuple[Tensor, Tensor]:
    """Rows ``[M,N,D]`` with scale and shift ``[M,D]``, and mean and 1 / deviation ``[M,N,2]``; D is ``axes`` axes."""
    given = x.contiguous(), scale.contiguous(), shift.contiguous()
    made = torch.empty_like(given[0]), x.new_empty((*x.shape[:-axes], 2))
    _norm("layer_norm", x, scale, axes, *given, struct.pack("d", eps), *made)
    return made


def layer_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, stats: Tensor, axes: int) -> tuple[Tensor, ...]:
    """The gradients of rows, scale and shift."""
    given = [one.contiguous() for one in (grad, x, scale, stats)]
    made = torch.empty_like(given[1]), torch.empty_like(given[2]), torch.empty_like(given[2])
    _norm("layer_norm_backward", x, scale, axes, *given, *made)
    return made


def _norm(name: str, x: Tensor, scale: Tensor, axes: int, *arguments: Tensor | bytes) -> None:
    models, width = scale.shape[:-axes].numel(), scale.shape[-axes:].numel()
    sizes = models, x.numel() // max(1, models * width), width
    native.call(getattr(norm(x.dtype), name), *sizes, *arguments)


def cross_entropy(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Losses of rows ``[...,C]`` with classes ``[...]``, and of each its largest number and the sum of exp(x - that)."""
    x, target, lead = x.contiguous(), target.contiguous(), x.shape[:-1]
    loss, stats = x.new_empty(lead), x.new_empty((*lead, 2))
    given = lead.numel(), x.shape[-1], x, target, ignore_index, loss, stats
    if native.call(losses(x.dtype).cross_entropy, *given):
        wrong = (target != ignore_index) & ((target < 0) | (target >= x.shape[-1]))
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    return loss, stats


def cross_entropy_backward(
    grad: Tensor, x: Tensor, target: Tensor, stats: Tensor, ignore_index: int, into: Tensor
) -> Tensor:
    """The gradient of contiguous rows, in the memory of ``into``, which may be theirs."""
    given = grad.contiguous(), x, target.contiguous(), ignore_index, stats, into
    native.call(losses(x.dtype).cross_entropy_backward, grad.numel(), x.shape[-1], *given)
    return into


def max_pool(
    x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Maxima over windows of an image with two axes, and their places in it."""
    windows = zip(x.shape[-2:], taps, stride, padding, dilation, strict=True)
    space = [(size + 2 * pad - far * (count - 1) - 1) // step + 1 for size, count, step, pad, far in windows]
    y, places = (x.new_empty((*x.shape[:-2], *space), dtype=dtype) for dtype in (x.dtype, torch.int64))
    geometry = native.packed((x.shape[:-2].numel(), *x.shape[-2:], *space, *taps, *stride, *padding, *dilation))
    native.check_memory(native.call(pooling(x.dtype).max_pool, geometry, x.contiguous(), y, places))
    return y, places


def max_pool_backward(grad: Tensor, places: Tensor, space: Sequence[int]) -> Tensor:
    """The gradient of an image with two axes from that of its maxima."""
    dx = grad.new_empty((*grad.shape[:-2], *space))
    size, outputs = space[0] * space[1], grad.shape[-2] * grad.shape[-1]
    given = dx.numel() // size, size, outputs, grad.contiguous(), places.contiguous(), dx
    native.call(pooling(grad.dtype).max_pool_backward, *given)
    return dx


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
    indices = [None if one is None else _rows(one) for one in (source, target, weight)]
    moves = x.shape[-2] if source is None and target is None else (source if target is None else target).shape[-1]  # pyright: ignore
    places = [place for one in indices for place in ((None, 0) if one is None else (one, one.stride(0)))]
    given = lead.numel(), moves, width, x.contiguous(), x.shape[-2], y, rows, *places, padding
    if native.call(tables(x.dtype).move_rows, *given):
        raise IndexError("index out of range in self")
    return y


def _rows(index: Tensor) -> Tensor:
    index = index.flatten(0, -2)
    return index if index.stride(1) == 1 or index.shape[1] == 1 else index.contiguous()
