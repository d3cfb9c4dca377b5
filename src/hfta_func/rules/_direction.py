"""One direction of a recurrent layer of M members: by one operator in C, or by tensor operations.

Dimension letters as in :mod:`hfta_func.rules.recurrent`; B is M, times two where two directions run side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func._kernels import recurrent
from hfta_func._torch import has_tangents
from hfta_func.rules import _recurrence
from hfta_func.rules._layout import expand, models_first
from hfta_func.rules._operator import Program, runs_programs


class Value(NamedTuple):
    """A tensor and its model axis, which is 0 or None."""

    tensor: Tensor
    dim: int | None


class Weights(NamedTuple):
    """Parameters of one direction of one layer: ``[GH,I]``, ``[GH,H]``, ``[GH]`` twice, and the projection's ``[P,H]``."""

    inputs: Value
    state: Value
    input_bias: Value | None = None
    state_bias: Value | None = None
    project: Value | None = None


def value(x: Tensor, dim: int | None) -> Value:
    return Value(models_first(x, dim), None if dim is None else 0)


def gates_of_inputs(kind: str, x: Value, weights: Weights, num_models: int) -> Tensor:
    """The part of the gates from inputs and biases: ``[M,T,N,I], [M,GH,I] -> [M,T,N,GH]``, as :mod:`_recurrence` takes it."""
    biases = weights.input_bias, weights.state_bias
    per_member = any(bias is not None and bias.dim is not None for bias in biases)
    input_bias, state_bias = (
        None if bias is None else expand(*bias, num_models) if per_member else bias.tensor for bias in biases
    )
    if kind != "gru":
        bias = input_bias if state_bias is None else state_bias if input_bias is None else input_bias + state_bias
        return _product(x, weights.inputs, bias, per_member, num_models)
    # The reset gate multiplies the state's bias of n, so it is kept apart.
    size = weights.state.tensor.shape[-1]
    inner = x.tensor.new_zeros(1)
    if state_bias is not None:
        outer, inner = state_bias.split((2 * size, size), -1)
        outer = F.pad(outer, (0, size))
        input_bias = outer if input_bias is None else input_bias + outer
    base = _product(x, weights.inputs, input_bias, per_member, num_models)
    gates, new = base.split((2 * size, size), -1)
    inner = (inner[:, None, None] if per_member else inner).to(new.dtype).expand_as(new)
    return torch.cat((gates, inner, new), -1)


def _product(x: Value, weight: Value, bias: Tensor | None, per_member: bool, num_models: int) -> Tensor:
    """``[M,T,N,I], [M,O,I] -> [M,T,N,O]``."""
    if weight.dim is None:
        y = F.linear(x.tensor, weight.tensor, None if per_member else bias)
        return y + bias[:, None, None] if per_member and bias is not None else expand(y, x.dim, num_models)
    biases = None if bias is None else expand(bias, 0 if per_member else None, num_models)
    if x.dim is None:
        # [TN,I], [I,MO] -> [TN,MO] -> [T,N,M,O] -> [M,T,N,O]
        rows, wide = x.tensor.flatten(0, 1), weight.tensor.flatten(0, 1).t()
        y = torch.mm(rows, wide) if biases is None else torch.addmm(biases.flatten(), rows, wide)
        return y.unflatten(1, (num_models, weight.tensor.shape[1])).unflatten(0, x.tensor.shape[:2]).movedim(2, 0)
    rows, weights = x.tensor.flatten(1, 2), weight.tensor.mT
    y = torch.bmm(rows, weights) if biases is None else torch.baddbmm(biases.unsqueeze(1), rows, weights)
    return y.unflatten(1, x.tensor.shape[1:3])


def through_time(
    kind: str, bases: list[Tensor], states: list[Tensor], weights: list[Weights], mask: Tensor | None, is_fused: bool
) -> tuple[Tensor, ...]:
    """One layer: bases ``[M,T,N,GH]`` and weights of each direction -> states ``[DM,T,N,H]``, and cells of an LSTM.

    The direction that runs backward takes and returns its steps in reverse order, next to the other direction.
    """
    base, num_models = bases[0], bases[0].shape[0]
    if len(bases) == 2:
        base = torch.cat((base, bases[1].flip(1)))
        if mask is not None:
            mask = torch.cat([one.expand(num_models, -1, -1, -1) for one in (mask, mask.flip(1))])
    weight = _side_by_side([one.state for one in weights], num_models)
    project = None if weights[0].project is None else _side_by_side([one.project for one in weights], num_models)
    if kind == "lstm":
        after = _recurrence.lowered(_recurrence.lstm, base, weight, states[0], states[1], project, mask)[:2]
    elif kind == "gru":
        after = _recurrence.lowered(_recurrence.gru, base, weight, states[0], mask)[:1]
    else:
        after = (_recurrence.lowered(_recurrence.rnn, base, weight, states[0], mask, kind == "rnn_relu"),)
    if base.device.type == "cpu" and not is_fused and kind in ("lstm", "gru"):
        # Under autocast, PyTorch's step-by-step path on the CPU accumulates in the precision of the first state.
        kept = torch.promote_types(states[-1].dtype, after[-1].dtype)
        after = tuple(y if project is not None and y is after[0] else y.to(kept) for y in after)
    return after


def _side_by_side(values: list[Any], num_models: int) -> Tensor:
    """The weights of all directions, as if they belonged to further members."""
    rows = [expand(value.tensor, value.dim, num_models) for value in values]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def is_native(kind: str, x: Value, weights: list[Weights], directions: int, states: list[Tensor]) -> bool:
    """Whether the program in C runs layers with these weights: members have their own, and all are of one type.

    What does not fit together is left to PyTorch, which says so.
    """
    size, width, dtype = states[0].shape[-1], x.tensor.shape[-1], x.tensor.dtype
    gates = {"lstm": 4, "gru": 3}.get(kind, 1) * size
    given = [(state, (x.tensor.shape[-2], size)) for state in states]
    for index, one in enumerate(weights):
        shapes = (gates, width if index < directions else directions * size), (gates, size), (gates,), (gates,)
        given += [(part.tensor, shape) for part, shape in zip(one[:4], shapes, strict=True) if part is not None]
        if one.project is not None or any(part is not None and part.dim is None for part in one):
            return False
    is_alike = all(one.dtype == dtype and one.shape[-len(shape) :] == shape for one, shape in given)
    has_steps = x.tensor.shape[-3] > 0 and not torch.is_autocast_enabled("cpu")
    return is_alike and has_steps and runs_programs(x.tensor, recurrent.program)


def run(
    kind: str, x: Value, weights: list[Weights], states: list[Tensor], num_models: int
) -> tuple[Tensor, list[list[Tensor]]]:
    """Both directions of a layer, or one, by the program.

    Inputs ``[M,T,N,I]`` and states ``[M,D,N,H]`` -> all states ``[M,T,N,DH]``, and of each direction the last state and cell.
    """
    outputs, ends, index = [], [], recurrent.KINDS.index(kind)
    for direction, one in enumerate(weights):
        parameters = [None if part is None else part.tensor for part in one[:4]]
        h, c = (*(state.select(-3, direction) for state in states), None)[:2]
        output, *last = _operator(expand(*x, num_models), *parameters, h, c, index, direction == 1)
        outputs.append(output)
        ends.append(last[: len(states)])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1), ends


def _composed(kind: str, reverse: bool, *given: Tensor | None) -> tuple[Tensor, ...]:
    """The same in tensor operations, which have all derivatives."""
    assert given[0] is not None
    lead = given[0].shape[:-3]
    flat = [None if one is None else one.reshape(lead.numel(), *one.shape[len(lead) :]) for one in given]
    x, *parameters = (None if one is None else Value(one, 0) for one in flat[:5])
    assert x is not None
    if reverse:
        x = x._replace(tensor=x.tensor.flip(1))
    weights = Weights(*parameters)  # pyright: ignore[reportArgumentType]
    base = gates_of_inputs(kind, x, weights, lead.numel())
    states: Any = [one for one in flat[5:] if one is not None]
    after = through_time(kind, [base], states, [weights], None, True)
    results = after[0].flip(1) if reverse else after[0], *(one[:, -1] for one in after)
    return tuple(one.reshape(*lead, *one.shape[1:]) for one in results)


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    *tensors, ctx.kind, ctx.reverse = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(outputs[3])
    ctx.save_for_backward(*tensors, outputs[0], outputs[3])


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, states, kept = ctx.saved_tensors
    x, wx, wh, bx, _, h, c = inputs
    if not torch.is_grad_enabled() and not has_tangents():
        tensors = x, wx, wh, h, c, states, kept, *grads[:3]
        results = _backward(*tensors, ctx.kind, ctx.reverse, ctx.needs_input_grad[0], bx is not None)
        return *(None if one is None else grad for one, grad in zip(inputs, results, strict=True)), None, None
    given = [one for one in inputs if one is not None]

    def outputs(*leaves: Tensor) -> list[Tensor]:
        left = iter(leaves)
        parts = (one if one is None else next(left) for one in inputs)
        results = _composed(recurrent.KINDS[ctx.kind], ctx.reverse, *parts)
        return [one for one, grad in zip(results, grads, strict=False) if grad is not None]

    pulled = iter(torch.func.vjp(outputs, *given)[1]([grad for grad in grads if grad is not None]))
    return *(one if one is None else next(pulled) for one in inputs), None, None


def _flops(x: Tensor, wx: Tensor, wh: Tensor, *_: Any, out_val: Any = None) -> int:
    return 2 * x.shape[-3:-1].numel() * (wx.numel() + wh.numel())


_operator = Program(
    "recurrent(Tensor x, Tensor wx, Tensor wh, Tensor? bx, Tensor? bh, Tensor h, Tensor? c, int kind, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    *(recurrent.forward, _keep, _gradients),
    fake=lambda x, wx, wh, bx, bh, h, c, kind, _: recurrent.made(x, h, c, kind),
    flops=_flops,
)
_backward = Program(
    "recurrent_backward(Tensor x, Tensor wx, Tensor wh, Tensor h, Tensor? c, Tensor states, Tensor kept, Tensor? grad, "
    "Tensor? of_h, Tensor? of_c, int kind, bool reverse, bool needs_x, bool has_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # Whoever needs its derivative does not call it.
    *(recurrent.backward, lambda *_: None, lambda *_: None),
    fake=lambda x, wx, wh, h, c, *rest: recurrent.gradients(x, wx, wh, h, c, *rest[-2:]),
    flops=lambda x, wx, wh, *_, out_val: _flops(x, wx, wh) + _flops(x, wx if out_val[0].numel() else wx[:0], wh),
)
