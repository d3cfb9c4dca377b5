"""The lowering ``loop``, which every operator has: one member after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import written_by


def one_by_one(
    operator: Any, num_models: int, args: Sequence[Any], dims: Any, kwargs: Any, named_dims: Any
) -> tuple[Any, Any]:
    """Call an operator once per member.

    An operator that works in place writes into copies of the members, from which the array is then written in one operation:
    autograd would copy the whole array for every write into a single member.
    """
    values, axes = {**dict(enumerate(args)), **kwargs}, {**dict(enumerate(dims)), **named_dims}
    writes, results = written_by(operator)
    # One unbind, because the gradients of M separate selections would be M arrays.
    parts = {
        key: _unbind(operator, value, axes[key], num_models, is_written=key in writes) for key, value in values.items()
    }
    outputs = [
        operator(*(parts[i][m] for i in range(len(args))), **{name: parts[name][m] for name in kwargs})
        for m in range(num_models)
    ]
    for key in writes & values.keys():
        _write(operator, values[key], axes[key], parts[key])
    if not results:
        return _stack(operator, outputs)
    # Some or all results of an operator are arguments that it has written.
    columns = [outputs] if len(results) == 1 else zip(*outputs, strict=True)
    pairs = [
        _stack(operator, column) if key is None else (values[key], axes[key])
        for column, key in zip(columns, results, strict=True)
    ]
    outputs, out_dims = zip(*pairs, strict=True)
    return pairs[0] if len(pairs) == 1 else (outputs, out_dims)


def _unbind(operator: Any, value: Any, dim: Any, num_models: int, is_written: bool) -> Sequence[Any]:
    """One value per member; a copy if the operator writes it."""
    if isinstance(dim, tuple):
        columns = (_unbind(operator, x, d, num_models, is_written) for x, d in zip(value, dim, strict=True))
        return list(zip(*columns, strict=True))
    if dim is None:
        if is_written and isinstance(value, Tensor):
            raise RuntimeError(f"vmap: inplace arithmetic of {operator.name()} into a tensor that all members share")
        return [value] * num_models
    return [x.clone() for x in value.unbind(dim)] if is_written else value.unbind(dim)


def _write(operator: Any, value: Any, dim: Any, parts: Sequence[Any]) -> None:
    if isinstance(dim, tuple):
        for x, d, column in zip(value, dim, zip(*parts, strict=True), strict=True):
            _write(operator, x, d, column)
    elif dim is not None:
        written, _ = _stack(operator, parts)
        value.copy_(written.movedim(0, dim))


def _stack(operator: Any, column: Sequence[Any]) -> tuple[Any, Any]:
    """The members' results as one, and their model axis."""
    first, *others = column
    if isinstance(first, Tensor):
        if any(other.shape != first.shape for other in others):
            raise RuntimeError(f"differently shaped results of {operator.name()}")
        return torch.stack(list(column)), 0
    if isinstance(first, (tuple, list)):
        pairs = [_stack(operator, each) for each in zip(*column, strict=True)]
        return tuple(x for x, _ in pairs), tuple(d for _, d in pairs)
    return first, None
