"""Look-up tables of M members as a single table.

Dimension letters: M models, N any batch, V rows of a table, D features, B bags, L entries of all bags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import has_tangents
from hfta_func.rules import _tables
from hfta_func.rules._layout import each, expand, fold, models_first, rows_of, split
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._registry import Call, Result, filled, register, register_looped


@register("embedding", "embedding")
def embedding(
    call: Call, weight: Tensor, indices: Tensor, padding_idx: int = -1, by_freq: bool = False, sparse: bool = False
) -> Result:
    """Rows ``[M,N,D]`` of tables ``[M,V,D]``; the gradient is a single scatter into one table."""
    weight_dim, indices_dim = call.dims[:2]
    if weight_dim is None and not by_freq:
        return torch.ops.aten.embedding.default(weight, indices, padding_idx), indices_dim
    # [M,V,D], [M,N] -> [MV,D], [M,N] -> [M,N,D]. Frequencies are counted per member, so they need a table per member.
    num_models = call.num_models
    indices = expand(indices, indices_dim, num_models)
    if not by_freq and _tables.is_fast(weight):
        # [M,V,D], [M,N] -> [M,N,D]
        rows = _tables.take(models_first(weight, weight_dim), indices.reshape(num_models, -1).long(), padding_idx)
        return rows.reshape(*indices.shape, rows.shape[2]), 0
    table = fold(weight, weight_dim, 0, num_models)
    rows = rows_of(indices, table.shape[0] // num_models)
    y = torch.ops.aten.embedding.default(table, rows, -1, by_freq)
    if padding_idx >= 0 and not has_tangents():
        # The kernel of the gradient supports one padding row, but each member has its own.
        y = torch.where((indices == padding_idx).unsqueeze(-1), y.detach(), y)
    return y, 0


@register("embedding_renorm_", "embedding")
def embedding_renorm_(call: Call, weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Result:
    """Shorten in place the rows ``[M,V,D]`` that are looked up and longer than ``max_norm``."""
    num_models, (weight_dim, indices_dim) = call.num_models, call.dims[:2]
    if weight_dim is None:
        torch.ops.aten.embedding_renorm_.default(weight, indices, max_norm, norm_type)
        return weight, None
    table = fold(weight, weight_dim, 0, num_models)
    rows = rows_of(expand(indices, indices_dim, num_models), table.shape[0] // num_models)
    torch.ops.aten.embedding_renorm_.default(table, rows, max_norm, norm_type)
    if not models_first(weight, weight_dim).is_contiguous():
        # Folding had to copy, and the copy was updated.
        models_first(weight, weight_dim).copy_(split(table, 0, num_models))
    return weight, weight_dim


@register("embedding_bag", "embedding")
def embedding_bag(call: Call, weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any) -> Result:
    """Sums, means or maxima ``[M,B,D]`` over bags of rows of tables ``[M,V,D]``; bags start at the offsets ``[M,B]``."""
    num_models, weight_dim = call.num_models, call.dims[0]
    by_freq, mode, _, scale, includes_end, padding_idx = filled(options, False, 0, False, None, False, None)
    if by_freq:
        # The CPU kernel counts frequencies in the order of all indices, so it needs the indices of each member alone.
        args = weight, indices, offsets, by_freq, mode, False, scale, includes_end, padding_idx
        return one_by_one(_embedding_bag, num_models, args, call.first_dims(9), {}, {})
    indices, offsets = each(expand, (indices, offsets), call.dims[1:], num_models)
    if includes_end:
        # The last bag ends where the indices end.
        offsets = offsets[:, :-1]
    is_sum = mode < 2 and scale is None and padding_idx is None
    if is_sum and weight_dim is not None and _tables.is_fast(weight):
        nothing = indices.new_empty(0)
        starts = offsets[:1] if call.dims[2] is None else offsets
        sums = _sums(models_first(weight, weight_dim), indices, starts, mode == 1)
        return (sums, nothing, nothing, nothing), (0, None, None, None)
    # [M,V,D], [M,L], [M,B] -> [MV,D], [ML], [MB] -> [MB,D] -> [M,B,D]
    table, rows = weight, indices
    if weight_dim is not None:
        table = fold(weight, weight_dim, 0, num_models)
        size = table.shape[0] // num_models
        rows = rows_of(indices, size)
        if padding_idx is not None:
            padding_idx %= size
            # Bags leave padding out, so one row can be the padding of every member.
            rows = torch.where(indices == padding_idx, padding_idx, rows)
    starts = torch.arange(num_models, dtype=offsets.dtype, device=offsets.device) * indices.shape[1]
    if scale is not None:
        scale = fold(scale, call.dims[6], 0, num_models)
    # PyTorch's decomposable operator, because it sees from the folded table whether there will be a gradient.
    bags, *notes = _embedding_bag(
        table, rows.flatten(), (offsets + starts.unsqueeze(1)).flatten(), False, mode, False, scale, False, padding_idx
    )
    # The other outputs, about all members together, are read by the gradient of this kernel only.
    return (split(bags, 0, num_models), *notes), (0, *(None,) * len(notes))


def _sums(table: Tensor, indices: Tensor, offsets: Tensor, is_mean: bool) -> Tensor:
    """Sums or means over bags without padding: ``[M,V,D], [M,L], [M|1,B] -> [M,B,D]``."""
    count = indices.shape[1]
    positions = torch.arange(count, dtype=offsets.dtype).expand(len(offsets), count).contiguous()
    bags, factors = torch.searchsorted(offsets.contiguous(), positions, right=True) - 1, None
    if is_mean:
        counts = torch.zeros(offsets.shape, dtype=table.dtype)
        factors = counts.scatter_add_(1, bags, torch.ones_like(bags, dtype=table.dtype)).reciprocal().gather(1, bags)
        factors = factors.expand_as(indices)
    return _tables.sums(table, indices.long(), bags.expand_as(indices), factors, offsets.shape[1])


register("embedding_bag.padding_idx", "embedding")(embedding_bag)


for _suffix in ("", "_forward_only", "_backward", "_dense_backward", "_per_sample_weights_backward"):
    register_looped("embedding", f"_embedding_bag{_suffix}")

_embedding_bag = _torch.operator("embedding_bag.padding_idx")
