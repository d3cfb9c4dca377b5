"""Gradients of all members at once, and whether they are finite."""

from __future__ import annotations

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


def all_finite(leaves: list[Tensor]) -> Tensor:
    """Which members have only finite values in all leaves ``[M, ...]``: ``bool[M]``."""
    if can_look(leaves[0]) and bool(torch.stack([leaf.sum() for leaf in leaves]).isfinite().all()):
        # Nothing infinite and no NaN can have gone into a finite sum.
        return torch.ones(leaves[0].shape[0], dtype=torch.bool)
    # In float64, sums of narrower values do not overflow. One reduction at the end, so that the compiler computes the
    # flags once and not for every leaf that reads them.
    sums = [leaf.reshape(leaf.shape[0], -1).sum(1, dtype=torch.float64) for leaf in leaves]
    return torch.stack(sums).isfinite().all(0)


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
