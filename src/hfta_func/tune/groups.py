"""Members of one architecture: their states, and the number that trains together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

import hfta_func as hfta
from hfta_func.tune.array import Array, Build, Trainer, moved


class Block(NamedTuple):
    """A stacked state, and the numbers of its members in order."""

    numbers: tuple[int, ...]
    state: Any


class Group:
    """Members that can share an array, because their values of all non-fusible names are equal."""

    def __init__(self, build: Build, fixed: Mapping[str, Any], limit: int | Literal["auto"]):
        self.fixed = dict(fixed)
        self.limit: int | Literal["auto"] = limit
        self.configs: dict[int, Mapping[str, Any]] = {}
        """The configurations of its members; those that are in no block have not been made yet."""
        self.blocks: list[Block] = []
        self.trainer = Trainer(build, fixed)
        # By limit of workers, a smaller one where arrays of that size ran out of memory.
        self.halved: dict[int, int] = {}
        self._keys: dict[int, Tensor] = {}

    @property
    def array(self) -> Array:
        """The array whose step, loader and evaluation train the members; its state is not used."""
        assert self.trainer.array is not None
        return self.trainer.array

    @property
    def is_shared(self) -> bool:
        """Whether all members see the same batches, so that only members in the same epoch can share an array."""
        return not isinstance(self.array.loader, hfta.ArrayLoader) or self.array.loader.shared

    def make(self, numbers: Iterable[int]) -> dict[int, Exception]:
        """Make those members that have no state yet; returns the errors of those that cannot be made."""
        made = {number for block in self.blocks for number in block.numbers}
        configs = {number: self.configs[number] for number in numbers if number not in made}
        if not configs:
            return {}
        try:
            array = self._built(configs)
        except Exception as error:
            if len(configs) == 1:
                return dict.fromkeys(configs, error)
            missing, half = list(configs), len(configs) // 2
            return self.make(missing[:half]) | self.make(missing[half:])
        block = self._checked(tuple(configs), array)
        if not self.trainer.first:
            self.trainer.first = dict(next(iter(configs.values())))
        elif _shapes(block.state) != _shapes(self.array.state):
            raise hfta.errors.StackError(self._culprit(next(iter(configs.values()))))
        self.blocks.append(block)
        return {}

    def make_like(self, configs: Mapping[int, Mapping[str, Any]], read: Callable[[Any], Any]) -> None:
        """Make members that were saved: ``read(like)`` returns their state."""
        block = self._checked(tuple(configs), self._built(configs))
        self.trainer.first = self.trainer.first or dict(next(iter(configs.values())))
        self.blocks.append(Block(block.numbers, read(block.state)))

    def _built(self, configs: Mapping[int, Mapping[str, Any]]) -> Any:
        rows = list(configs.values())
        names = [name for name in rows[0] if name not in self.fixed]
        try:
            return self.trainer.build(dict(self.fixed), {name: [row[name] for row in rows] for name in names})
        except KeyError as error:
            name = error.args[0] if error.args else None
            if name in names:
                raise KeyError(
                    f"build reads fixed['{name}'], which members differ in; pass nonfusible=['{name}'] besides"
                ) from error
            raise

    def _checked(self, numbers: tuple[int, ...], made: Any) -> Block:
        if not isinstance(made, Array):
            raise TypeError(
                f"build returned a {type(made).__qualname__}; return tune.Array(step, state, loader, evaluate)"
            )
        count = hfta.num_models(made.state)
        if count != len(numbers):
            raise hfta.errors.StateError(
                f"build returned a state of {count} models for {len(numbers)} members; give it one model for each of "
                f"members['seed']"
            )
        loader, step = made.loader, inspect.unwrap(made.step)
        if isinstance(loader, hfta.ArrayLoader) and not loader.shared:
            if len(loader.keys) != count:
                raise hfta.errors.StateError(
                    f"build returned a loader for {len(loader.keys)} models and a state of {count}; give both the seeds "
                    f"members['seed']"
                )
            self._keys |= dict(zip(numbers, loader.keys, strict=True))
        elif (
            not getattr(getattr(step, "options", None), "collect", None)
            and getattr(step, "batch_dims", None) is not None
        ):
            raise hfta.errors.StateError(
                f"build returned a {type(loader).__qualname__} for a step whose members have batches of their own; return an "
                f"ArrayLoader, or make the step with batch_dims=None"
            )
        if self.trainer.array is None:
            # Of its state, the structure and the device are needed.
            self.trainer.array = made._replace(state=hfta.take(made.state, [0]))
        return Block(numbers, made.state)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget members."""
        gone = set(numbers)
        left = [[index for index, number in enumerate(block.numbers) if number not in gone] for block in self.blocks]
        self.blocks = [_selected(block, kept) for block, kept in zip(self.blocks, left, strict=True) if kept]
        self._keys = {number: key for number, key in self._keys.items() if number not in gone}
        self.configs = {number: config for number, config in self.configs.items() if number not in gone}

    def gather(self, numbers: Sequence[int]) -> Any:
        """The state of members, in the order of their numbers."""
        numbers, device = tuple(numbers), self.array.state.keys.device
        states: list[Any] = []
        gathered: list[int] = []
        for block in self.blocks:
            if indices := [index for index, number in enumerate(block.numbers) if number in numbers]:
                part = _selected(block, indices)
                states.append(moved(part.state, device))
                gathered += part.numbers
        state = hfta.concat(states) if len(states) > 1 else states[0]
        order = [gathered.index(number) for number in numbers]
        return state if order == [*range(len(order))] else hfta.take(state, order)

    def put(self, numbers: Sequence[int], state: Any) -> None:
        """Replace the state of some members."""
        keys, configs = self._keys, self.configs
        self.drop(numbers)
        self._keys, self.configs = keys, configs
        self.blocks.append(Block(tuple(numbers), state))

    def arguments(
        self, numbers: Sequence[int], epoch: Mapping[int, int], epochs: int, limit: int, seconds: float | None
    ) -> dict[str, Any]:
        """The arguments of the trainer to train members together for some more epochs, on a worker with a limit."""
        return {
            "state": self.gather(numbers),
            "keys": None if self.is_shared else torch.stack([self._keys[number] for number in numbers]),
            "starts": [epoch[number] for number in numbers],
            "epochs": epochs,
            "size": self._size(len(numbers), limit),
            "seconds": seconds,
        }

    def take_back(self, numbers: Sequence[int], state: Any, alive: Iterable[int]) -> None:
        """Replace the state of members that have trained, without those that were dropped meanwhile."""
        alive = set(alive)
        indices = [index for index, number in enumerate(numbers) if number in alive]
        if indices:
            self.put(*_selected(Block(tuple(numbers), state), indices))
            # The states of members that do not train wait in the host's memory, which is larger than a device's.
            for index, block in enumerate(self.blocks[:-1]):
                host_state = moved(block.state, torch.device("cpu"))
                if host_state is not block.state:
                    self.blocks[index] = block._replace(state=host_state)

    def _size(self, count: int, limit: int) -> int:
        """The size of an array that trains ``count`` members: a power of two for compiled steps, which compile per size."""
        if isinstance(self.array.step, hfta.step.TrainStep):
            return count
        most = [*([limit] if limit else []), *([self.limit] if isinstance(self.limit, int) else [])]
        return min([1 << (count - 1).bit_length(), *most])

    def capacity(self, numbers: Sequence[int], limit: int, epochs: int) -> int:
        """The largest number of members that train together for some epochs, of ``numbers``, on a worker with a limit.

        With limit 0, there is no such limit, and ``max_models="auto"`` is measured once.
        """
        wanted = len(numbers)
        if limit:
            most = min(wanted, self.halved.get(limit, limit))
            return min(most, self.limit) if isinstance(self.limit, int) else most
        if self.limit == "auto":
            sizes = [size for size in (1, 4, 16) if size <= wanted]
            if len(sizes) == 1:
                return 1 if wanted == 1 else min(wanted, 4)
            measured = [number for block in self.blocks for number in block.numbers if number in numbers]
            state, loader = self.gather(measured), self.array.loader
            if isinstance(loader, hfta.ArrayLoader) and not loader.shared:
                loader = loader.of_members(torch.stack([self._keys[number] for number in measured]))
            steps = epochs * len(loader) if isinstance(loader, Sized) else None
            plan = hfta.plan(self.array.step, state, next(iter(loader)), limit=wanted, sizes=sizes, steps=steps)
            self.limit = max(1, plan.chunk_size or plan.num_models)
        if isinstance(self.limit, str) or wanted <= self.limit:
            return wanted
        # Arrays of equal sizes, not full ones and a small one, unless each size is compiled.
        turns = -(-wanted // self.limit)
        return -(-wanted // turns) if isinstance(self.array.step, hfta.step.TrainStep) else self.limit

    def _culprit(self, config: Mapping[str, Any]) -> str:
        """The error for members of other shapes; it names the value with which alone the first member's shapes change."""
        for name, value in config.items():
            if name != "seed" and value != self.trainer.first[name]:
                made = self._built({0: {**self.trainer.first, name: value}})
                if _shapes(made.state) != _shapes(self.array.state):
                    first = self.trainer.first[name]
                    return (
                        f"'{name}' decides the shapes of members, which differ for {first!r} and {value!r}; pass "
                        f"nonfusible=['{name}'] among the others"
                    )
        return "several names together decide the shapes of members; pass them as nonfusible"


def _selected(block: Block, indices: Sequence[int]) -> Block:
    """The members at some indices of a block."""
    if len(indices) == len(block.numbers):
        return block
    return Block(tuple(block.numbers[index] for index in indices), hfta.take(block.state, indices))


def group_key(config: Mapping[str, Any], nonfusible: Iterable[str]) -> tuple[Any, ...]:
    """A key that is equal for equal names and equal non-fusible values; unlike in Python, 1 and True differ."""
    fixed = {name: (type(config[name]), config[name]) for name in nonfusible if name in config}
    return frozenset(config), *fixed.items()


def _shapes(state: Any) -> Any:
    return optree.tree_structure(state), [(leaf.shape[1:], leaf.dtype) for leaf in optree.tree_leaves(state)]
