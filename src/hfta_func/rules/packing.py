"""Packing and unpacking of M members' sequences. Dimension letters as in :mod:`hfta_func.rules.recurrent`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._registry import Call, Result, register


@register("_pack_padded_sequence", "recurrent")
def pack(call: Call, x: Tensor, lengths: Tensor, batch_first: bool) -> Result:
    """Packing, with the model axis behind the axes of time and batch."""
    # [T,N,M,...] -> [R,M,...]
    call.require_shared(1, "lengths")
    return torch.ops.aten._pack_padded_sequence.default(x.movedim(call.dims[0], 2), lengths, batch_first), (1, None)


@register("_pack_padded_sequence_backward", "recurrent")
def pack_backward(call: Call, grad: Tensor, size: list[int], batch_sizes: Tensor, batch_first: bool) -> Result:
    """Gradient of packing."""
    # [R,M,...] -> [T,N,M,...]
    call.require_shared(2, "batch_sizes")
    grad, size = grad.movedim(call.dims[0], 1), [*size[:2], call.num_models, *size[2:]]
    return torch.ops.aten._pack_padded_sequence_backward.default(grad, size, batch_sizes, batch_first), 2


@register("_pad_packed_sequence", "recurrent")
def pad(call: Call, x: Tensor, batch_sizes: Tensor, *options: Any) -> Result:
    """Padding, the inverse of :func:`pack`."""
    # [R,M,...] -> [T,N,M,...]
    call.require_shared(1, "batch_sizes")
    return torch.ops.aten._pad_packed_sequence.default(x.movedim(call.dims[0], 1), batch_sizes, *options), (2, None)
