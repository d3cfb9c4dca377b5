"""Recurrent layers of M members.

The table chooses between two lowerings:

- ``batched``: on a CPU a program in C for each direction of each layer; without a compiler, in graphs, and for what the
  program cannot do, one matrix product of the inputs of all time steps with their weights, then one batched matrix product a
  step for all members, and for both directions if there are two;
- ``loop``: PyTorch's layers, one member after another.

If all members share the weights, their samples join one batch instead. Dimension letters: M models, T time, N batch,
L layers, D directions, I features in, G gates, H features of the state, R rows of a packed sequence.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._kernels import recurrent
from hfta_func._torch import has_native_lstm, has_tangents, num_dispatch_modes
from hfta_func.calls.rewrites import LOWERED
from hfta_func.errors import RandomnessError
from hfta_func.rules import _choice, _direction
from hfta_func.rules._direction import Value, Weights
from hfta_func.rules._layout import each, expand, fold, split
from hfta_func.rules._registry import FRONT, Call, Result, Rule, register


def _register(kind: str) -> None:
    """The rules of one kind of layer: for sequences of equal length, for packed sequences, and for a single step."""

    def padded(call: Call, x: Tensor, hx: Any, params: list[Tensor], *options: Any) -> Result:
        """One product for the inputs of all steps, then one batched product a step."""
        return _sequences(kind, call, x, None, hx, params, *options)

    def packed(call: Call, x: Tensor, batch_sizes: Tensor, hx: Any, params: list[Tensor], *options: Any) -> Result:
        """The same on padded sequences; the state of a sequence stays the same after its end."""
        call.require_shared(1, "batch_sizes")
        call = call._replace(dims=(call.dims[0], *call.dims[2:]))
        return _sequences(kind, call, x, batch_sizes, hx, params, *options, False)

    def step(call: Call, x: Tensor, hx: Any, *params: Tensor | None) -> Result:
        """One step: a product for the inputs and one for the states."""
        return _single(kind, call, x, hx, params)

    register(f"{kind}.input", "recurrent", FRONT, _otherwise(padded, ()))(padded)
    register(f"{kind}.data", "recurrent", FRONT, _otherwise(packed, (1,)))(packed)
    register(f"{kind}_cell", "recurrent", FRONT, _otherwise(step, ()))(step)
    LOWERED[getattr(torch, kind)] = functools.partial(_of_one_model, getattr(torch, kind), padded)


_PROGRAM = "program"
"""The lowering of a call that nothing but the program in C may run."""


def _of_one_model(func: Callable[..., Any], rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's function; in an array of one, which runs without ``vmap``, the program where it can, without a model axis."""
    is_packed = len(args) > 3 and isinstance(args[3], (list, tuple))
    if is_packed or kwargs or torch.compiler.is_compiling() or _torch.inside_transform() or _choice.state:
        return func(*args, **kwargs)
    dims = (len(one) * (0,) if isinstance(one, (list, tuple)) else None if one is None else 0 for one in args)
    result = rule(Call(1, tuple(dims), {}, _PROGRAM), *args)
    return func(*args) if result is NotImplemented else result[0]


def _otherwise(rule: Rule, shared: tuple[int, ...]) -> Callable[..., Any]:
    """The layer as an array of one, for gradients and jvp of ``torch.func``, inside ``vmap`` or not.

    PyTorch would decompose it into kernels without a batching rule or jvp, or into writes to tensors that members share.
    Arguments at positions ``shared`` never have a model axis.
    """

    def array_of_one(*args: Any) -> Any:
        values, dims = [], []
        for position, value in enumerate(args):
            if isinstance(value, Tensor) and position not in shared:
                value, dim = value.unsqueeze(0), 0
            elif isinstance(value, (list, tuple)):
                value, dim = [x.unsqueeze(0) for x in value], (0,) * len(value)
            else:
                dim = None
            values.append(value)
            dims.append(dim)
        outputs, dims = rule(Call(1, tuple(dims), {}, "batched"), *values)
        if isinstance(outputs, Tensor):
            return outputs.squeeze(dims)
        return tuple(output.squeeze(dim) for output, dim in zip(outputs, dims, strict=True))

    return array_of_one


for _kind in recurrent.KINDS:
    _register(_kind)


def _sequences(
    kind: str, call: Call, x: Tensor, batch_sizes: Tensor | None, hx: Any, params: list[Tensor], *options: Any
) -> Result:
    _, num_layers, dropout, train, *_ = options
    if train and dropout and num_layers > 1:
        if call.lowering == _PROGRAM:
            return NotImplemented
        raise RandomnessError(
            f"torch.{kind} draws the dropout between its layers from PyTorch's global generator; call it inside a step or "
            f"functional(model)(..., key=), where each member draws from its own key"
        )
    if batch_sizes is None and _are_shared(call.dims[2]):
        # [M,N,T,I] -> [MN,T,I] or [T,M,N,I] -> [T,MN,I], and as much in the results
        axis = 0 if options[-1] else 1
        return _joined(f"{kind}.input", call, axis, 1, x, hx, params, *options)
    # Under autocast on a GPU, cuDNN's layers run in float16, whatever the precision is.
    is_cudnn = x.is_cuda and torch.is_autocast_enabled("cuda") and torch.backends.cudnn.is_acceptable(x)
    with torch.autocast("cuda", torch.float16) if is_cudnn else contextlib.nullcontext():
        return _layers(kind, call, x, batch_sizes, hx, params, *options)


def _layers(
    kind: str, call: Call, x: Tensor, batch_sizes: Tensor | None, hx: Any, params: list[Tensor], *options: Any
) -> Result:
    has_biases, num_layers, _, _, bidirectional, batch_first = options
    num_models, dims = call.num_models, call.dims
    param_dims: Any = dims[2]
    inputs, directions = _direction.value(x, dims[0]), 1 + bidirectional
    states = each(expand, *_states(hx, dims[1]), num_models)
    values = list(map(_direction.value, params, param_dims))
    weights = _grouped(values, has_biases, num_layers * directions)
    mask = positions = None
    if batch_sizes is not None:
        # [M,R,I] -> [M,TN,I] -> [M,T,N,I]
        sources, positions, mask = _padding(batch_sizes, inputs.tensor.shape[-2], states[0].shape[2], x.device)
        selected = inputs.tensor.index_select(-2, sources)
        inputs = inputs._replace(tensor=selected.unflatten(-2, mask.shape[1:3]))
    # [M,N,T,I] -> [M,T,N,I]
    steps = inputs._replace(tensor=inputs.tensor.transpose(-3, -2)) if batch_first else inputs
    is_native = mask is None and _direction.is_native(kind, steps, weights, directions, states)
    if is_native:
        inputs = steps
    elif call.lowering == _PROGRAM:
        return NotImplemented
    is_fused = kind == "lstm" and batch_sizes is None and weights[0].project is None and has_native_lstm(x.dtype)
    finals: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        span = slice(layer * directions, (layer + 1) * directions)
        # [M,D,N,H]
        first = [state[..., span, :, :] for state in states]
        if is_native:
            output, ends = _direction.run(kind, inputs, weights[span], first, num_models)
            finals += ends
            inputs = Value(output, 0)
            continue
        bases = [_direction.gates_of_inputs(kind, inputs, one, num_models) for one in weights[span]]
        if batch_first and layer == 0:
            # [M,N,T,GH] -> [M,T,N,GH]; after the product, so that the inputs keep their memory layout.
            bases = [base.transpose(1, 2) for base in bases]
        if bases[0].shape[1] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        # [M,D,N,H] -> [DM,N,H]
        first = [state.transpose(0, 1).flatten(0, 1) for state in first]
        after = _direction.through_time(kind, bases, first, weights[span], mask, is_fused)
        # [DM,T,N,H] -> [DM,N,H] -> D times [M,N,H]
        finals += zip(*(one[:, -1].unflatten(0, (directions, num_models)) for one in after), strict=True)
        output = after[0]
        if bidirectional:
            forward, backward = output.chunk(2)
            output = torch.cat((forward, backward.flip(1)), -1)
        inputs = Value(output, 0)
    # A copy unless it is one already: a model may write its output, and the backward pass needs the states.
    # Not in a graph captured for XLA, which would copy the states before they are computed.
    captured = num_dispatch_modes() and x.device.type == "xla"
    is_copy = bidirectional or positions is not None or captured
    output = inputs.tensor if is_copy else inputs.tensor.clone()
    if positions is not None:
        output = output.flatten(1, 2).index_select(1, positions)
    elif batch_first:
        output = output.transpose(-3, -2)
    # [M,LD,N,H]
    joined = tuple(torch.stack(column, -3) for column in zip(*finals, strict=True))
    return (output, *joined), (0,) * (1 + len(joined))


def _padding(batch_sizes: Tensor, rows: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each padded position ``[TN]`` its packed row, for each row ``[R]`` its position, and the mask of positions in use.

    No value is read, so that a graph is valid for all packings of the same shapes.
    """
    steps = torch.arange(batch_sizes.shape[0])
    ends = batch_sizes.cumsum(0)
    starts, sample = ends - batch_sizes, torch.arange(batch)
    sources = (starts.unsqueeze(1) + sample).clamp(max=rows - 1).flatten()
    row = torch.arange(rows)
    step = torch.searchsorted(ends, row, right=True)
    positions = row + (steps * batch - starts).index_select(0, step)
    mask = (sample < batch_sizes.unsqueeze(1))[None, :, :, None]
    return sources.to(device), positions.to(device), mask.to(device)


def _single(kind: str, call: Call, x: Tensor, hx: Any, params: tuple[Tensor | None, ...]) -> Result:
    num_models, (x_dim, hx_dims, *dims) = call.num_models, call.dims
    if _are_shared(dims):
        return _joined(f"{kind}_cell", call, 0, 0, x, hx, *params)
    values: Any = (None if p is None else _direction.value(p, dim) for p, dim in zip(params, dims, strict=True))
    weights = Weights(*values)
    inputs = _direction.value(x, x_dim)
    # [M,N,I] -> [M,1,N,I] -> [M,1,N,H] -> [M,N,H]
    inputs = inputs._replace(tensor=inputs.tensor.unsqueeze(-3))
    states = each(expand, *_states(hx, hx_dims), num_models)
    if _direction.is_native(kind, inputs, [weights], 1, states):
        # [M,N,H] -> [M,1,N,H]
        first = [state.unsqueeze(1) for state in states]
        _, (results,) = _direction.run(kind, inputs, [weights], first, num_models)
    else:
        base = _direction.gates_of_inputs(kind, inputs, weights, num_models)
        after = _direction.through_time(kind, [base], states, [weights], None, False)
        results = [y.squeeze(1).clone() for y in after]
    return (tuple(results), (0, 0)) if kind == "lstm" else (results[0], 0)


def _are_shared(dims: Any) -> bool:
    return all(dim is None for dim in dims) and not has_tangents()


def _joined(op: str, call: Call, axis: int, state_axis: int, x: Tensor, hx: Any, *rest: Any) -> Result:
    """A layer whose weights all members share: their samples join one batch, at these axes of inputs and states."""
    states = each(fold, *_states(hx, call.dims[1]), state_axis, call.num_models)
    given = states if isinstance(hx, (tuple, list)) else states[0]
    outputs = _torch.operator(op)(fold(x, call.dims[0], axis, call.num_models), given, *rest)
    if isinstance(outputs, Tensor):
        return split(outputs, axis, call.num_models), axis
    axes = axis, *(state_axis for _ in outputs[1:])
    return tuple(map(split, outputs, axes, (call.num_models,) * len(axes))), axes


def _grouped(params: list[Any], has_biases: bool, count: int) -> list[Weights]:
    """PyTorch's flat list of parameters, by layer and direction."""
    size = len(params) // count
    groups = (params[start : start + size] for start in range(0, len(params), size))
    middle = slice(2, 4 if has_biases else 2)
    return [Weights._make((*g[:2], *(g[middle] or (None, None)), g[-1] if size % 2 else None)) for g in groups]


def _states(hx: Any, dims: Any) -> tuple[Any, Any]:
    """Both states of an LSTM, or the single state of other layers, and their model axes."""
    return (hx, dims) if isinstance(dims, tuple) else ((hx,), (dims,))


@register("_pack_padded_sequence", "recurrent")
def pack(call: Call, x: Tensor, lengths: Tensor, batch_first: bool) -> Result:
    """Packing, with the model axis behind the axes of time and batch."""
    # [T,N,M,...] -> [R,M,...]
    call.require_shared(1, "lengths")
    return torch.ops.aten._pack_padded_sequence.default(x.movedim(call.dims[0], 2), lengths, batch_first), (1, None)


@register("_pack_padded_sequence_backward", "recurrent")
def pack_backward(call: Call, grad: Tensor, size: list[int], batch_sizes: Tensor, batch_first: bool) -> Result:
    """Gradient of packing."""
    # [R,M,...] -> [T,N,M,...]
    call.require_shared(2, "batch_sizes")
    grad, size = grad.movedim(call.dims[0], 1), [*size[:2], call.num_models, *size[2:]]
    return torch.ops.aten._pack_padded_sequence_backward.default(grad, size, batch_sizes, batch_first), 2


@register("_pad_packed_sequence", "recurrent")
def pad(call: Call, x: Tensor, batch_sizes: Tensor, *options: Any) -> Result:
    """Padding, the inverse of :func:`pack`."""
    # [R,M,...] -> [T,N,M,...]
    call.require_shared(1, "batch_sizes")
    return torch.ops.aten._pad_packed_sequence.default(x.movedim(call.dims[0], 1), batch_sizes, *options), (2, None)
