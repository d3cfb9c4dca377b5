"""Selected entries of M members' tensors, where PyTorch's rule is missing, wrong, or refuses a result of fixed shape.

Dimension letters: M models, S shape of a member, K number of indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import align, each, expand, models_first
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._registry import Call, Result, register, register_each


@register("select_scatter", "indexing")
def select_scatter(call: Call, x: Tensor, source: Tensor, dim: int, index: int) -> Result:
    """One selection in the tensor of all members; PyTorch's rule has a wrong gradient."""
    # [M,*S], [M,*S without dim] -> [M,*S]
    x, source = each(expand, (x, source), call.dims, call.num_models)
    return torch.select_scatter(x, source, dim + (dim >= 0), index), 0


@register("masked_fill.Tensor", "indexing")
def masked_fill(call: Call, x: Tensor, mask: Tensor, value: Tensor) -> Result:
    """Elementwise."""
    rank = max(one.dim() - (dim is not None) for one, dim in zip((x, mask), call.dims, strict=False))
    dtype = x.dtype
    x, mask, value = each(align, (x, mask, value), call.dims, rank)
    return torch.where(mask, value.to(dtype), x), 0


@register("index_fill.int_Tensor", "indexing")
def index_fill(call: Call, x: Tensor, dim: int, index: Tensor, value: Tensor) -> Result:
    """Elementwise, by a mask; PyTorch's rule is wrong for a shared tensor."""
    # [M,*S], [M,K], [M] -> [M,*S]
    x, index, value = each(expand, (x, index, value), (call.dims[0], *call.dims[2:]), call.num_models)
    size, index = (x.shape[dim + (dim >= 0)] if x.dim() > 1 else 1), index.reshape(call.num_models, -1).to(x.device)
    index = torch.where(index < 0, index + size, index)
    mask = torch.zeros(call.num_models, size, dtype=torch.bool, device=x.device).scatter(1, index, True)
    ones = [1] * (x.dim() - 1)
    if ones:
        ones[dim] = size
    value = value.to(x.dtype).reshape(call.num_models, *(1,) * (x.dim() - 1))
    return torch.where(mask.reshape(call.num_models, *ones), value, x), 0


def _write_indexed(
    num_models: int, x: Tensor, indices: Any, values: Tensor, accumulate: bool, dims: tuple[Any, ...]
) -> None:
    """``x[indices] = values`` with the indexed axes I in front of the others R, and the models as one more index before them.

    PyTorch's rule confuses the axes of values where indices do not stand next to each other or behind a slice.
    """
    axes = [i for i, one in enumerate(indices) if one is not None]
    ranks = [one.dim() - (dim is not None) for one, dim in zip(indices, dims[1], strict=False) if one is not None]
    selected = range(1, 1 + max(ranks))
    # [M,*S] -> [M,*I,*R]; K axes of indices, [M,*K]
    x = models_first(x, dims[0])
    front = x.movedim([1 + axis for axis in axes], [*range(1, 1 + len(axes))])
    chosen = [align(indices[axis], dims[1][axis], len(selected)) for axis in axes]
    models = torch.arange(num_models, device=x.device).reshape(-1, *(1,) * len(selected))
    values = align(values, dims[2], x.dim() - 1 - len(axes) + len(selected))
    if axes[-1] - axes[0] < len(axes):
        # What adjacent indices select stands in their place: [M,*R,*K,*R] -> [M,*K,*R]
        values = values.movedim([axes[0] + axis for axis in selected], [*selected])
    front.index_put_((models, *chosen), values, accumulate)


@register_each("indexing", "index_put", "index_put_")
def index_put(operator: Any, call: Call, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    """One number where a mask is set is written elementwise; other indices by PyTorch's rule where it works."""
    dims, in_place = call.first_dims(4), operator._schema.is_mutable
    masks = [one for one in indices if one is not None and one.dtype in (torch.bool, torch.uint8)]
    if not masks:
        axes = [i for i, one in enumerate(indices) if one is not None]
        gap = len(axes) <= axes[-1] - axes[0]
        is_wrong = gap or (axes[0] > 0 and any(dim is not None for dim in dims[1]))
        if not in_place or dims[0] is None or not is_wrong:
            return NotImplemented
        _write_indexed(call.num_models, x, indices, values, accumulate, dims)
        return x, dims[0]
    is_number = values.dim() - (dims[2] is not None) == 0
    if accumulate or not is_number or len(masks) < sum(one is not None for one in indices) or len(masks) > 1:
        return one_by_one(operator, call.num_models, (x, indices, values, accumulate), dims, {}, {})
    if in_place and dims[0] is None:
        raise RuntimeError("vmap: inplace arithmetic of index_put_ into a tensor that all members share")
    axis = next(i for i, one in enumerate(indices) if one is not None)
    mask = expand(masks[0].bool(), dims[1][axis], call.num_models)
    whole = expand(x, dims[0], call.num_models)
    mask = mask.reshape(call.num_models, *(1,) * axis, *mask.shape[1:], *(1,) * (whole.dim() - mask.dim() - axis))
    result = torch.where(mask, align(values, dims[2], whole.dim() - 1).to(x.dtype), whole)
    if not in_place:
        return result, 0
    models_first(x, dims[0]).copy_(result)
    return x, dims[0]
