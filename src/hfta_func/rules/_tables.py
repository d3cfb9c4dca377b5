"""Rows of tables of M members, by their numbers: one operator, whose gradient is itself the other way round.

Dimension letters: M models, X and Y rows, K moves, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import programs
from hfta_func.rules._layout import rows_of
from hfta_func.rules._operator import Program, runs_programs

_NOWHERE = -(2**62)
"""The row of padding where there is none; any other that is missing is refused."""


def take(x: Tensor, index: Tensor, padding: int = -1) -> Tensor:
    """Rows by their numbers: ``[M,X,D], [M,K] -> [M,K,D]``; the row ``padding`` gets no gradient."""
    return _move(x, None, index, None, None, index.shape[-1], padding if padding >= 0 else _NOWHERE)


def add(start: Tensor | None, index: Tensor, source: Tensor, rows: int) -> Tensor:
    """Rows added to those with these numbers: ``[M,Y,D], [M,K], [M,K,D] -> [M,Y,D]``; to zeros if there is no ``start``."""
    return _move(source, start, None, index, None, rows, _NOWHERE)


def sums(x: Tensor, source: Tensor, target: Tensor, weight: Tensor | None, rows: int) -> Tensor:
    """Rows of one table added to those of another: ``[M,X,D], [M,K], [M,K] -> [M,Y,D]``."""
    return _move(x, None, source, target, weight, rows, _NOWHERE)


def is_fast(x: Tensor) -> bool:
    """Whether there is a kernel, and this call may use it."""
    return runs_programs(x, programs.tables)


def _forward(x: Tensor, start: Any, source: Any, target: Any, weight: Any, rows: int, padding: int) -> Tensor:
    if is_fast(x):
        return programs.move_rows(x, start, source, target, weight, rows, padding)
    if source is not None:
        # [M,X,D], [M,K] -> [MX,D], [MK] -> [MK,D] -> [M,K,D]
        x = x.flatten(0, 1).index_select(0, rows_of(source, x.shape[1]).flatten()).unflatten(0, source.shape)
    if weight is not None:
        x = x * weight.unsqueeze(-1)
    if target is None:
        return x
    y = x.new_zeros((x.shape[0], rows, x.shape[2])) if start is None else start
    x = torch.where((target == padding).unsqueeze(-1), 0, x) if padding >= 0 else x
    return y.flatten(0, 1).index_add(0, rows_of(target, rows).flatten(), x.flatten(0, 1)).view_as(y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *indices, _, ctx.padding = inputs
    ctx.rows = x.shape[-2]
    ctx.save_for_backward(*indices)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    source, target, weight = ctx.saved_tensors
    dx = _move(grad, None, target, source, weight, ctx.rows, ctx.padding) if ctx.needs_input_grad[0] else None
    if dx is not None and target is not None and ctx.padding >= 0:
        dx = dx.masked_fill((target == ctx.padding).unsqueeze(-1), 0)
    return dx, grad if ctx.needs_input_grad[1] else None, None, None, None, None, None


def _fake(x: Tensor, start: Any, source: Any, target: Any, weight: Any, rows: int, padding: int) -> Tensor:
    return x.new_empty((*x.shape[:-2], rows, x.shape[-1]))


_move = Program(
    "move_rows(Tensor x, Tensor? start, Tensor? source, Tensor? target, Tensor? weight, SymInt rows, int padding) -> Tensor",
    *(_forward, _keep, _backward, _fake),
)
