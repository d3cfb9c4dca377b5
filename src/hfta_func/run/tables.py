"""Data as tensors with one row per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.errors import BatchError
from hfta_func.step.batch import plain


def at_rows(leaf: Tensor, rows: Tensor) -> Tensor:
    """``leaf[rows]``; whole rows are copied faster than elements."""
    whole = leaf.dim() > 1 and leaf.is_contiguous()
    return leaf.index_select(0, rows.reshape(-1)).view(*rows.shape, *leaf.shape[1:]) if whole else leaf[rows]


def array_of(leaf: Any) -> Any:
    """The array in a column or frame, as of pandas; anything else as it is."""
    return leaf.to_numpy().copy() if hasattr(leaf, "to_numpy") else leaf


def is_dataset(data: Any) -> bool:
    """Whether data is a map-style data set of PyTorch, whose items are no batches."""
    return isinstance(data, Dataset) and not hasattr(data, "__iter__")


def tensors_of(data: Tree, device: torch.device | str | None) -> Tree:
    """The data as tensors; raises a BatchError unless all have as many rows, and at least one."""
    try:
        data = tree_map(lambda leaf: torch.as_tensor(array_of(leaf), device=device), plain(data))
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise BatchError(
            f"the data is no tree of tensors: {error}; pass tensors with one row per sample, such as (inputs, targets), or "
            f"make a DatasetLoader of a data set; a loader is passed to fit itself, without a batch_size"
        ) from error
    tensors = leaves(data)
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    if not tensors or len(sizes) < len(tensors) or len(set(sizes)) > 1 or sizes[0] == 0:
        raise BatchError(
            f"the data has {len(tensors)} leaves of shapes {[list(tensor.shape) for tensor in tensors[:8]]}; every leaf "
            f"needs one row per sample, and at least one, so pass tensors or arrays of equal length"
        )
    return data


def refuse_model_axis(tensors: Sequence[Tensor], num_models: int) -> None:
    """Raise a BatchError if the rows seem to be models: as many as these, and as many samples in each leaf."""
    rows, second = tensors[0].shape[0], {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors}
    if len(tensors) > 1 and rows == num_models and len(second) == 1 < rows < max(second):
        raise BatchError(
            f"the data has leaves of shapes {[list(tensor.shape) for tensor in tensors]} for {rows} models, so it "
            f"seems to have a model axis; an ArrayLoader deals rows [n, ...] to the models. For rows of each model's "
            f"own, join them, leaf.flatten(0, 1), and pass rows=[[0, 1, ...], ...]; or give the step batches "
            f"[{rows}, N, ...] of your own, such as leaf[:, start:stop]"
        )
