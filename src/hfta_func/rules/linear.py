"""Linear layers and matrix products of M members: one batched product, or one wide product if the input is shared.

Dimension letters: M models, B any leading axes, P rows, I and O features in and out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules._layout import align, each, fold, models_first, split
from hfta_func.rules._operator import Operator
from hfta_func.rules._registry import FRONT, Call, Result, register, register_looped


def _decomposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` as PyTorch decomposes it under transforms."""
    if bias is not None and x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # [M,1,O] + [M,P,I], [M,I,O] -> [M,P,O]
    weight = weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(x, weight)
    if torch.compiler.is_compiling():
        # A compiler adds the bias in the kernel of whatever follows; the product would start from a copy of it.
        return torch.bmm(x, weight) + bias.unsqueeze(1)
    return torch.baddbmm(bias.unsqueeze(1), x, weight)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    # [M,O,P] @ [M,P,I] -> [M,O,I]
    dweight = torch.bmm(grad.transpose(1, 2), x) if of_weight else None
    return torch.bmm(grad, weight) if of_x else None, dweight, grad.sum(1) if of_bias else None


# Autograd would compute the gradient of the weights as [M,I,O] and return its transpose, which optimizers read half as fast.
_operator = Operator("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _product, _setup, _backward)

_FEW = 1 << 11
"""With fewer weights per member than this, a transposed gradient costs less than an operator with its own backward pass."""


@register("linear", "linear", key=FRONT, otherwise=_decomposed)
def linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Result:
    """One batched product; one wide product if members share the input, one tall product if they share the weights."""
    num_models, (x_dim, weight_dim, bias_dim) = call.num_models, call.first_dims(3)
    vector = weight.dim() - (weight_dim is not None) == 1
    if vector:
        # Weights [I] make one feature, which is no axis of the output.
        weight, weight_dim = models_first(weight, weight_dim).unsqueeze(-2), None if weight_dim is None else 0
    # A bias [O] that is per member exactly when the weights are goes into the product; any other is added afterwards.
    fused = bias is not None and not vector and (bias_dim is None) == (weight_dim is None)
    inner = bias if fused and bias is not None and bias.dim() - (bias_dim is not None) == 1 else None
    if weight_dim is None:
        # [M,B,I], [O,I] -> [MB,I], [O,I] -> [MB,O] -> [M,B,O]; of rows that lie apart, the operator would repeat the weights.
        x, dim = models_first(x, x_dim), None if x_dim is None else 0
        y = F.linear(x.flatten(0, -2) if x.dim() > 2 else x, weight, inner)
        y = y.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y
    elif x_dim is None:
        # [B,I], [M,O,I] -> [B,I], [MO,I] -> [B,MO] -> [B,M,O]
        y = F.linear(x, *each(fold, (weight, inner), (weight_dim, bias_dim), 0, num_models))
        y, dim = split(y, y.dim() - 1, num_models), x.dim() - 1
    else:
        # [M,P,I], [M,O,I], [M,O] -> [M,P,O] -> [M,B,O]
        x, weight, inner = each(models_first, (x, weight, inner), (x_dim, weight_dim, bias_dim))
        rows = x if x.dim() == 3 else x.reshape(num_models, math.prod(x.shape[1:-1]), x.shape[-1])
        # Counted for one member, so that a member keeps its bits when others are dropped.
        few = weight.shape[1] * weight.shape[2] < _FEW and not torch.compiler.is_compiling()
        y = (_product if few else _operator)(rows, weight, inner)
        y, dim = y if x.dim() == 3 else y.reshape(*x.shape[:-1], weight.shape[1]), 0
    if vector:
        y = y.squeeze(-1)
    if bias is None or inner is not None:
        return y, dim
    rank = y.dim() - (dim is not None)
    return align(y, dim, rank) + align(bias, bias_dim, rank), 0


@register("mm", "linear")
@register("_sparse_mm", "linear")
def mm(call: Call, x: Tensor, weight: Tensor) -> Result:
    """``x @ weight``."""
    num_models, (x_dim, weight_dim) = call.num_models, call.dims
    if x_dim is None:
        # [P,I], [M,I,O] -> [P,I], [I,MO] -> [P,MO] -> [P,M,O]
        return split(torch.mm(x, fold(weight, weight_dim, 1, num_models)), 1, num_models), 1
    if weight_dim is None:
        # [M,P,I], [I,O] -> [MP,I], [I,O] -> [MP,O] -> [M,P,O]
        return split(torch.mm(fold(x, x_dim, 0, num_models), weight), 0, num_models), 0
    return torch.bmm(models_first(x, x_dim), models_first(weight, weight_dim)), 0


@register("addmm", "linear")
@register("_sparse_addmm", "linear")
def addmm(call: Call, bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Result:
    """``beta * bias + alpha * x @ weight``; the bias is ``[O]``, or anything that broadcasts to ``[P,O]``."""
    bias_dim, x_dim, weight_dim = call.dims
    if bias_dim is not None:
        # [M,O] or [M,P|1,O] -> [M,P|1,O]
        bias = align(bias, bias_dim, 2)
    if bias_dim is None and weight_dim is None and bias.shape[:-1].numel() == 1:
        # [O] + [M,P,I], [I,O] -> [O] + [MP,I], [I,O] -> [MP,O] -> [M,P,O]
        y = torch.addmm(bias, fold(x, x_dim, 0, call.num_models), weight, beta=beta, alpha=alpha)
        return split(y, 0, call.num_models), 0
    if x_dim is not None and weight_dim is not None:
        # [M,1,O] + [M,P,I], [M,I,O] -> [M,P,O]
        return torch.baddbmm(bias, models_first(x, x_dim), models_first(weight, weight_dim), beta=beta, alpha=alpha), 0
    if x_dim is None and weight_dim is None:
        y = torch.mm(x, weight)
    else:
        y, y_dim = mm(call._replace(dims=(x_dim, weight_dim)), x, weight)
        y = models_first(y, y_dim)
    return torch.add(bias if beta == 1 else beta * bias, y, alpha=alpha), 0


register_looped("linear", "_grouped_mm", "_trilinear")


# PyTorch's rule loses the model axis of an empty shared matrix, and XLA mixes up the tolerances of several matrices.
register_looped("linalg", "linalg_pinv.atol_rtol_tensor")
