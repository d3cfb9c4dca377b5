"""Operators ``hfta_func::<name>``, which transforms, graphs and compilers call like PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hfta_func import _torch
from hfta_func._torch import has_tangents, is_below_autograd, is_of_many, is_profiled, is_wrapped, num_dispatch_modes

_LIBRARIES: list[torch.library.Library] = []
"""The libraries that define the operators; PyTorch forgets an operator with its library."""

DEFINITIONS: list[tuple[str, Callable[[], Any]]] = []
"""How operators are defined that graphs call, each by how its name begins."""


def is_defined(name: str) -> bool:
    """Whether this process has an operator, which is defined if this package knows how to."""
    for start, define in DEFINITIONS:
        if not hasattr(torch.ops.hfta_func, name) and name.startswith(start):
            define()
    return hasattr(torch.ops.hfta_func, name)


def define_operator(
    schema: str,
    kernels: Mapping[str, Callable[..., Any]],
    *,
    fake: Callable[..., Any] | None = None,
    decomposition: Callable[..., Any] | None = None,
    prepare: Callable[..., Callable[..., Any] | None] | None = None,
) -> Any:
    """Define an operator unless this process has it already, and return it.

    Call this at first use: an import of the package defines nothing.

    Args:
        schema: Name and signature in PyTorch's notation.
        kernels: What runs, by dispatch key.
        fake: Computes outputs of the right shapes and strides; graphs then hold the operator as a whole.
        decomposition: What graphs hold in the operator's stead, below autograd.
        prepare: ``prepare(*args)`` gives a faster kernel for the CPU and tensors that are like these, or None.
    """
    name = schema.partition("(")[0]
    is_new = not hasattr(torch.ops.hfta_func, name)
    if is_new:
        library = torch.library.Library("hfta_func", "FRAGMENT")
        library.define(schema)
        for key, kernel in kernels.items():
            library.impl(name, kernel, key)
        if fake is not None:
            torch.library.register_fake(f"hfta_func::{name}", fake, lib=library)
        _LIBRARIES.append(library)
    operator = getattr(torch.ops.hfta_func, name).default
    if "CPU" in kernels:
        _torch.DIRECT[operator] = kernels["CPU"]
    if prepare is not None:
        _torch.PREPARED[operator] = prepare
    if is_new and decomposition is not None:
        _torch.taken_apart(operator, decomposition)
    return operator


def with_backward(
    title: str, call: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel for autograd of an operator, ``call(*args)``, by a backward pass that is written for it."""

    def below(*args: Any) -> Any:
        # The function disables gradients for its body, but an outer gradient transform still needs them below.
        with _torch.below_autograd(), _torch.without_views(), torch.enable_grad():
            return call(*args)

    differentiated = _differentiated(title, below, setup_context, backward)

    def autograd(*args: Any) -> Any:
        if _requires_grad(args):
            return differentiated(*args)
        # As in every compiled graph, whose gradients are written out: calls are twice as fast without the function.
        with _torch.below_autograd():
            return call(*args)

    return autograd


def directly(
    title: str, forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """What an operator with a backward pass of its own computes, without the dispatcher; see :func:`is_plain`."""
    differentiated = _differentiated(title, forward, setup_context, backward)
    return lambda *args: (differentiated if _requires_grad(args) else forward)(*args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the dispatcher has nothing to do for a call but autograd: no transform, mode, compiler, profiler or device."""
    if num_dispatch_modes() or is_profiled() or has_tangents() or is_below_autograd() or torch.compiler.is_compiling():
        return False
    tensors = (x for x in args if isinstance(x, Tensor))
    return all(type(x) in (Tensor, Parameter) and x.is_cpu and not (is_wrapped(x) or is_of_many(x)) for x in tensors)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _differentiated(title: str, forward: Callable[..., Any], setup_context: Any, backward: Any) -> Callable[..., Any]:
    methods = {"forward": forward, "setup_context": setup_context, "backward": backward}
    function: Any = type(title, (_torch.SingleLevelFunction,), {key: staticmethod(one) for key, one in methods.items()})

    def differentiated(*args: Any) -> Any:
        with _torch.single_level_functions():
            return function.apply(*args)

    return differentiated


def members_in_front(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A batching rule for an operator that takes any number of leading axes: every tensor's model axis moves to the front."""

    def batched(*args: Any) -> Any:
        interpreter = _torch.peek_interpreter()
        level, num_models = interpreter.level(), _torch.VmapInterpreter(interpreter).batchSize()
        with _torch.below_batching():
            pairs = [_torch.unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in args]
            if all(dim is None for _, dim in pairs):
                # Nothing is mapped at this level; an outer level may map.
                return operator(*(x for x, _ in pairs))
            given = (_torch.expand(x, dim, num_models) if isinstance(x, Tensor) else x for x, dim in pairs)
            outputs = operator(*given)
        return _torch.mapped(lambda output: _torch.add_batch_dim(output, 0, level), outputs)

    return batched
