"""Autograd functions (``torch.autograd.Function``) of members: one program for all, in eager code and in compiled graphs.

A function without a batching rule is written anew with one that PyTorch generates: all that its backward pass needs is among
the results of its forward pass. In a graph, the compiler itself would differentiate the operators of a forward pass, because
under ``vmap`` no tensor seems to require a gradient; so a graph holds the call as a whole until its operators are captured.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import Diverged
from hfta_func.calls.copies import copied_with_tensors
from hfta_func.calls.made import making_for_each
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed
from hfta_func.errors import TraceError


def inside_array() -> bool:
    """Whether the code of a member is running in this thread."""
    return any(isinstance(mode, lowered | routed) for mode in _torch.function_modes())


def applied() -> contextlib.AbstractContextManager[None]:
    """A context in which the autograd functions of models are applied as this module does."""
    return _torch.apply_replaced(_apply)


def _apply(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``function.apply(*args, **kwargs)``."""
    if inside_array():
        # Its backward pass runs when a module that it is given holds other tensors.
        args, kwargs = pytree.tree_map(copied_with_tensors, (args, kwargs))
    if _torch.peek_interpreter() is None:
        return original(function, *args, **kwargs)
    if _torch.is_derivative_of_operator():
        # PyTorch writes the derivatives of custom operators as autograd functions.
        return _torch.apply_at_level(function, *args, **kwargs)
    is_old = function.setup_context is Function.setup_context
    bound = inspect.signature(function.forward).bind(*(None,) * is_old, *args, **kwargs)
    if not is_old:
        bound.apply_defaults()
    args, is_exporting = bound.args[is_old:], torch.compiler.is_exporting()
    if function.vmap is not Function.vmap or (function.generate_vmap_rule and not is_exporting):
        return _torch.apply_in_transforms(function, *args, **bound.kwargs)
    if is_exporting:
        # An exported program holds the forward pass alone, also that of an ordinary model.
        return _pass_forward(function, args)[-1]
    *outputs, call = _with_rule(function).apply(*args)
    outputs = outputs[: call.count]
    for i, j in call.written:
        args[i].copy_(outputs[j])
        outputs[j] = args[i]
    return outputs[0] if call.is_single else tuple(outputs)


def _pass_forward(function: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    ctx: Any = FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(x, Tensor) and _torch.inside_vmap(x).requires_grad for x in given)
    # A function may write its arguments.
    args = tuple(x.clone() if isinstance(x, Tensor) else x for x in given)
    if function.setup_context is Function.setup_context:
        return ctx, args, function.forward(ctx, *args)
    output = function.forward(*args)
    function.setup_context(ctx, args, output)
    return ctx, args, output


@functools.cache
def _with_rule(function: Any) -> Any:
    """The same function, with all that its backward pass needs among its results, so that PyTorch can batch it."""

    def forward(*args: Any) -> Any:
        ctx, args, output = making_for_each(lambda: _pass_forward(function, args), args)
        outputs = output if isinstance(output, tuple) else (output,)
        # What is kept is an argument or a result, so that it has a history if the backward pass is differentiated.
        positions = {id(x): i for i, x in reversed([*enumerate((*outputs, *args))])}
        leaves, spec = pytree.tree_flatten(vars(ctx))
        others = [x for x in leaves if isinstance(x, Tensor) and id(x) not in positions]
        positions |= {id(x): len(outputs) + len(args) + i for i, x in enumerate(others)}
        call = types.SimpleNamespace(
            count=len(outputs),
            is_single=outputs is not output,
            leaves=[positions[id(x)] if isinstance(x, Tensor) else (x,) for x in leaves],
            spec=spec,
            materializes=getattr(ctx, "materialize_grads", True),
            written=[
                (i, positions[id(x)]) for x in getattr(ctx, "dirty_tensors", ()) for i, y in enumerate(args) if x is y
            ],
            constant=[positions[id(x)] for x in getattr(ctx, "non_differentiable", ())],
        )
        return (*outputs, *others, call)

    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        *results, call = outputs
        tensors = [*results[: call.count], *inputs, *results[call.count :]]
        ctx.save_for_backward(*(tensors[leaf] for leaf in call.leaves if isinstance(leaf, int)))
        ctx.set_materialize_grads(call.materializes)
        ctx.call = call

    def backward(ctx: Any, *grads: Any) -> Any:
        call, saved, inner = ctx.call, iter(ctx.saved_tensors), types.SimpleNamespace()
        leaves = [next(saved) if isinstance(leaf, int) else leaf[0] for leaf in call.leaves]
        vars(inner).update(pytree.tree_unflatten(leaves, call.spec))
        inner.saved_tensors, inner.needs_input_grad = getattr(inner, "to_save", ()), ctx.needs_input_grad
        grads = tuple(grad * 0 if j in call.constant and grad is not None else grad for j, grad in enumerate(grads))
        differentiate = function.vjp if function.backward is Function.backward else function.backward
        try:
            return differentiate(inner, *grads[: call.count])
        except RuntimeError as error:
            # Such as one that calls autograd or reads values: members run one by one.
            raise error if rehearsing.get() else Diverged(None) from error

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    members = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (Function,), {**members, "generate_vmap_rule": True})


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """A block in which the compiler puts the functions of members into graphs."""

    def call(before: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _torch.inside_transform():
            return before(self, tx, args, kwargs)
        try:
            # PyTorch keeps no such graph on disk: code that a function calls may have changed.
            return _torch.in_graph(self, tx, _node(self.fn_cls), args, kwargs)
        except Exception as error:
            raise TraceError(
                f"the autograd function {self.fn_cls.__qualname__} cannot be compiled: in a compiled step a function takes "
                f"tensors and plain values only, reads no values of tensors, and draws no random numbers; leave the step "
                f"uncompiled, or draw and read outside of the function"
            ) from error

    with _torch.trace_functions(call):
        yield


@functools.cache
def _node(function: Any) -> Any:
    """What graphs call for ``function.apply``; its results there are tensors or None, and constants are left apart."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        outputs = function.apply(*args, **kwargs)
        if isinstance(outputs, Tensor):
            return outputs
        node.constants = {j: output for j, output in enumerate(outputs) if not isinstance(output, Tensor | None)}
        return tuple(None if j in node.constants else output for j, output in enumerate(outputs))

    node: Any = apply
    node.constants, node.__name__ = {}, f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    # PyTorch compares graphs by pickles, which must find it here.
    node.__qualname__ = node.__name__
    globals()[node.__name__] = node
    return node
