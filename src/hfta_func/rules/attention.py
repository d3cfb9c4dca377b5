"""Scaled dot-product attention of M members as one attention over M times the batch.

PyTorch picks the kernel for the folded call as it would for one member's: flash, memory-efficient, cuDNN, or plain
operators. Dimension letters: M models, N batch, H heads, L and T query and key positions, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._errors import RandomnessError
from hfta_func._torch import RandomnessType, current_interpreter, has_tangents
from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import MODE, Call, Result, register


@register("scaled_dot_product_attention", "attention", key=MODE)
def attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    """Members join the batch that kernels are parallel over."""
    if dropout_p > 0:
        _check_randomness()
    dims = (*call.dims, *(None,) * 4)
    if dropout_p == 0 and all(dim is None for dim in dims):
        output = torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output, None
    # [M,*B,H,L,D]; the model axis of a shared tensor has size 1 until all are expanded.
    rank = max(4, *(_lead(x, dim).dim() for x, dim in zip((query, key, value), dims, strict=False)))
    tensors = [_pad(_lead(x, dim), rank) for x, dim in zip((query, key, value), dims, strict=False)]
    kept = 3 if enable_gqa else 2
    common = (call.num_models, *torch.broadcast_shapes(*(x.shape[1:-kept] for x in tensors)))
    # [M,*B,H,L,D] -> [M*B,H,L,D]
    folded = [x.expand(*common, *x.shape[-kept:]).flatten(0, -4) for x in tensors]
    mask = None
    if attn_mask is not None:
        mask = _pad(_lead(attn_mask, dims[3]), rank)
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*common[: rank - 3], *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    if has_tangents():
        # The fused kernels have no derivative forward.
        operator = torch.ops.aten._scaled_dot_product_attention_math.default
        output, _ = operator(*folded, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    else:
        operator = torch.ops.aten.scaled_dot_product_attention.default
        output = operator(*folded, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    output = output.unflatten(0, common[: rank - 3])
    return output.squeeze(1) if query.dim() - (dims[0] is not None) == 2 and rank == 4 else output, 0


def _lead(x: Tensor, dim: int | None) -> Tensor:
    return x.unsqueeze(0) if dim is None else front(x, dim)


def _pad(x: Tensor, rank: int) -> Tensor:
    """Axes of size 1 after the model axis."""
    return x.reshape(x.shape[0], *(1,) * (rank - x.dim()), *x.shape[1:])


def _check_randomness() -> None:
    if current_interpreter().randomness() != RandomnessType.Different:
        raise RandomnessError(
            "scaled_dot_product_attention with dropout draws from PyTorch's global generator, for all members at once; call "
            "it inside a step or functional(model)(..., key=), where it draws from the member's key, or give vmap "
            "randomness='different'"
        )


@register("_scaled_dot_product_flash_attention_for_cpu", "attention")
def attention_cpu(call: Call, *args: Any, **options: Any) -> Result:
    """The kernel that a gradient inside ``vmap`` has picked: members join the batch."""
    return _folded(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, call, 3, args, **options)


@register("_scaled_dot_product_flash_attention_for_cpu_backward", "attention")
def attention_cpu_backward(call: Call, *args: Any, **options: Any) -> Result:
    """Gradients of query, key and value from those of the output, the inputs, the output and its log-sum-exp."""
    return _folded(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default, call, 6, args, **options
    )


def _folded(
    operator: Any,
    call: Call,
    tensors: int,
    args: tuple[Any, ...],
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Result:
    # [M,N,...] -> [MN,...] -> [M,N,...]
    num_models, mask_dim = call.num_models, call.named_dims.get("attn_mask")
    folded = [fold(x, dim, 0, num_models) for x, dim in zip(args[:tensors], call.dims, strict=False)]
    if attn_mask is not None:
        # [M|1,1|N,1|H,L,T] -> [MN,1|H,L,T]
        attn_mask = _pad(_lead(attn_mask, mask_dim), 5)
        attn_mask = attn_mask.expand(num_models, folded[0].shape[0] // num_models, *attn_mask.shape[2:]).flatten(0, 1)
    outputs = operator(*folded, *args[tensors:], attn_mask=attn_mask, scale=scale)
    return tuple(split(output, 0, num_models) for output in outputs), (0,) * len(outputs)
