"""Pooling of M members as one pooling with M times the batch or M times the channels.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._kernels import programs
from hfta_func._torch import has_tangents
from hfta_func.rules._layout import each, fold, split
from hfta_func.rules._operator import Program, runs_programs
from hfta_func.rules._registry import Call, Result, filled, register_each, register_looped


@register_each(
    "pooling",
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d"),
    *("_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)
def pool(operator: Any, call: Call, x: Tensor, *options: Any) -> Result:
    """Each channel of an input ``[N,C,S]`` or ``[C,S]`` by itself; the members join the axis next to theirs in memory."""
    # Nothing is copied: [N,M,C,S] -> [N,MC,S], [M,N,C,S] -> [MN,C,S] or [M,C,S] -> [MC,S]
    dim = call.dims[0]
    into = 1 if dim == 1 and x.dim() == (5 if "2d" in operator.name() else 6) else 0
    x = fold(x, dim, into, call.num_models)
    windows = _fast_windows(operator, x, options)
    return _split(operator(x, *options) if windows is None else _max_pool(x, *windows), into, call.num_models)


def _fast_windows(operator: Any, x: Tensor, options: Any) -> list[list[int]] | None:
    """The options of a maximum that the kernel computes, each for two axes; None if PyTorch's does."""
    is_plain = x.is_contiguous() and 0 < x.numel() < 2**31
    if "max_pool2d_with" not in operator.name() or not is_plain or not runs_programs(x, programs.pooling):
        return None
    taps, stride, pad, dilation, ceil_mode = filled(options, None, [], [0], [1], False)
    if ceil_mode:
        return None
    windows = [[*option] * (2 // len(option)) for option in (taps, stride or taps, pad, dilation)]
    axes = list(zip(x.shape[-2:], *windows, strict=True))
    # What PyTorch refuses is left to it.
    is_valid = all(min(count, step, far) > 0 <= pad <= count // 2 for _, count, step, pad, far in axes)
    is_valid = is_valid and all(size + 2 * pad > far * (count - 1) for size, count, _, pad, far in axes)
    return windows if is_valid else None


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    x, *ctx.windows = inputs
    ctx.save_for_backward(x, outputs[1])
    ctx.mark_non_differentiable(outputs[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, places = ctx.saved_tensors
    if has_tangents():
        dx = _torch.operator("max_pool2d_with_indices_backward")(grad, x, *ctx.windows, False, places)
    else:
        dx = _max_pool_backward(grad, places, [*x.shape[-2:]])
    return dx, None, None, None, None


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (places,) = ctx.saved_tensors
    return grad.flatten(-2).gather(-1, places.flatten(-2)).view_as(places), None, None


_max_pool = Program(
    "max_pool2d(Tensor x, int[] taps, int[] stride, int[] padding, int[] dilation) -> (Tensor, Tensor)",
    *(programs.max_pool, _keep, _backward),
    fake=lambda x, *windows: torch.ops.aten.max_pool2d_with_indices(x, *windows),
)
_max_pool_backward = Program(
    "max_pool2d_backward(Tensor grad, Tensor places, int[] space) -> Tensor",
    programs.max_pool_backward,
    lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    _backward_of_backward,
    fake=lambda grad, places, space: grad.new_empty((*grad.shape[:-2], *space)),
)


@register_each("pooling", "max_unpool2d", "max_unpool3d")
def unpool(operator: Any, call: Call, *args: Any) -> Result:
    """Each channel by itself; the members join the batch of all tensors, or the channels of a single sample."""
    # [M,N,C,S] -> [MN,C,S] or [M,C,S] -> [MC,S]
    return _split(operator(*each(fold, args, call.dims, 0, call.num_models)), 0, call.num_models)


for _name in ("fractional_max_pool2d", "fractional_max_pool3d"):
    register_looped("pooling", _name, f"{_name}_backward")


def _split(outputs: Any, axis: int, num_models: int) -> Result:
    if isinstance(outputs, Tensor):
        return split(outputs, axis, num_models), axis
    return tuple(split(output, axis, num_models) for output in outputs), (axis,) * len(outputs)
