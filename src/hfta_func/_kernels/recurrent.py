"""One direction of a recurrent layer, through all steps, by the program in ``recurrent.c``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_KEPT = 5, 4, 1, 1
"""What is kept of a sample at a step for the backward pass, in states."""


def program(dtype: torch.dtype | None) -> Any:
    """The functions for a type of numbers; None if there are none, or they cannot be compiled."""
    # A sum of products is as exact with fused operations, and the same for every member.
    return native.load_file("recurrent", dtype, "forward:ppn backward:ppn", ("-ffp-contract=fast",))


def forward(
    x: Tensor, wx: Tensor, wh: Tensor, bx: Tensor | None, bh: Tensor | None, h: Tensor, c: Tensor | None, kind: int,
    reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All states ``[M,T,N,H]``, the last state and cell, and what the backward pass needs; M may be several axes.

    Inputs are ``[M,T,N,I]``, weights ``[M,GH,I]`` and ``[M,GH,H]``, biases ``[M,GH]``, states ``[M,N,H]``.
    """
    results = made(x, h, c, kind)
    x = _rows(x)
    given = [x, *(one if one is None else one.contiguous() for one in (wx, wh, bx, bh, h, c))]
    _run("forward", given, (x, None, None), h, kind, reverse, results)
    return results


def made(x: Tensor, h: Tensor, c: Tensor | None, kind: int) -> tuple[Tensor, ...]:
    """The results of :func:`forward`, to be written."""
    states, kept = (x.new_empty((*x.shape[:-1], count * h.shape[-1])) for count in (1, _KEPT[kind]))
    return states, h.new_empty(h.shape), h.new_empty(0 if c is None else c.shape), kept


def backward(
    x: Tensor, wx: Tensor, wh: Tensor, h: Tensor, c: Tensor | None, states: Tensor, kept: Tensor, grad: Tensor | None,
    of_h: Tensor | None, of_c: Tensor | None, kind: int, reverse: bool, needs_x: bool, has_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of inputs, weights, biases, state and cell, of which there are none where they are not needed."""
    results = gradients(x, wx, wh, h, c, needs_x, has_bias)
    x, grad = _rows(x), None if grad is None else _rows(grad)
    given = [one if one is None else one.contiguous() for one in (wx, wh, h, c, states, kept)]
    ends = [one if one is None else one.contiguous() for one in (of_h, of_c)]
    strided = x, grad, results[0] if needs_x else None
    _run("backward", [x, *given, grad, *ends], strided, h, kind, reverse, results)
    return results


def gradients(
    x: Tensor, wx: Tensor, wh: Tensor, h: Tensor, c: Tensor | None, needs_x: bool, has_bias: bool
) -> tuple[Tensor, ...]:
    """The results of :func:`backward`, to be written."""
    bias = wx.shape[:-1] if has_bias else 0
    shapes = x.shape if needs_x else 0, wx.shape, wh.shape, bias, bias, h.shape, 0 if c is None else c.shape
    return tuple(x.new_empty(shape) for shape in shapes)


def _run(name: str, given: Any, strided: Any, h: Tensor, kind: int, reverse: bool, made: Any) -> None:
    """Run a function; ``strided`` are the inputs and, if there are any, the gradients of states and of inputs."""
    x = strided[0]
    strides = (number for one in strided for number in ((0, 0, 0) if one is None else (0, *one.stride())[-4:-1]))
    numbers = kind, x.shape[:-3].numel(), *x.shape[-3:], h.shape[-1], reverse, *strides
    # No tensor and one without elements are null.
    pointers = [0 if one is None else one.data_ptr() for one in (*given, *made)]
    native.check_memory(native.call(getattr(program(x.dtype), name), native.packed(numbers), native.packed(pointers)))


def _rows(x: Tensor) -> Tensor:
    """Leading axes as one view, and numbers of a row contiguous."""
    is_view = x.stride(-1) == 1 and (x.dim() <= 4 or x.is_contiguous())
    return x if is_view else x.contiguous()
