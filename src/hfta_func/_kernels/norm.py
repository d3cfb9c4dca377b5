"""Layer normalisation with scale and shift of each member by the program in ``norm.c``."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native


def program(dtype: torch.dtype) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    return native.load_file(__file__, dtype, "layer_norm:nnnppppppn layer_norm_backward:nnnpppppppn")


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, axes: int, eps: float) -> tuple[Tensor, Tensor]:
    """Rows ``[M,N,D]`` with scale and shift ``[M,D]``, and mean and 1 / deviation ``[M,N,2]``; ``axes`` is the number of axes D."""
    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    y, stats = torch.empty_like(x), x.new_empty((*x.shape[:-axes], 2))
    pointers = (one.data_ptr() for one in (x, scale, shift))
    program(x.dtype).layer_norm(
        *_sizes(x, scale, axes),
        *pointers,
        struct.pack("d", eps),
        y.data_ptr(),
        stats.data_ptr(),
        torch.get_num_threads(),
    )
    return y, stats


def layer_norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, stats: Tensor, axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, scale and shift."""
    given = [one.contiguous() for one in (grad, x, scale, stats)]
    made = torch.empty_like(given[1]), torch.empty_like(given[2]), torch.empty_like(given[2])
    pointers = (one.data_ptr() for one in (*given, *made))
    program(x.dtype).layer_norm_backward(*_sizes(x, scale, axes), *pointers, torch.get_num_threads())
    return made


def _sizes(x: Tensor, scale: Tensor, axes: int) -> tuple[int, int, int]:
    models, width = scale.shape[:-axes].numel(), scale.shape[-axes:].numel()
    return models, x.numel() // max(1, models * width), width
