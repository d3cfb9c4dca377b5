"""Matrix products of linear layers of M members: one batched product, or one wide one where the input is shared.

PyTorch takes ``linear`` apart into these before any batching rule is asked. Dimension letters: M models, P rows, I and O
features in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register


@register("mm", "linear")
def mm(call: Call, x: Tensor, weight: Tensor) -> Result:
    """``x @ weight``."""
    num_models, (x_dim, weight_dim) = call.num_models, call.dims
    if x_dim is None:
        # [P,I], [M,I,O] -> [P,I], [I,MO] -> [P,MO] -> [P,M,O]
        return split(torch.mm(x, fold(weight, weight_dim, 1, num_models)), 1, num_models), 1
    if weight_dim is None:
        # [M,P,I], [I,O] -> [MP,I], [I,O] -> [MP,O] -> [M,P,O]
        return split(torch.mm(fold(x, x_dim, 0, num_models), weight), 0, num_models), 0
    return torch.bmm(front(x, x_dim), front(weight, weight_dim)), 0


@register("addmm", "linear")
def addmm(call: Call, bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Result:
    """``beta * bias + alpha * x @ weight``; the bias is ``[O]``, or anything that broadcasts to ``[P,O]``."""
    bias_dim, x_dim, weight_dim = call.dims
    if bias_dim is not None:
        # [M,O] or [M,P|1,O] -> [M,P|1,O]
        bias = front(bias, bias_dim)
        bias = bias.reshape(bias.shape[0], *(1,) * (3 - bias.dim()), *bias.shape[1:])
    if x_dim is not None and weight_dim is not None:
        # [M,1,O] + [M,P,I], [M,I,O] -> [M,P,O]
        return torch.baddbmm(bias, front(x, x_dim), front(weight, weight_dim), beta=beta, alpha=alpha), 0
    if x_dim is None and weight_dim is None:
        y = torch.mm(x, weight)
    else:
        y, y_dim = mm(call._replace(dims=(x_dim, weight_dim)), x, weight)
        y = front(y, y_dim)
    return torch.add(bias if beta == 1 else beta * bias, y, alpha=alpha), 0
