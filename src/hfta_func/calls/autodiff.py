"""Gradients that a loss function takes itself, such as gradient penalties.

A step differentiates outside of ``vmap``: the tensor inside the wrapper of each level has a history, the wrapper has none.
So autograd is called with the tensors inside.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func.calls.body import Diverged, running_body
from hfta_func.errors import TraceError

rehearsing = contextvars.ContextVar("rehearsing", default=False)
"""Whether a step runs eagerly just before a compiler traces it."""

_OPTIONS = "retain_graph create_graph only_inputs allow_unused is_grads_batched materialize_grads".split()


def only_vmap() -> bool:
    """Whether every transform around this call is a ``vmap``."""
    return all(interpreter.key() == _torch.TransformType.Vmap for interpreter in _torch.interpreters() or ())


def requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """``tensor.requires_grad_(requires_grad)``, of the tensor inside where a loss in a step calls it."""
    if torch.compiler.is_compiling():
        return tensor.requires_grad_(requires_grad)
    if (body := running_body()) is not None:
        parameters = {id(getattr(x, "trained", x)) for x in body.parameters()}
        if id(getattr(tensor, "trained", tensor)) in parameters:
            return body.set_requires_grad(tensor, requires_grad)
    if (only_vmap() or not _torch.is_batched(tensor)) and not _must_unwrap():
        return tensor.requires_grad_(requires_grad)
    with _torch.outside_transforms():
        _torch.inside_vmap(tensor).requires_grad_(requires_grad)
    return tensor


def _register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """``tensor.register_hook(hook)``, which calls the hook with the members' gradients."""
    if not only_vmap() or not _torch.is_batched(tensor):
        return tensor.register_hook(hook)
    interpreter = _torch.current_interpreter()
    level, count, randomness = interpreter.level(), interpreter.batch_size(), interpreter.randomness()
    inside, dim = _torch.unwrap_batched(tensor, level)

    def call(grad: Tensor) -> Any:
        with _torch.vmap_level(count, randomness) as level:
            result = hook(_torch.add_batch_dim(grad, dim, level))
            return None if result is None else _torch.remove_batch_dim(result, level, count, dim)

    with interpreter.lower():
        return _register_hook(inside, call)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy without a history, as ``copy.deepcopy`` makes it of a parameter."""
    if not _torch.is_batched(tensor) and tensor.is_leaf:
        return tensor.__deepcopy__(memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _set_data(tensor: Tensor, value: Tensor) -> None:
    # One that changes nothing is a cast to the dtype that it has; others PyTorch refuses under vmap.
    before, after = _torch.inside_vmap(tensor), _torch.inside_vmap(value)
    if before.dtype != after.dtype or before.shape != after.shape or not _torch.is_alias(before, after):
        tensor.data = value


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **options: Any) -> Any:
    """``torch.autograd.grad`` of each member's outputs by its inputs."""
    # A tensor that torch.func differentiates has a history at its level.
    has_history = any(isinstance(output, Tensor) and output.requires_grad for output in _sequence(outputs))
    options |= dict(zip(_OPTIONS, rest, strict=False))
    if (has_history and _torch.inside_transform()) or not _must_unwrap():
        return torch.autograd.grad(outputs, inputs, grad_outputs, **options)
    if options.get("is_grads_batched") and _torch.inside_transform():
        raise Diverged(None) from TraceError("torch.autograd.grad(is_grads_batched=True) is a vmap in autograd")
    outputs, inputs = _sequence(outputs), _sequence(inputs)
    starts = [None] * len(outputs) if grad_outputs is None else _sequence(grad_outputs)
    # Outside, the members' scalars, of any number of dimensions, are many, for which autograd has no default start.
    starts = [torch.ones_like(y) if x is None and y.numel() == 1 else x for x, y in zip(starts, outputs, strict=True)]
    return _outside_vmap(outputs, starts, inputs, options)


def _outside_vmap(outputs: Any, starts: Any, inputs: Any, options: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad(outputs, inputs, starts, **options)`` of each member, outside all levels of ``vmap``."""
    if _torch.interpreters() is None:
        return torch.autograd.grad(outputs, inputs, starts, **options)
    interpreter = _torch.current_interpreter()
    level, count = interpreter.level(), interpreter.batch_size()
    (outputs, starts, inputs), dims = _torch.unwrap_leaves((tuple(outputs), tuple(starts), tuple(inputs)), level)
    # A view of what has a history has one, too, also where the model takes a gradient under no_grad.
    with interpreter.lower(), torch.enable_grad():
        if not any(dim is not None for dim in (*dims[0], *dims[1], *dims[2])):
            return _outside_vmap(outputs, starts, inputs, options)
        outputs = [_torch.expand(x, dim, count) for x, dim in zip(outputs, dims[0], strict=True)]
        starts = [x if x is None else _torch.expand(x, dim, count) for x, dim in zip(starts, dims[1], strict=True)]
        mapped = [x for x, dim in zip(inputs, dims[2], strict=True) if dim is not None]
        shared = [x for x, dim in zip(inputs, dims[2], strict=True) if dim is None]
        # A shared tensor would get the sum of the members' gradients, so each member is differentiated alone. In later calls
        # each has its own.
        if shared and (body := running_body()) is not None:
            body.differentiates_shared = True
        retained = options | {"retain_graph": True}
        ways = enumerate([retained] * (count - 1) + [retained if mapped else options] if shared else [])
        rows = [_outside_vmap(outputs, [_only(member, start) for start in starts], shared, how) for member, how in ways]
        grads = iter(_outside_vmap(outputs, starts, mapped, options) if mapped else ())
        stacked = iter(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))
    pairs = [(next(stacked), 0) if dim is None else (next(grads), dim) for dim in dims[2]]
    return tuple(grad if grad is None else _torch.add_batch_dim(grad, dim, level) for grad, dim in pairs)


def _only(member: int, start: Tensor | None) -> Tensor | None:
    """The rows ``[M, ...]`` of a start, with zeros for all members but one."""
    if start is None:
        return None
    chosen = torch.arange(start.shape[0], device=start.device) == member
    return torch.where(chosen.view(-1, *(1,) * (start.dim() - 1)), start, 0)


def _must_unwrap() -> bool:
    """Whether a loss in a step calls autograd, which must then see the tensors inside; torch.func.grad does so by itself."""
    compiling = torch.compiler.is_compiling()
    is_seen = compiling or only_vmap()
    if compiling or (is_seen and rehearsing.get()):
        raise TraceError(
            "the loss asks autograd for a gradient (requires_grad_, torch.autograd.grad), which a compiler does not know; "
            "take it with torch.func.grad(func)(input), or leave the step uncompiled"
        )
    return is_seen


def _sequence(tensors: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


AUTODIFF: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _grad,
    Tensor.register_hook: _register_hook,
    Tensor.requires_grad_: requires_grad_,
    Tensor.requires_grad.__get__: lambda tensor: _torch.inside_vmap(tensor).requires_grad,  # pyright: ignore
    Tensor.requires_grad.__set__: requires_grad_,  # pyright: ignore
    Tensor.is_leaf.__get__: lambda tensor: _torch.inside_vmap(tensor).is_leaf,  # pyright: ignore
    Tensor.__deepcopy__: _deepcopy,
    # Alone, a parameter is a view of the leaf.
    Tensor.grad.__get__: lambda tensor: tensor.grad if tensor.is_leaf else None,  # pyright: ignore
    Tensor.grad_fn.__get__: lambda tensor: _torch.inside_vmap(tensor).grad_fn,  # pyright: ignore
    # A write into .data is not counted, which vmap has no way to do.
    Tensor.data.__get__: lambda tensor: tensor.detach() if _torch.is_batched(tensor) else tensor.data,  # pyright: ignore
    Tensor.data.__set__: _set_data,  # pyright: ignore
    _torch.takes_data: lambda param, value: True,
}
"""Replacement by function."""
