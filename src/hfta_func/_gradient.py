"""Gradients of all members at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from hfta_func._errors import LossError
from hfta_func._tree import tree_map
from hfta_func._types import Params


def inside_transform() -> bool:
    """Whether a torch.func transform is running around this call."""
    return peek_interpreter_stack() is not None


def can_look(flags: Tensor) -> bool:
    """Whether reading values costs less than computing around them: on a CPU, outside compilation and transforms."""
    return not torch.compiler.is_compiling() and flags.device.type == "cpu" and not inside_transform()


def autocasting(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``dtype``, or nothing; tensors of one member are not cached, as they do not outlive ``vmap``."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def grad_and_aux(params: Params, func: Callable[[Params], tuple[Tensor, Any]]) -> tuple[Params, Any]:
    """Gradient of the first result, and the second result.

    The gradient is taken outside ``vmap``, so that the backward pass is autograd's own on the lowered operators. Eagerly
    that is plain autograd, which is faster than ``torch.func.grad``; compiler and outer transforms know only the latter.
    """
    if torch.compiler.is_compiling() or inside_transform():
        return torch.func.grad(func, has_aux=True)(params)
    leaves = {path: param.detach().requires_grad_() for path, param in params.items()}
    with torch.enable_grad():
        value, aux = func(leaves)
    if not value.requires_grad:
        raise LossError("the loss does not depend on any parameter that requires grad; return what model(...) computed")
    grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), tree_map(torch.Tensor.detach, aux)
