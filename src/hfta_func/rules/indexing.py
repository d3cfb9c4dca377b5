"""Selected entries of M members' tensors, where PyTorch's rule is missing, wrong, or refuses a result of fixed shape.

Dimension letters: M models, S shape of a member, K number of indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules import _tables
from hfta_func.rules._layout import align, each, expand, models_first, rows_of
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._registry import Call, Result, register, register_each, register_looped

# PyTorch's rules have a wrong gradient, or are wrong for a shared tensor.
register_looped("indexing", "select_scatter")


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


@register_each("indexing", "index_put", "index_put_")
def index_put(operator: Any, call: Call, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    """One number where a mask is set is written elementwise; other indices by PyTorch's rule where it works.

    That confuses the axes of values where indices do not stand next to each other or behind a slice.
    """
    dims, in_place = call.first_dims(4), operator._schema.is_mutable
    axes = [i for i, one in enumerate(indices) if one is not None]
    masks = [indices[axis] for axis in axes if indices[axis].dtype in (torch.bool, torch.uint8)]
    is_wrong = len(axes) <= axes[-1] - axes[0] or (axes[0] > 0 and any(dim is not None for dim in dims[1]))
    if not masks and (not in_place or dims[0] is None or not is_wrong):
        return NotImplemented
    if accumulate or values.dim() > (dims[2] is not None) or len(masks) != 1 or len(axes) > 1:
        return one_by_one(operator, call.num_models, (x, indices, values, accumulate), dims, {}, {})
    if in_place and dims[0] is None:
        raise RuntimeError("vmap: inplace arithmetic of index_put_ into a tensor that all members share")
    axis = axes[0]
    mask = expand(masks[0].bool(), dims[1][axis], call.num_models)
    whole = expand(x, dims[0], call.num_models)
    mask = mask.reshape(call.num_models, *(1,) * axis, *mask.shape[1:], *(1,) * (whole.dim() - mask.dim() - axis))
    result = torch.where(mask, align(values, dims[2], whole.dim() - 1).to(x.dtype), whole)
    if not in_place:
        return result, 0
    models_first(x, dims[0]).copy_(result)
    return x, dims[0]


def _is_worth_it(x: Tensor, dim: int | None) -> bool:
    # Members' rows in one table have kernels for rows, where PyTorch's rules select member after member, or by elements.
    return x.dim() > 2 and x.numel() >= 2**12 and dim is not None and not torch.compiler.is_compiling()


@register_each("indexing", "index_add", "index_add_")
def index_add(
    operator: Any, call: Call, x: Tensor, axis: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Any:
    """One addition to the rows of all members; PyTorch's rule makes one for each member, whose gradients have all rows."""
    # [M,V,D], [K], [M,K,D] -> [M,V,D], [M,K], [M,K,D] -> [M,V,D]
    x_dim, index_dim, source_dim = call.dims[0], *call.first_dims(4)[2:]
    if not _is_worth_it(source, source_dim) or index.dim() - (index_dim is not None) != 1:
        return NotImplemented
    x_all, index, source = each(expand, (x, index, source), (x_dim, index_dim, source_dim), call.num_models)
    axis = axis % (x_all.dim() - 1) + 1
    start, source = x_all.movedim(axis, 1), source.movedim(axis, 1)
    added = _tables.add(
        start.flatten(2), index.long(), (source if alpha == 1 else alpha * source).flatten(2), start.shape[1]
    )
    result = added.view(start.shape).movedim(1, axis)
    if not operator._schema.is_mutable:
        return result, 0
    x_all.copy_(result)
    return x, x_dim


@register("index_select", "indexing")
def index_select(call: Call, x: Tensor, axis: int, index: Tensor) -> Any:
    """Rows of the tables of all members, whose gradient is one addition to their rows."""
    # [M,V,D], [K] -> [M,V,D], [M,K] -> [M,K,D]
    x_dim, _, index_dim = call.dims
    if not _is_worth_it(x, x_dim) or index.dim() - (index_dim is not None) != 1:
        return NotImplemented
    x, index = each(expand, (x, index), (x_dim, index_dim), call.num_models)
    axis = axis % (x.dim() - 1) + 1
    table = x.movedim(axis, 1)
    rows = _tables.take(table.flatten(2), index.long())
    return rows.unflatten(2, table.shape[2:]).movedim(1, axis), 0


@register("index.Tensor", "indexing")
def index(call: Call, x: Tensor, indices: Any) -> Any:
    """Rows of one table of all members, where numbers select them along the first axis."""
    first, *others = indices
    if first is None or first.dtype != torch.int64 or any(one is not None for one in others):
        return NotImplemented
    (x_dim, (index_dim, *_)) = call.dims[:2]
    if not _is_worth_it(x, x_dim) or first.dim() - (index_dim is not None) != 1:
        return NotImplemented
    rows = torch.where(first < 0, first + models_first(x, x_dim).shape[1], first)
    return index_select(call._replace(dims=(x_dim, None, index_dim)), x, 0, rows)


def _row_numbers(shapes: tuple[Any, ...], axis: int, index: Tensor, index_dim: int | None) -> Any:
    """The numbers ``[K]`` or ``[M,K]`` that an index repeats along the other axes, as if it selected rows; or None."""
    index = models_first(index, index_dim)
    lead = 0 if index_dim is None else 1
    sizes, strides = index.shape[lead + 1 :], index.stride()[lead + 1 :]
    repeats = len(sizes) and axis == 0 and not any(stride for stride, n in zip(strides, sizes, strict=True) if n > 1)
    if not repeats or any(shape[1:] != sizes for shape in shapes):
        return None
    return index[(..., *(0 for _ in sizes))]


@register_each("indexing", "scatter_add", "scatter_add_", "scatter_reduce.two", "scatter_reduce_.two")
def scatter(
    operator: Any, call: Call, x: Tensor, axis: int, index: Tensor, source: Tensor, *args: Any, **options: Any
) -> Any:
    """Rows of all members at once, where the index is one of rows, which kernels know by its strides."""
    # [M,V,D], [K,1], [M,K,D] -> [MV,R], [MK,1], [MK,R] -> [MV,R] -> [M,V,D]
    x_dim, _, index_dim, source_dim = call.first_dims(4)
    target = expand(x, x_dim, call.num_models)
    if not _is_worth_it(source, source_dim):
        return NotImplemented
    shapes = target.shape[1:], models_first(source, source_dim).shape[1:]
    numbers, in_place = _row_numbers(shapes, axis, index, index_dim), operator._schema.is_mutable
    if numbers is None or numbers.shape[-1] != shapes[1][0] or (in_place and not target.is_contiguous()):
        return NotImplemented
    if not args and not options:
        add = torch.ops.aten.index_add_.default if in_place else torch.ops.aten.index_add.default
        dims = x_dim, None, None if index_dim is None else 0, source_dim
        return index_add(add, call._replace(dims=dims), x, axis, numbers, source)
    rows = rows_of(expand(numbers, None if index_dim is None else 0, call.num_models), target.shape[1])
    source = expand(source, source_dim, call.num_models).flatten(0, 1).flatten(1)
    rows = rows.reshape(-1, 1).expand(source.shape)
    table = target.view(-1, source.shape[1]) if in_place else target.flatten(0, 1).flatten(1)
    table = operator(table, 0, rows, source, *args, **options)
    return (x, x_dim) if in_place else (table.reshape(target.shape), 0)
