"""Batches for an array, in every member's own order.

Public: :class:`ArrayLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._errors import BatchError, HyperparameterError
from hfta_func._routing import routed
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.transforms import vmap

# Keeps the loader's noise apart from the training step's, which folds in step numbers.
_ORDER, _TRANSFORM = -(2**61), -(2**61) - 1


class ArrayLoader:
    """Iterates over tensors in batches ``[M, N, ...]``, shuffled for each member by its own seed.

    Every member sees every row once per epoch. The order of member ``i`` depends on ``seeds[i]`` and the epoch alone, so
    it is the order that member would see in training by itself. Each iteration over the loader is the next epoch.

    Args:
        data: A tree of tensors with one row per sample: ``(inputs, targets)``, a dict, ....
        batch_size: N, rows per member in one batch.
        seeds: One integer per member. Give either this or ``shared``.
        shared: One batch ``[N, ...]`` for all members, for steps made with ``batch_dims=None``; the order comes from
            ``seeds`` if it is a single integer, and from 0 without.
        shuffle: False keeps the rows in order.
        drop_last: Leave out a last batch smaller than ``batch_size``; compiled steps then see one shape only.
        device: Where the batches go; the data is moved there once.
        transform: ``transform(batch) -> batch`` of ONE member's batch ``[N, ...]``, for augmentation. Its random calls
            draw from the member's seed.

    Raises:
        HyperparameterError: if neither or both of ``seeds`` and ``shared`` are given, or batch_size is not positive.
        BatchError: if there is no data or leaves disagree about the number of rows.

    Example:
        >>> loader = ArrayLoader((torch.arange(6), torch.arange(6)), batch_size=4, seeds=[0, 1, 2])
        >>> [tuple(inputs.shape) for inputs, targets in loader]
        [(3, 4), (3, 2)]
    """

    def __init__(
        self,
        data: Tree,
        batch_size: int,
        *,
        seeds: Sequence[int] | Tensor | int | None = None,
        shared: bool = False,
        shuffle: bool = True,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        transform: Callable[[Tree], Tree] | None = None,
    ):
        if shared:
            if not (seeds is None or isinstance(seeds, int)):
                raise HyperparameterError(
                    "shared=True makes one batch for all members; give one integer as seeds, or none"
                )
            seeds = seeds or 0
        elif seeds is None or isinstance(seeds, int):
            raise HyperparameterError("give seeds=[...], one integer per model, or shared=True for one batch for all")
        if batch_size < 1:
            raise HyperparameterError(f"batch_size is {batch_size}; it must be at least 1")
        self.data = tree_map(lambda leaf: torch.as_tensor(leaf, device=device), data)
        tensors = leaves(self.data)
        sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
        if not tensors or len(sizes) < len(tensors) or len(set(sizes)) > 1 or sizes[0] == 0:
            raise BatchError(
                f"the data has leaves of shapes {[list(tensor.shape) for tensor in tensors]}; every leaf needs one row "
                f"per sample, and at least one"
            )
        self.rows, device = sizes[0], tensors[0].device
        self.shared = shared
        self.keys = random.keys([seeds] if isinstance(seeds, int) else seeds, device=device)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.transform = transform
        self.epoch = 0

    def __len__(self) -> int:
        """Batches in one epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.batches(epoch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of one epoch from number ``start`` on; a pure function of seeds and epoch."""
        if self.shuffle:
            order = random.permutation(random.fold_in(random.fold_in(self.keys, _ORDER), epoch), self.rows)
        else:
            order = torch.arange(self.rows, device=self.keys.device).expand(self.keys.shape[0], -1)
        noise = random.fold_in(random.fold_in(self.keys, _TRANSFORM), epoch)
        for number in range(start, len(self)):
            rows = order[:, number * self.batch_size : (number + 1) * self.batch_size]
            batch: Any = tree_map(lambda leaf, rows=rows: leaf[rows], self.data)
            if self.transform is not None:
                batch = vmap(self._transformed)(batch, random.fold_in(noise, number))
            yield tree_map(lambda leaf: leaf[0], batch) if self.shared else batch

    def _transformed(self, batch: Tree, key: Tensor) -> Tree:
        assert self.transform is not None
        with routed(key):
            return self.transform(batch)
