"""Batches of a data set for an array: items are loaded by row, with noise that belongs to one member."""

from __future__ import annotations

import contextlib
import inspect
import random as python_random
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from hfta_func import random
from hfta_func._torch import seed_cpu
from hfta_func._tree import leaves, paths, tree_map
from hfta_func.errors import BatchError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.row_sampling import moved
from hfta_func.step.batch import plain, restored

# Negative, to differ from the step numbers that a training step folds in.
_ITEM, _HELD_OUT = -(2**61) - 4, -(2**61) - 5

_Draw = tuple[list[list[int]], list[list[int]], list[int]]
"""A batch to load: for each member its rows, none if it rests, a seed for each of them, and one for collating."""


class DatasetLoader(ArrayLoader):
    """Iterates over the items of a data set in batches ``[M, N, ...]``, dealt to each member as by :class:`ArrayLoader`.

    While an item is loaded, the generators of PyTorch (on the CPU), Python and NumPy are seeded by the member's seed, the
    epoch and the item, and where an epoch may have an item several times, as with ``bootstrap`` or ``weights``, by its place
    in the epoch: random transforms are the same in an array of any size, with any number of workers and in any thread, and
    the caller's generators stay as they are. PyTorch's generator is the loading thread's own meanwhile; where other threads
    draw from those of Python or NumPy, pass ``num_workers``. A batch loads ``M * N`` items, or ``N`` with ``shared``.

    Args:
        dataset: A map-style ``torch.utils.data.Dataset``, or anything else with ``len`` and items by number.
        batch_size: N, items per member and batch.
        seeds, shared, shuffle, drop_last, rows, batches_per_epoch, bootstrap, folds, weights, sampler: Which items each
            member has, and in what order, as for :class:`ArrayLoader`.
        device: Where each batch is moved.
        collate_fn: Makes one member's batch of a list of its items. Its random calls draw from the member's seed, the epoch
            and the batch.
        num_workers: Number of processes that load batches, as for ``torch.utils.data.DataLoader``; 0 loads in this process.
        options: The options of :class:`ArrayLoader`, and others of ``DataLoader``, such as ``persistent_workers`` and
            ``pin_memory``.

    Raises:
        HyperparameterError: as for :class:`ArrayLoader`, and if ``num_workers`` or another option is wrong.
        TypeError: if the data set has no length.

    Example:
        >>> digits = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
        >>> loader = DatasetLoader(digits, batch_size=4, seeds=[0, 1, 2])
        >>> [tuple(inputs.shape) for inputs, targets in loader]
        [(3, 4), (3, 2)]
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ):
        names = inspect.signature(ArrayLoader).parameters.keys() & options.keys()
        rows = torch.arange(len(dataset), device="cpu")  # pyright: ignore[reportArgumentType]
        super().__init__(rows, batch_size, **{name: options.pop(name) for name in names})
        self._device = device
        self._repeats = self._is_stream or self.bootstrap or self._weights is not None or self._sampler is not None
        self._member_batches = _MemberBatches(dataset, collate_fn or default_collate, self.shared)
        self._options = {"num_workers": num_workers, **options}
        # Made now, so that options which PyTorch refuses are refused now.
        self._idle = _Idle([self._torch_loader()])

    def held_out(self) -> Any:
        """The items of each member's own part, ``[M, n // K, ...]``, loaded at once with the same noise in every call.

        Raises:
            HyperparameterError: if the loader was made without ``folds``.

        Example:
            >>> loader = DatasetLoader([10, 11, 12, 13], batch_size=2, seeds=[0, 0], folds=2)
            >>> loader.held_out().flatten().sort().values
            tensor([10, 11, 12, 13])
        """
        rows, noise = super().held_out(), random.fold_in(self.keys, _HELD_OUT)
        (batch,) = self._loaded(self._draw(rows, noise, 0) for _ in range(1))
        return batch

    def once(self) -> Iterator[tuple[Tensor | None, Any]]:
        """What members are evaluated on, with the same noise in every call, see :class:`ArrayLoader`."""
        if self._rows_of is None:
            return super().once()
        noise, parts = random.fold_in(self.keys, _HELD_OUT), [*self._rows_of.once(self.batch_size)]
        draws = (self._draw(rows, noise[members], number) for number, members, rows in parts)
        return zip([torch.tensor(members, device="cpu") for _, members, _ in parts], self._loaded(draws), strict=True)

    def batches(self, epoch: int, start: int = 0, resting: bool = False) -> Iterator[Any]:
        """The batches of one epoch, see :class:`ArrayLoader`; for members that are ``resting``, nothing is loaded."""
        noise = random.fold_in(random.fold_in(self.keys, _ITEM), self._ahead + epoch)
        lengths = self.lengths if resting else [self._length] * len(self.keys)
        # A part of an array waits for other parts with batches of its longest member.
        lasts = [self._length if length == max(lengths) else length for length in lengths]
        drawn = enumerate(super().batches(epoch, start, resting), start)
        return self._loaded(self._draw(rows, noise, n, [n < last for last in lasts]) for n, rows in drawn)

    def _draw(self, rows: Tensor, noise: Tensor, number: int, present: Sequence[bool] | None = None) -> _Draw:
        rows, present = rows.reshape(len(noise), -1), present or [True] * len(noise)
        seeds = random.fold_in(noise[:, None], rows)
        if self._repeats:
            seeds = random.fold_in(seeds, torch.arange(rows.shape[1], device="cpu") + number * self.batch_size)
        loaded = [each if is_present else [] for each, is_present in zip(rows.tolist(), present, strict=True)]
        return loaded, seeds.tolist(), random.fold_in(noise, -1 - number).tolist()

    def _loaded(self, draws: Generator[_Draw]) -> Iterator[Any]:
        loader = self._idle.pop() if self._idle else self._torch_loader()
        loader.sampler.draws = draws
        # Whoever leaves the iteration, such as members that go on as a smaller array, has its processes go on, too.
        with contextlib.suppress(GeneratorExit):
            for batch in loader:
                yield batch if self._device is None else moved(batch, self._device, non_blocking=True)
        # What is left of it would hold this loader in a circle, and PyTorch ends processes of such by waiting for seconds.
        draws.close()
        self._idle.append(loader)

    def _torch_loader(self) -> Any:
        # A generator of its own, because a DataLoader draws a number from the caller's.
        options = {"generator": torch.Generator(torch.get_default_device()), "collate_fn": _as_it_is, **self._options}
        return DataLoader(self._member_batches, batch_size=None, sampler=_Draws(), **options)


class _Idle(list[Any]):
    """Each ``DataLoader`` that iterates no more, with its persistent processes: for all loaders of this process."""

    def __reduce__(self) -> Any:
        return _Idle, ()


class _Draws:
    """What a ``DataLoader`` loads in its next iteration."""

    draws: Iterable[_Draw] = ()

    def __iter__(self) -> Iterator[_Draw]:
        return iter(self.draws)


class _MemberBatches(Dataset[Any]):
    """A data set of whole batches, which a process of a ``DataLoader`` loads by what is drawn."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], shared: bool):
        self._dataset, self._collate_fn, self._shared = dataset, collate_fn, shared

    def __getitem__(self, draw: _Draw) -> Any:
        if get_worker_info() is not None:
            # Ctrl-C is for the process that trains, which ends this one.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with random.one_thread(), generators_restored():
            members = enumerate(zip(*draw, strict=True))
            batches = {member: self._member_batch(*each) for member, each in members if each[0]}
        if self._shared:
            return batches[0]
        # For those that rest, anything of that shape will do.
        some = next(iter(batches.values()))
        parts = [plain(batches.get(member, some)) for member in range(len(draw[0]))]
        for path, leaf in zip(paths(parts[0], "batch"), leaves(parts[0]), strict=True):
            if not isinstance(leaf, Tensor):
                raise BatchError(f"{path} is a {type(leaf).__name__}, no tensor to stack; drop it in collate_fn")
        return restored(tree_map(lambda *leaves: torch.stack(leaves), *parts), some)

    def _member_batch(self, rows: list[int], seeds: list[int], collate_seed: int) -> Any:
        items = []
        for row, seed in zip(rows, seeds, strict=True):
            seed_all(seed)
            items.append(self._dataset[row])
        seed_all(collate_seed)
        return self._collate_fn(items)


def _as_it_is(batch: Any) -> Any:
    return batch


def generators_restored() -> contextlib.ExitStack:
    """Gives the generators of PyTorch, Python and NumPy, which PyTorch imports if it is installed, their states back."""
    stack = contextlib.ExitStack()
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    stack.callback(python_random.setstate, python_random.getstate())
    if numpy := sys.modules.get("numpy"):
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    return stack


def seed_all(seed: int) -> None:
    """Seed the generators that :func:`generators_restored` gives back."""
    seed_cpu(seed)
    python_random.seed(seed)
    if "numpy" in sys.modules:
        # Of these 64 bits PyTorch takes the lower half: with one seed for both, they would draw the same bits.
        sys.modules["numpy"].random.seed(seed >> 32 & 0xFFFFFFFF)
