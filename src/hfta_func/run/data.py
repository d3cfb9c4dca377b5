"""Batches for an array, in each member's own order."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._tree import indices, leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.routing import routed
from hfta_func.errors import HyperparameterError, StateError
from hfta_func.rules.vmap import vmap
from hfta_func.run.row_sampling import Rows, at_rows, drawn, folded, given, tensors_of, weighed, weighted

# Negative, to differ from the step numbers that a training step folds in.
_ORDER, _TRANSFORM, _BAG = -(2**61), -(2**61) - 1, -(2**61) - 2


class ArrayLoader:
    """Iterates over tensors in batches ``[M, N, ...]``, shuffled for each member by its own seed.

    Every member sees every row once per epoch, in an order that depends only on its seed and the epoch, unless ``rows``,
    ``bootstrap``, ``folds`` or ``weights`` say otherwise. Each iteration over the loader is the next epoch; ``state_dict``
    and ``load_state_dict`` resume within one, as torchdata's ``StatefulDataLoader`` does.

    Args:
        data: A tree of tensors with one row per sample: ``(inputs, targets)``, a dict, ...; batches of mappings are dicts.
        batch_size: N, rows per member and batch.
        seeds: One integer per member; with ``shared``, at most one integer, 0 by default.
        shared: Make one batch ``[N, ...]`` for all members, for steps with ``batch_dims=None``.
        shuffle: Whether to shuffle the rows.
        drop_last: Skip a last batch smaller than ``batch_size``, so that compiled steps see only one shape.
        device: Where the data is moved, once.
        rows: The rows of each member, M lists of row numbers of any lengths. Every batch is full, as members go on with
            their next pass. Iterating yields as many batches as the longest list needs, of which each member has its
            :attr:`lengths` in :func:`fit`, as alone, and rests during the others.
        batches_per_epoch: Number of batches in an epoch, in place of those of one pass: an epoch goes on in the pass in which
            the one before ended, and every batch is full.
        bootstrap: Whether each member has n rows drawn with replacement by its seed in place of the n rows.
        folds: A number K of parts; member ``i`` has all rows but those of part ``i % K``, see :meth:`held_out`.
        weights: How often each row is drawn, ``[n]`` or ``[M, n]``; a pass then draws its rows with replacement, in
            proportion.
        sampler: ``sampler(seed, epoch)`` returns the rows of ONE member in an epoch, in order, such as batches of 8 classes
            with 4 rows each, or ``list(batch_sampler)`` with a generator of this seed and epoch.
        transform: ``transform(batch) -> batch`` for ONE member's batch ``[N, ...]``, such as augmentation. Its random calls
            draw from the member's seed.

    Raises:
        HyperparameterError: if ``seeds`` does not fit ``shared``, or rows, folds or weights leave a member without data.
        BatchError: if there is no data, two leaves have different numbers of rows, or all leaves seem to be ``[M, n, ...]``.

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
        rows: Sequence[Sequence[int] | Tensor] | None = None,
        batches_per_epoch: int | None = None,
        bootstrap: bool = False,
        folds: int | None = None,
        weights: Sequence[Any] | Tensor | None = None,
        sampler: Callable[[int, int], Sequence[Any]] | None = None,
        device: torch.device | str | None = None,
        transform: Callable[[Tree], Tree] | None = None,
    ):
        is_list = not (seeds is None or isinstance(seeds, Integral)) and len(seeds) > 0  # pyright: ignore
        if is_list == shared:
            cure = "pass seeds=[...], one integer per model, or shared=True for one batch for all, with one integer or none"
            raise HyperparameterError(f"seeds is {seeds!r}; {cure}")
        options = {"rows": rows, "bootstrap": bootstrap or None, "folds": folds, "sampler": sampler, "weights": weights}
        named = [name for name, option in options.items() if option is not None]
        if len(named) > 1 and named not in (["rows", "weights"], ["folds", "weights"]):
            raise HyperparameterError(f"{' and '.join(named[:2])} both say which rows a model has; pass one of them")
        if (named and shared and sampler is None) or ((named or batches_per_epoch is not None) and not shuffle):
            cure = "shuffle=False" if not shuffle else "shared=True"
            name = (named or ["batches_per_epoch"])[0]
            raise HyperparameterError(f"{name} deals rows by each model's seed; leave out {cure}")
        self.data = tensors_of(data, device, 0 if shared else len(seeds))  # pyright: ignore
        self.rows, device = leaves(self.data)[0].shape[0], leaves(self.data)[0].device
        numbers: Any = seeds if is_list else [seeds or 0]
        self.keys, self.shared = random.keys(numbers, device=device), shared
        self.batch_size, self.shuffle, self.drop_last = operator.index(batch_size), shuffle, drop_last
        self.transform, self.bootstrap, self._sampler = transform, bootstrap, sampler
        self._position = self._next = (0, 0)
        self._ahead: Tensor | int = 0
        self._rows_of: Rows | None = None if rows is None else given(rows, len(self.keys), self.rows, device)
        if folds is not None:
            self._rows_of = folded(folds, len(self.keys), self.rows, device)
        self._weights = None if weights is None else weighed(weights, len(self.keys), self.rows, device, self._rows_of)
        self._is_stream = batches_per_epoch is not None or self._rows_of is not None
        sizes = [self.rows] if self._rows_of is None else [len(rows) for rows in self._rows_of.by_member]
        if sampler is not None:
            sizes = [drawn(sampler, self.keys[:1], 0).shape[1]]
        batches = [size // self.batch_size if drop_last else -(-size // self.batch_size) for size in sizes]
        if self._rows_of is not None:
            batches = [max(1, each) for each in batches]
        self._length = int(batches_per_epoch or max(batches))
        # Of each member, where they differ.
        self._lengths = batches if batches_per_epoch is None and len({*batches}) > 1 else None

    def held_out(self) -> Any:
        """The rows of each member's own part, ``[M, n // K, ...]``, for evaluation with ``batch_dims=0``.

        Raises:
            HyperparameterError: if the loader was made without ``folds``.

        Example:
            >>> loader = ArrayLoader(torch.arange(6), batch_size=4, seeds=[0, 0, 0], folds=3)
            >>> loader.held_out().flatten().sort().values
            tensor([0, 1, 2, 3, 4, 5])
        """
        if self._rows_of is None or self._rows_of.held_out is None:
            raise HyperparameterError("only folds hold rows out; make the loader with folds=5 or another number")
        rows = torch.stack(self._rows_of.held_out)
        return tree_map(lambda leaf: leaf[rows], self.data)

    def take(self, index: int | slice | Sequence[int] | Tensor) -> ArrayLoader:
        """The loader of some members, in the order given, at the same position; shared batches are everybody's.

        Raises:
            StackError: if no member is selected or an index is out of range.

        Example:
            >>> loader = ArrayLoader(torch.arange(6), batch_size=6, seeds=[0, 1, 2])
            >>> torch.equal(next(iter(loader.take([2, 0]))), next(iter(loader))[[2, 0]])
            True
        """
        other = copy.copy(self)
        if not self.shared:
            chosen = indices(index, len(self.keys)).to(self.keys.device)
            other.keys = self.keys[chosen]
            other._ahead = self._ahead[chosen] if isinstance(self._ahead, Tensor) else self._ahead
            other._rows_of = None if self._rows_of is None else self._rows_of.take(chosen.tolist())
            other._lengths = self._lengths and [self._lengths[member] for member in chosen.tolist()]
            if self._weights is not None and self._weights.dim() == 2:
                other._weights = self._weights[chosen]
        return other

    def follow(self, places: Sequence[int], keys: Tensor, starts: Sequence[int]) -> ArrayLoader:
        """The loader at the same position for members of which some are new.

        Args:
            places: The place that each had in this loader, -1 for a new one.
            keys: Their keys.
            starts: The epoch that is a new member's first.

        Raises:
            HyperparameterError: if there are new members and the others have rows or weights of their own.
        """
        if self.shared:
            return self
        if min(places) >= 0:
            other = self.take([*places])
            other._length = max(other._lengths) if other._lengths else other._length
            return other
        ahead = torch.as_tensor(self._ahead).expand(len(self.keys)).tolist()
        epochs = [-start if place < 0 else ahead[place] for place, start in zip(places, starts, strict=True)]
        other = self.of_members(keys, epochs)
        other._position, other._next = self._position, self._next
        return other

    def of_members(self, keys: Tensor, epochs: Sequence[int] | None = None) -> ArrayLoader:
        """A loader of the same data for other members.

        Args:
            keys: The members' keys, such as some of another loader's ``keys``.
            epochs: The epoch in which each member starts; 0 by default.

        Raises:
            HyperparameterError: if the batches are shared, or members have rows or weights of their own.

        Example:
            >>> loader = ArrayLoader(torch.arange(6), batch_size=6, seeds=[0, 1])
            >>> (first,), (second,) = loader, loader
            >>> (both,) = loader.of_members(loader.keys[[1, 0]], epochs=[1, 0])
            >>> torch.equal(both, torch.stack([second[1], first[0]]))
            True
        """
        if self.shared:
            raise HyperparameterError("all members share the batches of this loader; make it with seeds=[...] instead")
        if self._rows_of is not None or (self._weights is not None and self._weights.dim() == 2):
            raise HyperparameterError("new models have no rows or weights of their own here; make a loader for them")
        other = copy.copy(self)
        other.keys = keys.to(self.keys.device)
        other._position = other._next = (0, 0)
        other._ahead = 0 if epochs is None else torch.tensor([*epochs], device=self.keys.device)
        return other

    def __repr__(self) -> str:
        members = "shared" if self.shared else f"{len(self.keys)} members"
        return f"{type(self).__name__}({members}, {self.rows} rows, {len(self)} batches of {self.batch_size})"

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._next[0]

    def __len__(self) -> int:
        """Batches in one epoch."""
        return self._length

    @property
    def lengths(self) -> list[int]:
        """Batches in one epoch of each member: all of them, or as many as its own ``rows`` need."""
        return [*(self._lengths or [self._length] * len(self.keys))]

    def present(self) -> Tensor | None:
        """``bool[M]``, the members that have the batch that was yielded last, and do not rest; None if nobody ever rests."""
        if self._lengths is None:
            return None
        return torch.tensor(self._lengths, device=self.keys.device) >= self._position[1]

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(resting=False)

    def iterate(self, resting: bool) -> Iterator[Any]:
        """The batches of the next epoch, from the position on; see :meth:`batches`."""
        epoch, start = self._position = self._next
        self._next = (epoch + 1, 0)
        for number, batch in enumerate(self.batches(epoch, start, resting), start + 1):
            self._position = (epoch, number)
            yield batch
        self._position = (epoch + 1, 0)

    def leave(self) -> None:
        """Leave an iteration that was broken off, so that the position is that of the next one."""
        self._position = self._next

    def state_dict(self) -> dict[str, int]:
        """The position of the latest iteration: its epoch and number of batches.

        Example:
            >>> loader = ArrayLoader(torch.arange(6), batch_size=2, seeds=[0, 1])
            >>> first, *rest = loader
            >>> loader.load_state_dict({"epoch": 0, "batches": 1})
            >>> torch.equal(next(iter(loader)), rest[0]), loader.state_dict()
            (True, {'epoch': 0, 'batches': 2})
        """
        return dict(zip(("epoch", "batches"), self._position, strict=True))

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Start the next iteration at a position from :meth:`state_dict`.

        Raises:
            StateError: if the position does not fit this loader.
        """
        epoch, batches = (operator.index(state_dict.get(name, -1)) for name in ("epoch", "batches"))
        if epoch < 0 or not 0 <= batches <= len(self):
            cure = "pass what state_dict() of a loader with the same data and batch_size returned"
            raise StateError(f"the loader's state is {dict(state_dict)}, but an epoch has {len(self)} batches; {cure}")
        self._position = self._next = (epoch, batches)

    def batches(self, epoch: int, start: int = 0, resting: bool = False) -> Iterator[Any]:
        """The batches of one epoch, starting at number ``start``: a pure function of the seeds and the epoch.

        Where members are ``resting`` after their own :attr:`lengths`, they have the same batches in the next epoch.
        """
        epochs, key = self._ahead + epoch, random.fold_in(self.keys, _ORDER)
        if self._is_stream:
            rows_of = self._rows_of or Rows([torch.arange(self.rows, device=self.keys.device)] * len(self.keys))
            lengths = self.lengths if resting else [self._length] * len(self.keys)
            starts = (torch.tensor(lengths, device=self.keys.device) * self.batch_size * epochs).tolist()
            order = rows_of.order(key, starts, self._length * self.batch_size, self._weights)
        elif self._sampler is not None:
            least = self._length * self.batch_size - (0 if self.drop_last else self.batch_size - 1)
            order = drawn(self._sampler, self.keys, epochs, least)
        elif self._weights is not None:
            order = weighted(random.fold_in(key, epochs), self._weights, self.rows)
        elif self.shuffle:
            order = random.permutation(random.fold_in(key, epochs), self.rows)
        else:
            order = torch.arange(self.rows, device=self.keys.device).expand(self.keys.shape[0], -1)
        if self.bootstrap:
            order = random.randint(random.fold_in(self.keys, _BAG), 0, self.rows, (self.rows,)).gather(1, order)
        noise = random.fold_in(random.fold_in(self.keys, _TRANSFORM), epochs)
        for number in range(start, len(self)):
            rows = order[:, number * self.batch_size : (number + 1) * self.batch_size]
            batch = self._batch(rows, noise if self.transform is None else random.fold_in(noise, number))
            yield tree_map(lambda leaf: leaf[0], batch) if self.shared else batch

    def once(self) -> Iterator[tuple[Tensor | None, Any]]:
        """What members are evaluated on, with who has the batch: ``rows`` or parts held out once, or one epoch."""
        if self._rows_of is None:
            yield from ((None, batch) for batch in self.batches(0))
            return
        noise = random.fold_in(random.fold_in(self.keys, _TRANSFORM), 0)
        for number, members, rows in self._rows_of.once(self.batch_size):
            chosen = torch.tensor(members, device=self.keys.device)
            yield chosen, self._batch(rows, random.fold_in(noise[chosen], number))

    def _batch(self, rows: Tensor, noise: Tensor) -> Any:
        batch = tree_map(lambda leaf: at_rows(leaf, rows), self.data)
        return batch if self.transform is None else vmap(self._transformed)(batch, noise)

    def _transformed(self, batch: Tree, key: Tensor) -> Tree:
        assert self.transform is not None
        with routed(key):
            return self.transform(batch)
