"""Branches on values, ``if tensor``, while members run as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import TransformType, current_interpreter, peek_interpreter, unwrap_batched


class Diverged(RuntimeError):
    """Members take different sides of a branch; ``sides[i]`` is the truth value of member ``i``."""

    def __init__(self, sides: list[bool]):
        # PyTorch's message, from which :mod:`hfta_func.rules.vmap` makes a TraceError if members cannot run in groups.
        super().__init__("data-dependent control flow")
        self.sides = sides


def contains(x: Tensor, element: Any) -> bool:
    """``element in x``."""
    if not isinstance(element, (Tensor, int, float, complex)):
        return element in x
    return truth((x == element).any())


def truth(x: Tensor) -> bool:
    """``bool(x)``: the value that all members agree on, else an error that makes them run in groups."""
    interpreter = peek_interpreter()
    if interpreter is None or interpreter.key() != TransformType.Vmap or torch.compiler.is_compiling():
        return bool(x)
    values, dim = unwrap_batched(x, interpreter.level())
    if dim is None:
        return bool(x)
    with current_interpreter().lower():
        if values.numel() != values.shape[dim]:
            # Raises PyTorch's error.
            return bool(values.select(dim, 0))
        flags = values.flatten().bool()
        # Only one number is read, because each read waits until the device has finished its work.
        count = int(flags.sum())
        if 0 < count < len(flags):
            raise Diverged([bool(flag) for flag in flags.unbind()])
    return count > 0
