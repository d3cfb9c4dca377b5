"""Batches for an array, in every member's own order.

Public: :class:`ArrayLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._errors import BatchError, HyperparameterError, StateError
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.routing import routed
from hfta_func.rules.vmap import vmap

# Keeps the loader's noise apart from the training step's, which folds in step numbers.
_ORDER, _TRANSFORM = -(2**61), -(2**61) - 1


class ArrayLoader:
    """Iterates over tensors in batches ``[M, N, ...]``, shuffled for each member by its own seed.

    Every member sees every row once per epoch. The order of member ``i`` depends on ``seeds[i]`` and the epoch alone, so
    it is the order that member would see in training by itself. Each iteration over the loader is the next epoch;
    ``state_dict`` and ``load_state_dict`` go on in the middle of one, as torchdata's ``StatefulDataLoader`` does.

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
        self._position = self._next = (0, 0)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration gives, or the rest of."""
        return self._next[0]

    def __len__(self) -> int:
        """Batches in one epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._position = self._next
        self._next = (epoch + 1, 0)
        return self._counted(epoch, start)

    def _counted(self, epoch: int, start: int) -> Iterator[Any]:
        for number, batch in enumerate(self.batches(epoch, start), start + 1):
            self._position = (epoch, number)
            yield batch
        self._position = (epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """The position of the latest iteration: its epoch, and how many of the epoch's batches have been given.

        Example:
            >>> loader = ArrayLoader(torch.arange(6), batch_size=2, seeds=[0, 1])
            >>> first, *rest = loader
            >>> loader.load_state_dict({"epoch": 0, "batches": 1})
            >>> torch.equal(next(iter(loader)), rest[0]), loader.state_dict()
            (True, {'epoch': 0, 'batches': 2})
        """
        epoch, batches = self._position
        return {"epoch": epoch, "batches": batches}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Have the next iteration go on at a position from :meth:`state_dict`.

        Raises:
            StateError: if the position is not one of this loader.
        """
        if set(state_dict) != {"epoch", "batches"}:
            raise StateError(
                f"the loader's state has {sorted(state_dict)}, but an ArrayLoader's has 'epoch' and 'batches'; pass what "
                f"its state_dict() returned"
            )
        epoch, batches = state_dict["epoch"], state_dict["batches"]
        if epoch < 0 or not 0 <= batches <= len(self):
            raise StateError(
                f"the loader's state is at batch {batches} of epoch {epoch}, but an epoch has {len(self)} batches; go on "
                f"with the data and batch_size that it was saved with"
            )
        self._position = self._next = (epoch, batches)

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
