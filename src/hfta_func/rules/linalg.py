"""Linear algebra on M members' matrices, where PyTorch's rule is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func.rules._layout import align, expand
from hfta_func.rules._registry import Call, Result, register


@register("linalg_pinv.atol_rtol_tensor", "linalg")
def pinv(
    call: Call, x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Result:
    """All members' matrices at once; PyTorch's rule loses the model axis of an empty shared matrix."""
    # [M,*S,A,B], [M,*S] -> [M,*S,B,A]
    x = expand(x, call.dims[0], call.num_models)
    atol, rtol = (
        value if value is None else align(value, call.named_dims[name], x.dim() - 3)
        for name, value in (("atol", atol), ("rtol", rtol))
    )
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(x, atol=atol, rtol=rtol, hermitian=hermitian), 0
