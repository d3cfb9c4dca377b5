"""Autograd functions in compiled graphs: one program for all members.

The compiler itself would take a forward pass apart and differentiate its operators, because under ``vmap`` no tensor seems to
require a gradient. So a graph holds the call as a whole until its operators are captured, by the batching rule of the function
or, if it has none, by one that runs both passes under ``vmap``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hfta_func import _torch
from hfta_func._torch import pytree


def trace() -> Any:
    """Make the compiler put the functions of members into graphs; returns how it has traced them before."""

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _torch.inside_transform():
            return before(self, tx, args, kwargs)
        return _torch.in_graph(tx, _node(self.fn_cls), args, kwargs)

    before = _torch.trace_functions(call)
    return before


@functools.cache
def _node(function: Any) -> Any:
    """What graphs call for ``function.apply``; graphs have results that are tensors or None, and constants apart."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        outputs = function.apply(*args, **kwargs)
        if isinstance(outputs, Tensor):
            return outputs
        node.constants = {j: output for j, output in enumerate(outputs) if not isinstance(output, Tensor | None)}
        return tuple(None if j in node.constants else output for j, output in enumerate(outputs))

    node: Any = apply
    node.constants = {}
    return node


def apply_to_all(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function without a rule while a graph is captured."""
    is_old = function.setup_context is Function.setup_context
    bound = inspect.signature(function.forward).bind(*(None,) * is_old, *args, **kwargs)
    if not is_old:
        bound.apply_defaults()
    args = bound.args[is_old:]
    *outputs, call = _with_rule(function).apply(*args)
    outputs = outputs[: call.count]
    for i, j in call.written:
        args[i].copy_(outputs[j])
        outputs[j] = args[i]
    return outputs[0] if call.is_single else tuple(outputs)


class _Call:
    """What a forward pass leaves on its ``ctx``, without tensors: their positions among results, arguments and others."""

    def __init__(self, ctx: Any, args: tuple[Any, ...], output: Any):
        outputs = output if isinstance(output, tuple) else (output,)
        self.count, self.is_single = len(outputs), output is not outputs
        tensors = [*outputs, *args]
        leaves, self._spec = pytree.tree_flatten(vars(ctx))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not any(leaf is x for x in tensors):
                tensors.append(leaf)
        self.others = tensors[len(outputs) + len(args) :]
        positions = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        self._leaves = [positions[id(leaf)] if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        self._kept = sorted({leaf for leaf in self._leaves if isinstance(leaf, int)})
        self._materializes = getattr(ctx, "materialize_grads", True)
        given = {id(x): i for i, x in enumerate(args)}
        self.written = [(given[id(x)], positions[id(x)]) for x in getattr(ctx, "dirty_tensors", ())]
        self._constant = [positions[id(x)] for x in getattr(ctx, "non_differentiable", ())]

    def keep(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Keep the tensors for the backward pass."""
        tensors = [*outputs[: self.count], *inputs, *outputs[self.count :]]
        ctx.save_for_backward(*(tensors[position] for position in self._kept))
        ctx.set_materialize_grads(self._materializes)
        ctx.call = self

    def context(self, ctx: Any) -> Any:
        """The ``ctx`` that the function has left, with these tensors."""
        tensors = dict(zip(self._kept, ctx.saved_tensors, strict=True))
        leaves = [tensors[leaf] if isinstance(leaf, int) else leaf[0] for leaf in self._leaves]
        own: Any = FunctionCtx()
        vars(own).update(pytree.tree_unflatten(leaves, self._spec))
        own.saved_tensors, own.needs_input_grad = getattr(own, "to_save", ()), ctx.needs_input_grad
        return own

    def grads(self, grads: tuple[Any, ...]) -> list[Any]:
        """The gradients of the function's own results."""
        mine = list(grads[: self.count])
        for j in self._constant:
            mine[j] = mine[j] if mine[j] is None else mine[j] * 0
        return mine


@functools.cache
def _with_rule(function: Any) -> Any:
    """The same function, with everything that its backward pass needs among its results, so that PyTorch can batch it."""

    def forward(*args: Any) -> Any:
        # A function may write its arguments.
        args = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
        ctx: Any = FunctionCtx()
        ctx.needs_input_grad = tuple(isinstance(x, Tensor) and x.dtype.is_floating_point for x in args)
        if function.setup_context is Function.setup_context:
            output = function.forward(ctx, *args)
        else:
            output = function.forward(*args)
            function.setup_context(ctx, args, output)
        call = _Call(ctx, args, output)
        others, call.others = call.others, []
        return (*((output,) if call.is_single else output), *others, call)

    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        outputs[-1].keep(ctx, inputs, outputs[:-1])

    def backward(ctx: Any, *grads: Any) -> Any:
        differentiate = function.vjp if function.backward is Function.backward else function.backward
        return differentiate(ctx.call.context(ctx), *ctx.call.grads(grads))

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    members = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (Function,), {**members, "generate_vmap_rule": True})
