"""Members, groups of those that can share arrays, and arrays that train, here or in workers."""

from __future__ import annotations

import dataclasses
import math
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal

import optree
import torch
from torch import Tensor

import hfta_func as hfta
from hfta_func.tune.array import Array, Trainer, moved
from hfta_func.workers.pool import Executor

Size = int | Literal["auto"]
"""Number of members of the largest array."""


@dataclasses.dataclass
class Member:
    """One member of a population.

    Args:
        number: Its number in the population.
        config: Its configuration, with its seed.
        epoch: Number of epochs that it has trained.
        metrics: The metrics of each epoch.
        seconds: Its share of the time of the arrays that it trained in.
        status: ``"alive"``, ``"dropped"`` or ``"failed"``.
        error: Why it failed.
        parents: The members that it copied, as pairs of epoch and number.
    """

    number: int
    config: dict[str, Any]
    epoch: int = 0
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    status: Literal["alive", "dropped", "failed"] = "alive"
    error: str | None = None
    parents: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def value(self, metric: str, epoch: int = -1) -> float:
        """A metric of an epoch, by default the last one; NaN without any epoch."""
        if self.metrics and metric not in self.metrics[epoch]:
            raise KeyError(f"member {self.number} has no metric '{metric}'; it has {', '.join(self.metrics[epoch])}")
        return self.metrics[epoch][metric] if self.metrics else math.nan


def rows_of(table: Any) -> list[Mapping[str, Any]]:
    """The rows of a table: a list of dicts, a dict of lists, or a pandas frame."""
    table = table.to_dict("records") if hasattr(table, "to_dict") else table
    if isinstance(table, Mapping):
        table = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    # Numbers of NumPy become those of Python, which JSON can hold.
    return [{name: value.item() if hasattr(value, "item") else value for name, value in row.items()} for row in table]


def check_alive(members: Sequence[Member], numbers: Iterable[int]) -> None:
    """Raise a ValueError unless all numbers are those of members that are alive."""
    for number in numbers:
        if (status := members[number].status) != "alive":
            raise ValueError(f"member {number} is {status}, and its state is gone; choose one of population.alive")


def tuples(value: Any) -> Any:
    """A value that was written as JSON, which has lists for tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@dataclasses.dataclass(eq=False)
class Block:
    """A stacked state, the numbers of its members in order, and its file in a folder."""

    numbers: tuple[int, ...]
    state: Any
    file: str = dataclasses.field(default_factory=lambda: f"members-{uuid.uuid4().hex}.safetensors")


class Group:
    """Members that can share an array, because their values of all non-fusible names are equal."""

    def __init__(self, trainer: Trainer, number: int, fixed: Mapping[str, Any], limit: Size):
        self.fixed, self.number, self.trainer = dict(fixed), number, trainer
        self.limit: Size = limit
        self.blocks: list[Block] = []
        self._keys: dict[int, Tensor] = {}

    @property
    def array(self) -> Array:
        """The array whose step, loader and evaluation train the members; its state is not used."""
        return self.trainer.arrays[self.number]

    @property
    def is_shared(self) -> bool:
        """Whether all members see the same batches, so that only members in the same epoch can share an array."""
        return not isinstance(self.array.loader, hfta.ArrayLoader) or self.array.loader.shared

    def make(self, members: Iterable[Member]) -> dict[int, Exception]:
        """Make those members that have no state yet; returns the errors of those that cannot be made."""
        made = {number for block in self.blocks for number in block.numbers}
        missing = [member for member in members if member.number not in made]
        if not missing:
            return {}
        try:
            array = self.built(missing)
        except Exception as error:
            if len(missing) == 1:
                return {missing[0].number: error}
            half = len(missing) // 2
            return self.make(missing[:half]) | self.make(missing[half:])
        self.blocks.append(self.checked(missing, array))
        return {}

    def built(self, members: Sequence[Member]) -> Array:
        """What ``build`` makes of members."""
        names = [name for name in members[0].config if name not in self.fixed]
        return self.trainer.build(dict(self.fixed), {name: [one.config[name] for one in members] for name in names})

    def checked(self, members: Sequence[Member], made: Array) -> Block:
        """The block of members that were built; raises a StateError if there are more or fewer."""
        numbers = tuple(member.number for member in members)
        keys = made.loader.keys if isinstance(made.loader, hfta.ArrayLoader) and not made.loader.shared else None
        count, loads = hfta.num_models(made.state), len(numbers) if keys is None else len(keys)
        if {count, loads} != {len(numbers)}:
            text = f"build returned {count} models and a loader for {loads} for {len(numbers)} members"
            raise hfta.errors.StateError(f"{text}; give both the seeds members['seed']")
        if keys is not None:
            self._keys |= dict(zip(numbers, keys, strict=True))
        # Of its state, the structure and the device are needed.
        self.trainer.arrays.setdefault(self.number, made._replace(state=hfta.take(made.state, [0])))
        return Block(numbers, made.state)

    def drop(self, gone: Collection[int]) -> None:
        """Forget members."""
        self.blocks = _selected(self.blocks, lambda number: number not in gone)
        self._keys = {number: key for number, key in self._keys.items() if number not in gone}

    def gather(self, numbers: Sequence[int]) -> Any:
        """The state of members, in the order of their numbers."""
        parts = _selected(self.blocks, {*numbers}.__contains__)
        states = [moved(part.state, self.array.state.keys.device) for part in parts]
        state = hfta.concat(states) if len(states) > 1 else states[0]
        gathered = [number for part in parts for number in part.numbers]
        return state if gathered == [*numbers] else hfta.take(state, [gathered.index(number) for number in numbers])

    def put(self, numbers: Sequence[int], state: Any) -> None:
        """Replace the state of some members."""
        others = _selected(self.blocks, lambda number: number not in numbers)
        self.blocks = [*others, Block(tuple(numbers), state)]

    def train(self, executor: Executor, members: Sequence[Member], epochs: int, seconds: float | None) -> int:
        """Have members trained together for some more epochs; returns the number of the executor's call."""
        numbers, starts = [member.number for member in members], [member.epoch for member in members]
        keys = None if self.is_shared else torch.stack([self._keys[number] for number in numbers])
        given = {"group": (self.number, self.fixed, members[0].config), "state": self.gather(numbers), "keys": keys}
        # A power of two for compiled steps, which compile per size.
        size = len(starts) if isinstance(self.array.step, hfta.step.TrainStep) else 1 << (len(starts) - 1).bit_length()
        size = size if self.limit == "auto" else max(len(starts), min(size, self.limit))
        return executor.submit(self.trainer, **given, starts=starts, epochs=epochs, size=size, seconds=seconds)

    def take_back(self, numbers: Sequence[int], state: Any, alive: Iterable[int]) -> None:
        """Replace the state of members that have trained, without those that were dropped meanwhile."""
        for block in _selected([Block(tuple(numbers), state)], {*alive}.__contains__):
            self.put(block.numbers, block.state)
            # The states of members that do not train wait in the host's memory, which is larger than a device's.
            for other in self.blocks[:-1]:
                other.state = moved(other.state, torch.device("cpu"))

    def capacity(self, numbers: Sequence[int], epochs: int) -> int:
        """The largest number of ``numbers`` that train together for some epochs; ``max_models="auto"`` is measured once."""
        wanted = len(numbers)
        if self.limit == "auto":
            if wanted < 4:
                return wanted
            measured = [number for block in self.blocks for number in block.numbers if number in numbers]
            state, loader = self.gather(measured), self.array.loader
            if isinstance(loader, hfta.ArrayLoader) and not loader.shared:
                loader = loader.of_members(torch.stack([self._keys[number] for number in measured]))
            steps = epochs * len(loader) if isinstance(loader, Sized) else None
            sizes = [size for size in (1, 4, 16) if size <= len(measured)]
            plan = hfta.plan(self.array.step, state, next(iter(loader)), limit=wanted, sizes=sizes, steps=steps)
            self.limit = max(1, plan.chunk_size or plan.num_models)
        if wanted <= self.limit or not isinstance(self.array.step, hfta.step.TrainStep):
            return min(wanted, self.limit)
        # Arrays of equal sizes, not full ones and a small one, unless each size is compiled.
        return -(-wanted // -(-wanted // self.limit))


def _selected(blocks: Iterable[Block], is_wanted: Callable[[int], bool]) -> list[Block]:
    """The members that are wanted, in their blocks, of which those that are wanted as a whole stay the same."""
    selected: list[Block] = []
    for block in blocks:
        indices = [index for index, number in enumerate(block.numbers) if is_wanted(number)]
        if len(indices) == len(block.numbers):
            selected.append(block)
        elif indices:
            selected.append(Block(tuple(block.numbers[index] for index in indices), hfta.take(block.state, indices)))
    return selected


def group_key(config: Mapping[str, Any], nonfusible: Iterable[str]) -> tuple[Any, ...]:
    """A key that is equal for equal names and equal non-fusible values; unlike in Python, 1 and True differ."""
    fixed = {name: (type(config[name]), config[name]) for name in nonfusible if name in config}
    return frozenset(config), *fixed.items()


def with_keys(state: Any, other: Any) -> Any:
    """The state with the keys of another: all noise of what members carry is their own, too."""

    def kept(path: optree.PyTreeAccessor, leaf: Tensor, key: Tensor) -> Tensor:
        return key if path.codify().endswith((".keys", "['keys']")) and key.dtype == torch.int64 else leaf

    # Steps with more than one model may have states of their own.
    carry = {"carry": optree.tree_map_with_accessor(kept, state.carry, other.carry)} if hasattr(state, "carry") else {}
    return state._replace(keys=other.keys, **carry)


class Jobs:
    """All arrays that train, by one executor."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.under_way: dict[int, tuple[Group, Sequence[Member], int, float | None]] = {}
        """Of each array, by the number of its call: group, members, epochs to train, and seconds as of :meth:`start`."""

    @property
    def free(self) -> int:
        """The number of free workers; negative if arrays that were halved wait for some."""
        return self.executor.count - len(self.under_way)

    @property
    def members(self) -> set[int]:
        """The members that train."""
        return {member.number for _, members, _, _ in self.under_way.values() for member in members}

    def start(self, group: Group, members: Sequence[Member], epochs: int, timeout: float | None) -> None:
        """Have an array trained, which ends with the first epoch after some seconds."""
        self.under_way[group.train(self.executor, members, epochs, timeout)] = group, members, epochs, timeout

    def wait(self) -> tuple[Group, Sequence[Member], Any]:
        """Wait until any array has trained, or half of one that failed; its result is a Segment, or one member's error."""
        while True:
            call, answer = self.executor.wait()
            group, members, epochs, timeout = self.under_way.pop(call)
            if not isinstance(answer, Exception) or len(members) == 1:
                return group, members, answer
            half = -(-len(members) // 2)
            if hfta.run.is_out_of_memory(answer):
                text = f"an array of {len(members)} members ran out of memory; arrays of {half} are trained instead"
                warnings.warn(text, stacklevel=2)
                group.limit = half
            answer.__traceback__ = None
            for part in (members[:half], members[half:]):
                self.start(group, part, epochs, timeout)

    def stop(self) -> None:
        """Forget the arrays that train."""
        self.under_way.clear()
        self.executor.forget()
