"""Pooling of M members as one pooling with M times the batch or M times the channels.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hfta_func import _torch
from hfta_func.rules._layout import each, fold, split
from hfta_func.rules._registry import Call, Result, register


def _channelwise(op: str, space: int) -> None:
    """A rule for an operator with one input ``[N,C,S]`` or ``[C,S]`` that treats every channel of every sample alike."""
    operator = _torch.operator(op)

    @register(op, "pooling")
    def pool(call: Call, x: Tensor, *options: Any) -> Result:
        """Each channel by itself; the members join the axis that they are next to in memory."""
        # Nothing is copied: [N,M,C,S] -> [N,MC,S], [M,N,C,S] -> [MN,C,S] or [M,C,S] -> [MC,S]
        dim = call.dims[0]
        into = 1 if dim == 1 and x.dim() == space + 3 else 0
        return _split(operator(fold(x, dim, into, call.num_models), *options), into, call.num_models)


for _op, _space in (
    *(("max_pool2d_with_indices", 2), ("max_pool3d_with_indices", 3), ("avg_pool2d", 2), ("avg_pool3d", 3)),
    *(("_adaptive_avg_pool2d", 2), ("_adaptive_avg_pool3d", 3), ("adaptive_max_pool2d", 2), ("adaptive_max_pool3d", 3)),
):
    _channelwise(_op, _space)


def _aligned(op: str) -> None:
    """A rule for an operator whose tensors all start with the same batch or channel axis."""
    operator = _torch.operator(op)

    @register(op, "pooling")
    def pool(call: Call, *args: Any) -> Result:
        """Each channel by itself; the members join the batch, or the channels of a single sample."""
        # [M,N,C,S] -> [MN,C,S] or [M,C,S] -> [MC,S]
        return _split(operator(*each(fold, args, call.dims, 0, call.num_models)), 0, call.num_models)


for _op in ("max_unpool2d", "max_unpool3d", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"):
    _aligned(_op)


def _fractional(op: str, space: int) -> None:
    operator = _torch.operator(op)

    @register(op, "pooling")
    def pool(call: Call, x: Tensor, kernel_size: Any, output_size: Any, samples: Tensor) -> Result:
        """Maxima over windows, whose positions are the samples ``[N,C,2]`` or ``[N,C,3]``."""
        # [M,N,C,S], [M,N,C,2] -> [MN,C,S], [MN,C,2]; a single sample [M,C,S], [M,1,C,2] -> [MC,S], [1,MC,2]
        num_models, (x_dim, *_, samples_dim) = call.num_models, call.dims
        single = x.dim() - (x_dim is not None) == space + 1
        x, samples = fold(x, x_dim, 0, num_models), fold(samples, samples_dim, int(single), num_models)
        return _split(operator(x, kernel_size, output_size, samples), 0, num_models)


for _op, _space in (("fractional_max_pool2d", 2), ("fractional_max_pool3d", 3)):
    _fractional(_op, _space)


def _split(outputs: Any, axis: int, num_models: int) -> Result:
    if isinstance(outputs, Tensor):
        return split(outputs, axis, num_models), axis
    return tuple(split(output, axis, num_models) for output in outputs), (axis,) * len(outputs)
