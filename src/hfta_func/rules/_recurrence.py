"""Recurrent layers through time: one batched matrix product per step, forward and backward.

Whatever does not depend on the state is computed for all steps at once; inputs are already multiplied by their weights. In
the backward pass, so is whatever does not depend on the gradient of the state, so that each step multiplies that gradient by
known numbers and by one matrix; the gradient of the weights is a single product over all steps.

Dimension letters: B independent layers (members, times two where there are two directions), T time, N batch, H features of
the state, P of the projected state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules._operator import Operator


def _steps(x: Tensor | None, count: int) -> Any:
    return (None,) * count if x is None else x.unbind(1)


def _lstm_forward(
    base: Tensor, weight: Tensor, h: Tensor, c: Tensor, project: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Long short-term memory (Hochreiter and Schmidhuber, Neural Computation 9(8), 1997; Sak et al., arXiv:1402.1128).

    Args:
        base: The part of the gates i, f, g, o that inputs and biases contribute, ``[B,T,N,4H]``.
        weight: From the state to the gates, ``[B,4H,H]`` or ``[B,4H,P]``.
        h: The state before the first step, ``[B,N,H]`` or ``[B,N,P]``.
        c: The cell before the first step, ``[B,N,H]``.
        project: Weights of the projection, ``[B,P,H]``.
        mask: Where sequences are still running, ``bool[B|1,T,N,1]``; elsewhere the state stays the same.

    Returns:
        States ``[B,T,N,H]`` or ``[B,T,N,P]``, cells ``[B,T,N,H]``, and gates for the backward pass.
    """
    weight, size = weight.mT, c.shape[-1]
    hidden, cells, gates = [], [], []
    for inputs, on in zip(base.unbind(1), _steps(mask, base.shape[1]), strict=True):
        z = torch.baddbmm(inputs, h, weight)
        # One sigmoid of all gates is cheaper than two of some; the one of g is not used.
        i, f, _, o = z.sigmoid().chunk(4, -1)
        next_c = torch.addcmul(f * c, i, z.narrow(-1, 2 * size, size).tanh())
        next_h = o * next_c.tanh()
        if project is not None:
            next_h = torch.bmm(next_h, project.mT)
        h, c = _where(on, next_h, h), _where(on, next_c, c)
        hidden.append(h)
        cells.append(c)
        gates.append(z)
    return torch.stack(hidden, 1), torch.stack(cells, 1), torch.stack(gates, 1)


def _lstm_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:], *output)
    ctx.set_materialize_grads(False)


def _lstm_backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None, grad_z: Tensor | None) -> Any:
    weight, h, c, project, mask, hidden, cells, z = ctx.saved_tensors
    i, f, _, o = z.sigmoid().chunk(4, -1)
    g, tanh = z.chunk(4, -1)[2].tanh(), cells.tanh()
    # dh and dc are the gradients of state and cell after a step, dc without the contribution `a * dh` of the state:
    # (di, df, dg, do, dc before the step) = dc * by_c + dh * by_h
    a = _where(mask, o * (1 - tanh * tanh), 0)
    to_i, to_f = _where(mask, g * i * (1 - i), 0), _where(mask, _before(c, cells) * f * (1 - f), 0)
    to_g, to_o = _where(mask, i * (1 - g * g), 0), _where(mask, tanh * o * (1 - o), 0)
    to_c = _where(mask, f, 1)
    by_c = torch.stack((to_i, to_f, to_g, torch.zeros_like(to_o), to_c), -2)
    by_h = torch.stack((a * to_i, a * to_f, a * to_g, to_o, a * to_c), -2)
    grad_h = torch.zeros_like(hidden) if grad_h is None else grad_h
    rows, projected, dh, dc = _back(weight, by_h, grad_h, grad_z, _rest(mask, h), by_c, grad_c, project)
    grad_project = None if project is None else _product(_where(mask, projected, 0), o * tanh)
    return rows, _product(rows, _before(h, hidden)), dh, dc, grad_project, None


def _gru_forward(base: Tensor, weight: Tensor, h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gated recurrent unit (Cho et al., arXiv:1406.1078): states ``[B,T,N,H]``, and gates for the backward pass.

    ``base`` is ``[B,T,N,4H]``: the contribution of inputs and biases to the gates r and z, the bias of the state's part of n,
    and the input's part of n. ``weight`` leads from the state to r, z and n, ``[B,3H,H]``; the rest is as in the LSTM.
    """
    weight, size = weight.mT, h.shape[-1]
    hidden, gates = [], []
    inputs = zip(*(part.unbind(1) for part in base.split((3 * size, size), -1)), strict=True)
    for (inputs_z, inputs_n), on in zip(inputs, _steps(mask, base.shape[1]), strict=True):
        z = torch.baddbmm(inputs_z, h, weight)
        r, update, _ = z.sigmoid().chunk(3, -1)
        n = torch.addcmul(inputs_n, r, z.narrow(-1, 2 * size, size)).tanh()
        h = _where(on, n.lerp(h, update), h)
        hidden.append(h)
        gates.append(z)
    return torch.stack(hidden, 1), torch.stack(gates, 1)


def _gru_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _gru_backward(ctx: Any, grad_h: Tensor | None, grad_z: Tensor | None) -> Any:
    base, weight, h, mask, hidden, z = ctx.saved_tensors
    r, update = z.sigmoid().chunk(3, -1)[:2]
    inner, before = z.chunk(3, -1)[2], _before(h, hidden)
    n = torch.addcmul(base.chunk(4, -1)[3], r, inner).tanh()
    to_n = _where(mask, (1 - update) * (1 - n * n), 0)
    to_r, to_update = to_n * inner * r * (1 - r), _where(mask, (before - n) * update * (1 - update), 0)
    by_h = torch.stack((_where(mask, to_r, 0), to_update, _where(mask, to_n * r, 0), to_n), -2)
    grad_h = torch.zeros_like(hidden) if grad_h is None else grad_h
    rows, _, dh, _ = _back(weight, by_h, grad_h, grad_z, _where(mask, update, 1))
    return rows, _product(rows.narrow(-1, 0, weight.shape[1]), before), dh, None


def _rnn_forward(base: Tensor, weight: Tensor, h: Tensor, mask: Tensor | None, relu: bool) -> Tensor:
    """Elman network with tanh or relu: ``base`` is ``[B,T,N,H]``, ``weight`` ``[B,H,H]``, the rest as in the LSTM."""
    weight, hidden = weight.mT, []
    for inputs, on in zip(base.unbind(1), _steps(mask, base.shape[1]), strict=True):
        z = torch.baddbmm(inputs, h, weight)
        h = _where(on, z.relu() if relu else z.tanh(), h)
        hidden.append(h)
    return torch.stack(hidden, 1)


def _rnn_context(ctx: Any, inputs: Any, output: Any) -> None:
    *saved, ctx.relu = inputs
    ctx.save_for_backward(*saved[1:], output)


def _rnn_backward(ctx: Any, grad_h: Tensor) -> Any:
    weight, h, mask, hidden = ctx.saved_tensors
    slope = (hidden > 0).to(hidden.dtype) if ctx.relu else 1 - hidden * hidden
    by_h = _where(mask, slope, 0).unsqueeze(-2)
    rows, _, dh, _ = _back(weight, by_h, grad_h, None, _rest(mask, h))
    return rows, _product(rows, _before(h, hidden)), dh, None, None


def _back(
    weight: Tensor, by_h: Tensor, grad_h: Tensor, grad_z: Tensor | None, stays: Tensor | None, *cell: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Backpropagation through time, where each step is linear in the gradients of state and cell.

    Args:
        weight: From the state to the gates, ``[B,GH,P]``.
        by_h: Gradients of the G gates, of the rest of the base, and last of the cell, per unit of gradient of the state:
            ``[B,T,N,K,H]``.
        grad_h: Gradients of the states from outside, ``[B,T,N,P]``.
        grad_z: Gradients of the gates before their activations from outside, ``[B,T,N,GH]``.
        stays: The share of a state that passes unchanged into the next, ``[B,T,N,P]``.
        cell: Of an LSTM, as ``by_h``, per unit of gradient of the cell; gradients of the cells from outside, ``[B,T,N,H]``;
            and weights from the cell's output to the state.

    Returns:
        Gradients of the base ``[B,T,N,(K or K-1)H]``, of the projected states, of the first state, and of the first cell.
    """
    (by_c, grad_c, project), count, size = cell or (None, None, None), by_h.shape[1], by_h.shape[-1]
    width = size * (by_h.shape[-2] - (by_c is not None))
    if grad_z is not None:
        grad_z = F.pad(grad_z, (0, by_h.shape[-2] * size - grad_z.shape[-1]))
    gates, rows, projected = weight.shape[1], [], []
    by_hs, by_cs, stay, outer_z, outer_c = (_steps(x, count) for x in (by_h, by_c, stays, grad_z, grad_c))
    outer_h = grad_h.unbind(1)
    dh, dc = outer_h[-1], outer_c[-1]
    if by_c is not None and dc is None:
        dc = torch.zeros_like(by_h[:, 0, :, 0])
    for t in reversed(range(count)):
        outer = outer_h[t - 1] if t else torch.zeros_like(dh)
        if stays is not None:
            outer = torch.addcmul(outer, dh, stay[t])
        if project is not None:
            projected.append(dh)
            dh = torch.bmm(dh, project)
        # [B,N,1,H] * [B,N,K,H] -> [B,N,KH]
        row = dh.unsqueeze(-2) * by_hs[t]
        if by_c is not None:
            row = torch.addcmul(row, dc.unsqueeze(-2), by_cs[t])
        row = row.flatten(-2)
        if grad_z is not None:
            row = row + outer_z[t]
        if by_c is not None:
            row, dc = row.split((width, size), -1)
            if t and grad_c is not None:
                dc = dc + outer_c[t - 1]
        rows.append(row)
        dh = torch.baddbmm(outer, row if gates == width else row.narrow(-1, 0, gates), weight)
    rows.reverse()
    projected.reverse()
    return torch.stack(rows, 1), torch.stack(projected, 1) if projected else None, dh, dc


def _where(mask: Tensor | None, value: Any, other: Any) -> Any:
    return value if mask is None else torch.where(mask, value, other)


def _rest(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else (~mask).to(like.dtype)


def _before(first: Tensor, states: Tensor) -> Tensor:
    """The state before each step: ``[B,N,H], [B,T,N,H] -> [B,T,N,H]``."""
    return torch.cat((first.unsqueeze(1), states[:, :-1]), 1)


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of weights over all steps at once: ``[B,T,N,O], [B,T,N,I] -> [B,O,TN] @ [B,TN,I] -> [B,O,I]``."""
    return torch.bmm(grad.flatten(1, 2).mT, x.flatten(1, 2))


lstm = Operator(
    "lstm(Tensor base, Tensor weight, Tensor h, Tensor c, Tensor? project, Tensor? mask) -> (Tensor, Tensor, Tensor)",
    *(_lstm_forward, _lstm_context, _lstm_backward),
)
gru = Operator(
    "gru(Tensor base, Tensor weight, Tensor h, Tensor? mask) -> (Tensor, Tensor)",
    *(_gru_forward, _gru_context, _gru_backward),
)
rnn = Operator(
    "rnn(Tensor base, Tensor weight, Tensor h, Tensor? mask, bool relu) -> Tensor",
    *(_rnn_forward, _rnn_context, _rnn_backward),
)


def lowered(operator: Operator, *args: Any) -> Any:
    """Call an operator, under autocast in the lower precision of the products in it, backward pass included."""
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operator(*args)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return operator(*(x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args))
