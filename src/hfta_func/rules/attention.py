"""Scaled dot-product attention of M members as one attention over M times the batch.

Dimension letters: M models, N batch, H heads, L and T query and key positions, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register


def _fold_mask(mask: Tensor | None, dim: int | None, num_models: int, batch: int) -> Tensor | None:
    """A mask ``[...,L,T]``, shared or per member, for inputs whose model axis has joined the batch."""
    if mask is None or (dim is None and (mask.dim() == 2 or mask.shape[0] == 1)):
        return mask
    mask = mask.expand(num_models, *mask.shape) if dim is None else front(mask, dim)
    while mask.dim() < 5:
        mask = mask.unsqueeze(1)
    # [M,1|N,1|H,L,T] -> [MN,1|H,L,T]
    return mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)


@register("_scaled_dot_product_flash_attention_for_cpu", "attention")
def attention_cpu(call: Call, *args: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> Result:
    """Forward of query, key and value ``[M,N,H,L,D]``; the model axis joins the batch that kernels are parallel over."""
    if attn_mask is not None and attn_mask.requires_grad:
        # The fused kernel has no gradient for the mask. PyTorch sees that where it picks a kernel; under vmap it cannot.
        return _folded(_differentiable, call, 3, args, attn_mask, scale)
    return _folded(_forward, call, 3, args, attn_mask, scale)


@register("_scaled_dot_product_flash_attention_for_cpu_backward", "attention")
def attention_cpu_backward(
    call: Call, *args: Any, attn_mask: Tensor | None = None, scale: float | None = None
) -> Result:
    """Gradients of query, key and value from those of the output, the inputs, the output and its log-sum-exp."""
    return _folded(_backward, call, 6, args, attn_mask, scale)


def _folded(
    operator: Any, call: Call, tensors: int, args: tuple[Any, ...], mask: Tensor | None, scale: float | None
) -> Result:
    # [M,N,...] -> [MN,...] -> [M,N,...]
    num_models, mask_dim = call.num_models, call.named_dims.get("attn_mask")
    folded = [fold(x, dim, 0, num_models) for x, dim in zip(args[:tensors], call.dims, strict=False)]
    mask = _fold_mask(mask, mask_dim, num_models, folded[0].shape[0] // num_models)
    outputs = operator(*folded, *args[tensors:], attn_mask=mask, scale=scale)
    return tuple(split(output, 0, num_models) for output in outputs), (0,) * len(outputs)


def _differentiable(*args: Any, attn_mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    query, key, value, *options = args
    output, _ = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *options, scale=scale)
    # Nothing reads the log-sum-exp: the backward pass is autograd's own.
    return output, output.new_zeros(output.shape[:-1])


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
