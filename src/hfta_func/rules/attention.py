"""Scaled dot-product attention of M members as one attention over M times the batch.

PyTorch picks the kernel for the folded call as it would for a single member: flash, memory-efficient, cuDNN or plain
operators. Dimension letters: M models, N batch, H heads, L and T query and key positions, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import current_interpreter, has_tangents
from hfta_func.errors import RandomnessError
from hfta_func.rules._layout import align, each
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._registry import MODE, Call, Result, filled, register, register_each


@register("scaled_dot_product_attention", "attention", key=MODE)
def attention(call: Call, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Result:
    """Members join the batch, which kernels run in parallel."""
    dims, (attn_mask, dropout_p, is_causal) = call.first_dims(4), filled(args, None, 0.0, False)
    if dropout_p > 0 and current_interpreter().randomness() != "different":
        raise RandomnessError(
            "scaled_dot_product_attention with dropout draws from PyTorch's global generator for all members; call it "
            "inside a step or functional(model)(..., key=), where it draws from the member's key, or give vmap "
            "randomness='different'"
        )
    operator = torch.ops.aten.scaled_dot_product_attention.default
    if dropout_p == 0 and all(dim is None for dim in dims):
        return operator(query, key, value, attn_mask, 0.0, is_causal, **options), None
    # [M,*B,H,L,D]; the model axis of a shared tensor has size 1 until all are expanded.
    ranks = [x.dim() - (dim is not None) for x, dim in zip((query, key, value), dims, strict=False)]
    rank = max(3, *ranks)
    *tensors, mask = each(align, (query, key, value, attn_mask), dims, rank)
    kept = 3 if options.get("enable_gqa") else 2
    common = (call.num_models, *torch.broadcast_shapes(*(x.shape[1:-kept] for x in tensors)))
    # [M,*B,H,L,D] -> [M*B,H,L,D]
    folded = [x.expand(*common, *x.shape[-kept:]).flatten(0, -4) for x in tensors]
    if mask is not None:
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*common[: rank - 2], *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    if has_tangents():
        # The fused kernels have no forward-mode derivative.
        math = torch.ops.aten._scaled_dot_product_attention_math.default
        output, _ = math(*folded, mask, dropout_p, is_causal, **options)
    else:
        output = operator(*folded, mask, dropout_p, is_causal, **options)
        if any(rank != 4 for rank in ranks):
            # A fused kernel keeps its output for the gradient; alone, such a member gets none, and may write the output.
            output = output.clone()
    output = output.unflatten(0, common[: rank - 2])
    return output.squeeze(1) if ranks[0] == 2 and rank == 3 else output, 0


# The CPU kernel that a gradient inside ``vmap`` calls.
_CPU = "_scaled_dot_product_flash_attention_for_cpu"


@register_each("attention", _CPU, f"{_CPU}_backward")
def attention_cpu(operator: Any, call: Call, *args: Any, **options: Any) -> Result:
    """One member after another."""
    return one_by_one(operator, call.num_models, args, call.dims, options, call.named_dims)
