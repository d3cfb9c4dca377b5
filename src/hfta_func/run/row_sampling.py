"""Data as tensors with one row per sample: which rows each member of an array has, and in what order it sees them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hfta_func import random
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.errors import BatchError, HyperparameterError
from hfta_func.step.batch import plain, restored


def at_rows(leaf: Tensor, rows: Tensor) -> Tensor:
    """``leaf[rows]``; whole rows are copied faster than elements."""
    whole = leaf.dim() > 1 and leaf.is_contiguous()
    return leaf.index_select(0, rows.reshape(-1)).view(*rows.shape, *leaf.shape[1:]) if whole else leaf[rows]


def array_of(leaf: Any) -> Any:
    """The array in a column or frame, as of pandas; anything else as it is."""
    return leaf.to_numpy().copy() if hasattr(leaf, "to_numpy") else leaf


def moved(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """A batch on a device."""
    parts = tree_map(lambda x: x.to(device, non_blocking=non_blocking) if isinstance(x, Tensor) else x, plain(batch))
    return restored(parts, batch)


def is_dataset(data: Any) -> bool:
    """Whether data is a map-style data set of PyTorch, whose items are no batches."""
    return isinstance(data, Dataset) and not hasattr(data, "__iter__")


def tensors_of(data: Tree, device: torch.device | str | None, num_models: int) -> Tree:
    """The data as tensors; raises a BatchError unless all have as many rows, at least one, and no model axis."""
    data = tree_map(lambda leaf: torch.as_tensor(array_of(leaf), device=device), plain(data))
    shapes = [list(tensor.shape) for tensor in leaves(data)]
    if not shapes or [] in shapes or len({rows for rows, *_ in shapes}) > 1 or shapes[0][0] == 0:
        cure = "every leaf needs one row per sample; a loader is passed to fit itself, without a batch_size"
        raise BatchError(f"the data has {len(shapes)} leaves of shapes {shapes[:8]}; {cure}")
    second = {shape[1] if len(shape) > 1 else 0 for shape in shapes}
    if len(shapes) > 1 and shapes[0][0] == num_models and len(second) == 1 < num_models < max(second):
        cure = "join the rows, leaf.flatten(0, 1), and pass rows=[[0, 1, ...], ...]; or give the step your own batches"
        raise BatchError(f"the data has leaves of shapes {shapes}, so it seems to have a model axis; {cure}")
    return data


def drawn(sampler: Callable[[int, int], Sequence[Any]], keys: Tensor, epochs: Tensor | int, least: int = 0) -> Tensor:
    """``[M, n]`` rows of each member in its epoch, as a sampler draws them.

    Raises:
        HyperparameterError: if n differs, or is less than the least that an epoch's batches need.
    """
    pairs = [*zip(keys.tolist(), torch.as_tensor(epochs).expand(len(keys)).tolist(), strict=True)]
    order = [torch.as_tensor(sampler(*pair), device=keys.device).flatten() for pair in pairs]
    most = max(map(len, order))
    for member, (rows, (seed, epoch)) in enumerate(zip(order, pairs, strict=True)):
        if len(rows) < max(most, least):
            text = f"model {member}: sampler({seed}, {epoch}) returned {len(rows)} rows"
            wanted = f"others have {most}" if most >= least else f"the batches of an epoch need {least}"
            raise HyperparameterError(f"{text}, but {wanted}; return as many for all models and epochs")
    return torch.stack(order)


# Negative, to differ from the step numbers that a training step folds in.
_FOLDS = -(2**61) - 3


@dataclass(frozen=True)
class Rows:
    """Row numbers of each member, and those held out from it by folds."""

    by_member: list[Tensor]
    held_out: list[Tensor] | None = None

    def take(self, members: Sequence[int]) -> Rows:
        """The rows of some members."""
        held_out = None if self.held_out is None else [self.held_out[member] for member in members]
        return Rows([self.by_member[member] for member in members], held_out)

    def once(self, size: int) -> Iterator[tuple[int, list[int], Tensor]]:
        """Number, members and rows ``[m, N]`` of batches for evaluation, by members that have as many rows left."""
        evaluated = self.held_out or self.by_member
        for number in range(-(-max(map(len, evaluated)) // size)):
            parts = [rows[number * size : (number + 1) * size] for rows in evaluated]
            for count in sorted({len(part) for part in parts} - {0}):
                members = [member for member, part in enumerate(parts) if len(part) == count]
                yield number, members, torch.stack([parts[member] for member in members])

    def order(self, keys: Tensor, starts: Sequence[int], count: int, weights: Tensor | None) -> Tensor:
        """``[M, count]`` rows of each member's stream of passes, each pass in a new order, from its start on."""
        chosen = []
        for member, (rows, start) in enumerate(zip(self.by_member, starts, strict=True)):
            size = len(rows)
            passes = torch.arange(start // size, (start + count - 1) // size + 1, device=keys.device)
            each = random.fold_in(keys[member], passes)
            if weights is None:
                order = random.permutation(each, size)
            else:
                order = weighted(each, (weights if weights.dim() == 1 else weights[member])[rows], size)
            chosen.append(rows[order.flatten()[start % size : start % size + count]])
        return torch.stack(chosen)


def given(rows: Sequence[Sequence[int] | Tensor], num_models: int, count: int, device: torch.device) -> Rows:
    """Rows as a user gives them, checked."""
    if len(rows) != num_models:
        raise HyperparameterError(f"rows is {len(rows)} lists for {num_models} models; give each model one")
    by_member = [torch.as_tensor(numbers, device=device) for numbers in rows]
    for member, index in enumerate(by_member):
        is_number = index.dtype != torch.bool and not index.dtype.is_floating_point
        if index.dim() != 1 or not len(index) or not is_number or index.min() < 0 or index.max() >= count:
            text = f"model {member}: rows[{member}] is {rows[member]!s:.80}; give row numbers from 0 to {count - 1}"
            raise HyperparameterError(f"{text}, such as mask.nonzero().flatten()")
    return Rows([index.long() for index in by_member])


def folded(folds: int, num_models: int, count: int, device: torch.device) -> Rows:
    """Member ``i`` has all rows but those of part ``i % folds``; the parts are the same whatever the members' seeds."""
    if not 2 <= folds <= count:
        raise HyperparameterError(f"folds is {folds} for {count} rows; pass 2 to {count}, so that every part has a row")
    order = random.permutation(random.fold_in(random.keys([0], device=device)[0], _FOLDS), count)
    part = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=device) % folds)
    parts = [member % folds for member in range(num_models)]
    # As many of each, since parts differ by a row where the folds do not divide the data.
    held_out = [(part == number).nonzero().flatten()[: count // folds] for number in parts]
    return Rows([(part != number).nonzero().flatten() for number in parts], held_out)


def weighed(weights: Any, num_models: int, count: int, device: torch.device, rows: Rows | None) -> Tensor:
    """Weights ``[n]`` or ``[M, n]`` as a user gives them, checked, in double precision."""
    values = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if values.shape not in ((count,), (num_models, count)):
        wanted = f"give [{count}] or [{num_models}, {count}]"
        raise HyperparameterError(f"weights is {list(values.shape)} for {num_models} models; {wanted}")
    members = values.expand(num_models, count)
    for member, each in enumerate(members if rows is None else map(operator.getitem, members, rows.by_member)):
        if not ((each >= 0) & each.isfinite()).all() or not each.any():
            text = f"model {member}: weights must be finite and not negative, and not 0 for all rows of a model"
            raise HyperparameterError(f"{text}; a row that is never drawn has weight 0")
    return values


def weighted(keys: Tensor, weights: Tensor, count: int) -> Tensor:
    """``[..., count]`` positions drawn with replacement in proportion to weights ``[C]`` or ``[..., C]``."""
    # Integers, so that sums are the same in any order.
    share = (weights / weights.amax(-1, keepdim=True) * ((1 << 52) // weights.shape[-1])).ceil().to(torch.int64)
    edges = share.cumsum(-1).expand(*keys.shape, -1).contiguous()
    drawn = (random.uniform(keys, (count,), dtype=torch.float64) * edges[..., -1:]).to(torch.int64)
    return torch.searchsorted(edges, drawn, right=True)
