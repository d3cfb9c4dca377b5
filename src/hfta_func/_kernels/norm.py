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
    """Rows ``[M,N,D]`` with scale and shift ``[M,D]``, and mean and 1 / deviation ``[M,N,2]``; D is ``axes`` axes."""
    given = x.contiguous(), scale.contiguous(), shift.contiguous()
    made = torch.empty_like(given[0]), x.new_empty((*x.shape[:-axes], 2))
    _run("layer_norm", x, scale, axes, *given, struct.pack("d", eps), *made)
    return made


def layer_norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, stats: Tensor, axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, scale and shift."""
    given = [one.contiguous() for one in (grad, x, scale, stats)]
    made = torch.empty_like(given[1]), torch.empty_like(given[2]), torch.empty_like(given[2])
    _run("layer_norm_backward", x, scale, axes, *given, *made)
    return made


def _run(name: str, x: Tensor, scale: Tensor, axes: int, *arguments: Tensor | bytes) -> None:
    models, width = scale.shape[:-axes].numel(), scale.shape[-axes:].numel()
    sizes = models, x.numel() // max(1, models * width), width
    pointers = (one if isinstance(one, bytes) else one.data_ptr() for one in arguments)
    getattr(program(x.dtype), name)(*sizes, *pointers, torch.get_num_threads())
