"""Branches on values, ``if tensor`` or ``x.item()``, while members run as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import TransformType, current_interpreter, peek_interpreter, unwrap_batched, unwrap_for_grad

_DERIVATIVES = TransformType.Grad, TransformType.Jvp


class Diverged(RuntimeError):
    """Members cannot run as one: ``sides[i]`` is the side of a branch that member ``i`` takes; None if each runs alone."""

    def __init__(self, sides: list[bool] | None):
        # PyTorch's message, from which :mod:`hfta_func.rules.vmap` makes a TraceError if members cannot run in groups.
        super().__init__("data-dependent control flow")
        self.sides = sides


def _below_derivatives(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """``read(x)`` below the derivatives inside a ``vmap``, in which members still have values of their own."""

    def below(x: Tensor) -> Any:
        interpreter = peek_interpreter()
        if torch.compiler.is_compiling() or interpreter is None or interpreter.key() not in _DERIVATIVES:
            return read(x)
        with current_interpreter().lower():
            return below(unwrap_for_grad(x, interpreter.level()))

    return below


@_below_derivatives
def item(x: Tensor) -> Any:
    """``x.item()``: the value that all members agree on, such as that of a counter; of a bool it is a branch."""
    if x.dtype == torch.bool or not _is_mapped() or x.numel() != 1:
        return truth(x) if x.dtype == torch.bool and _is_mapped() else x.item()
    interpreter = current_interpreter()
    values, dim = unwrap_batched(x, interpreter.level())
    with interpreter.lower():
        if dim is None or bool((values == values.select(dim, 0).unsqueeze(dim)).all()):
            return item(values if dim is None else values.select(dim, 0))
    # Raises PyTorch's error.
    return x.item()


def _is_mapped() -> bool:
    interpreter = peek_interpreter()
    is_mapped = interpreter is not None and interpreter.key() == TransformType.Vmap
    return is_mapped and not torch.compiler.is_compiling()


@_below_derivatives
def truth(x: Tensor) -> bool:
    """``bool(x)``: the value that all members agree on, else an error that makes them run in groups."""
    if not _is_mapped():
        return bool(x)
    interpreter = current_interpreter()
    values, dim = unwrap_batched(x, interpreter.level())
    if dim is None:
        return bool(x)
    with interpreter.lower():
        if values.numel() != values.shape[dim]:
            # Raises PyTorch's error.
            return bool(values.select(dim, 0))
        flags = values.flatten().bool()
        # Only one number is read, because each read waits until the device has finished its work.
        count = int(flags.sum())
        if 0 < count < len(flags):
            raise Diverged([bool(flag) for flag in flags.unbind()])
    return count > 0


BRANCHES: dict[Any, Any] = {
    **{Tensor.__bool__: truth, Tensor.item: item},
    **{Tensor.__float__: lambda x: float(item(x)), Tensor.__int__: lambda x: int(item(x))},
}
"""Replacement by function."""
