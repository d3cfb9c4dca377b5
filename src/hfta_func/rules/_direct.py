"""Convolutions of M members by a kernel in C, for any number of channels.

The kernel sums under filters, or the products of two images, which is all that a convolution, its gradients and theirs
consist of. Dimension letters as in :mod:`hfta_func.rules.conv`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import convolution
from hfta_func._kernels.convolution import program
from hfta_func.rules._lowering import Case
from hfta_func.rules._operator import Program
from hfta_func.rules._products import Geometry, transposed_space


def is_possible(case: Case, geometry: Geometry) -> bool:
    """Whether there is a kernel in C, and the sizes are such that PyTorch runs them."""
    (x, weight), exporting = case.shapes, torch.compiler.is_exporting()
    assert x is not None and weight is not None
    if case.device != "cpu" or exporting or len(x) != len(weight) or program(case.dtype) is None:
        return False
    sizes = [*x, *weight, *geometry.stride, *geometry.dilation]
    fits = weight[0] == x[1] if geometry.transposed else weight[1] * geometry.groups == x[1]
    if min(*sizes, *(pad + 1 for pad in geometry.padding)) < 1 or not fits or weight[0] % geometry.groups:
        return False
    if geometry.transposed:
        return min(transposed_space(x[2:], weight[2:], geometry)) > 0
    axes = zip(x[2:], weight[2:], geometry.padding, geometry.dilation, strict=True)
    return all(size + 2 * pad > dilation * (taps - 1) for size, taps, pad, dilation in axes)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, onto: Any, bias: Tensor | None = None) -> Tensor:
    """As :func:`hfta_func.rules._products.convolve`, and with a bias ``[M,GO]`` or, onto a space, ``[M,GI]``."""
    space = onto
    if space is None:
        axes = zip(x.shape[3:], weight.shape[3:], *geometry[:3], strict=True)
        space = [(size + 2 * pad - far * (taps - 1) - 1) // step + 1 for size, taps, step, pad, far in axes]
    return _sums(x, weight, bias, [*space], *geometry[:3], geometry.groups, onto is not None)


def correlate(channels: Tensor, image: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The gradients of the filters and of the channels' bias: ``[M,N,GO,L], [M,N,GI,S] -> [M,GO,I,K], [M,GO]``."""
    return _products(channels, image, [*weight.shape[3:]], *geometry[:3], geometry.groups)


def _sum(x: Tensor, weight: Tensor, bias: Tensor | None, space: Any, *options: Any) -> Tensor:
    return convolution.convolve(x, weight, bias, space, options[:3], *options[3:])


def _fake_sum(x: Tensor, weight: Tensor, bias: Tensor | None, space: Any, *options: Any) -> Tensor:
    *_, groups, scatters = options
    lead = x.shape[: -len(space) - 1]
    return x.new_empty(
        (*lead, groups * weight.shape[-len(space) - 1] if scatters else weight.shape[len(lead) - 1], *space)
    )


def _flops_of_sum(x: Tensor, weight: Tensor, bias: Any, space: Any, *options: Any, out_val: Tensor) -> int:
    small = x if options[-1] else out_val
    return 2 * small.numel() * math.prod(weight.shape[-len(space) - 1 :])


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, space, *ctx.options = inputs
    ctx.axes = len(space)
    ctx.save_for_backward(x, weight)


def _backward_of_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), (*window, groups, scatters), axes = ctx.saved_tensors, ctx.options, ctx.axes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = _sums(grad, weight, None, [*x.shape[-axes:]], *ctx.options[:-1], not scatters) if needs_x else None
    dweight = dbias = None
    if needs_weight:
        sides = (x, grad) if scatters else (grad, x)
        dweight, dbias = _products(*sides, [*weight.shape[-axes:]], *window, groups)
    if needs_bias and (scatters or dbias is None):
        dbias = grad.flatten(-axes).sum((-3, -1))
    return dx, dweight, dbias if needs_bias else None, *(None,) * (len(ctx.options) + 1)


def _product(channels: Tensor, image: Tensor, taps: Any, *options: Any) -> tuple[Tensor, Tensor]:
    return convolution.correlate(channels, image, taps, options[:3], options[3])


def _fake_product(channels: Tensor, image: Tensor, taps: Any, *options: Any) -> tuple[Tensor, Tensor]:
    lead, side = image.shape[: -len(taps) - 2], -len(taps) - 1
    lead = *lead, channels.shape[side]
    return image.new_empty((*lead, image.shape[side] // options[-1], *taps)), image.new_empty(lead)


def _flops_of_product(channels: Tensor, image: Tensor, taps: Any, *options: Any, out_val: Any) -> int:
    return 2 * channels.numel() * math.prod(out_val[0].shape[-len(taps) - 1 :])


def _keep_product(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    channels, image, _, *ctx.options = inputs
    ctx.save_for_backward(channels, image)


def _backward_of_product(ctx: Any, grad: Tensor, of_bias: Tensor) -> tuple[Tensor | None, ...]:
    (channels, image), axes = ctx.saved_tensors, len(ctx.options[0])
    dchannels = dimage = None
    if ctx.needs_input_grad[0]:
        # What is summed up into a bias gets its gradient everywhere, as of a bias.
        dchannels = _sums(image, grad, of_bias, [*channels.shape[-axes:]], *ctx.options, False)
    if ctx.needs_input_grad[1]:
        dimage = _sums(channels, grad, None, [*image.shape[-axes:]], *ctx.options, True)
    return dchannels, dimage, *(None,) * (len(ctx.options) + 1)


_WINDOW = "int[] stride, int[] padding, int[] dilation, int groups"
_sums = Program(
    f"direct_sums(Tensor x, Tensor weight, Tensor? bias, SymInt[] space, {_WINDOW}, bool scatters) -> Tensor",
    *(_sum, _keep_sum, _backward_of_sum, _fake_sum),
    flops=_flops_of_sum,
    opaque=True,
)
_products = Program(
    f"direct_products(Tensor channels, Tensor image, SymInt[] taps, {_WINDOW}) -> (Tensor, Tensor)",
    *(_product, _keep_product, _backward_of_product, _fake_product),
    flops=_flops_of_product,
    opaque=True,
)
