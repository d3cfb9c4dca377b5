"""An operator of one's own, with a batching rule: rows of a matrix times numbers, shifted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hfta_func as hfta

torch.library.define("strangers::shifted", "(Tensor x, Tensor weight, float by) -> Tensor")


@torch.library.impl("strangers::shifted", "CompositeExplicitAutograd")
def shifted(x: Tensor, weight: Tensor, by: float) -> Tensor:
    """One member's: ``[N, D], [D] -> [N, D]``."""
    return x * weight + by


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum(0), None


torch.library.register_autograd("strangers::shifted", _backward, setup_context=_setup)
torch.library.register_fake("strangers::shifted", lambda x, weight, by: torch.empty_like(x))


@hfta.rules.register("strangers::shifted")
def rule(call: hfta.rules.Call, x: Tensor, weight: Tensor, by: float) -> tuple[Tensor, int]:
    """All members at once."""
    # [M,N,D], [M,D] -> [M,N,D]
    x, weight = (hfta.rules.expand(one, dim, call.num_models) for one, dim in zip((x, weight), call.dims, strict=False))
    return x * weight.unsqueeze(1) + by, 0


op = torch.ops.strangers.shifted
