"""Members of one architecture: who is where, who trains with whom, and what becomes of those that fail."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

import hfta_func as hfta

Build = Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], "Array"]
"""``build(fixed, members) -> Array``: makes the members of an array."""


class Array(NamedTuple):
    """What trains an array: the arguments of :func:`hfta_func.fit`.

    Args:
        step: A training step, compiled or not, that works for any number of members.
        state: ``step.init(...)`` of the members asked for, in their order.
        loader: An :class:`~hfta_func.ArrayLoader` for these members, or, for steps with ``batch_dims=None``, any
            iterable over the batches of an epoch.
        evaluate: ``evaluate(state) -> metrics`` after every epoch, for any number of members.
        model: Any module of the architecture, which exported models are made of.
    """

    step: Callable[[Any, Any], tuple[Any, dict[str, Tensor]]]
    state: Any
    loader: Iterable[Any]
    evaluate: Callable[[Any], dict[str, Tensor]] | None = None
    model: nn.Module | None = None


class Block(NamedTuple):
    """A stacked state, and the numbers of its members in order."""

    numbers: tuple[int, ...]
    state: Any


class Trained(NamedTuple):
    """What a segment yields: metrics by member and epoch, seconds by member, and the errors of those that failed."""

    metrics: dict[int, list[dict[str, float]]]
    seconds: dict[int, float]
    errors: dict[int, Exception]
    interrupted: bool


class Group:
    """Members that can share an array, because their values of all non-fusible names are equal."""

    def __init__(self, build: Build, fixed: Mapping[str, Any], limit: int | Literal["auto"]):
        self.fixed = dict(fixed)
        self.limit: int | Literal["auto"] = limit
        self.blocks: list[Block] = []
        self._build = build
        self._array: Array | None = None
        self._first: dict[str, Any] = {}
        self._keys: dict[int, Tensor] = {}

    @property
    def array(self) -> Array:
        """What trains the members; its state is not used."""
        assert self._array is not None
        return self._array

    @property
    def is_shared(self) -> bool:
        """Whether all members see the same batches, so that only members in the same epoch can share an array."""
        return not isinstance(self.array.loader, hfta.ArrayLoader) or self.array.loader.shared

    def add(self, configs: Mapping[int, Mapping[str, Any]]) -> dict[int, Exception]:
        """Make members, by number and configuration; returns the errors of those that cannot be made."""
        try:
            made = self._built(configs)
        except Exception as error:
            if len(configs) == 1:
                return dict.fromkeys(configs, error)
            numbers = list(configs)
            halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
            failed: dict[int, Exception] = {}
            for half in halves:
                failed |= self.add({number: configs[number] for number in half})
            return failed
        block = self._checked(tuple(configs), made)
        if not self._first:
            self._first = dict(next(iter(configs.values())))
        elif _shapes(block.state) != _shapes(self.array.state):
            raise hfta.StackError(self._culprit(next(iter(configs.values()))))
        self.blocks.append(block)
        return {}

    def make_like(self, configs: Mapping[int, Mapping[str, Any]], read: Callable[[Any], Any]) -> None:
        """Make members whose state is then ``read(like)``, for members that were saved."""
        block = self._checked(tuple(configs), self._built(configs))
        self._first = self._first or dict(next(iter(configs.values())))
        self.blocks.append(Block(block.numbers, read(block.state)))

    def _built(self, configs: Mapping[int, Mapping[str, Any]]) -> Any:
        rows = list(configs.values())
        names = [name for name in rows[0] if name not in self.fixed]
        try:
            return self._build(dict(self.fixed), {name: [row[name] for row in rows] for name in names})
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
            raise hfta.StateError(
                f"build returned a state of {count} models for {len(numbers)} members; give it one model for each of "
                f"members['seed']"
            )
        loader = made.loader
        if isinstance(loader, hfta.ArrayLoader) and not loader.shared:
            if len(loader.keys) != count:
                raise hfta.StateError(
                    f"build returned a loader for {len(loader.keys)} models and a state of {count}; give both the seeds "
                    f"members['seed']"
                )
            self._keys |= dict(zip(numbers, loader.keys, strict=True))
        elif not _takes_shared_batches(made.step):
            raise hfta.StateError(
                f"build returned a {type(loader).__qualname__} for a step whose members have batches of their own; return an "
                f"ArrayLoader, or make the step with batch_dims=None"
            )
        if self._array is None:
            self._array = made
        return Block(numbers, made.state)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget members."""
        gone = set(numbers)
        blocks, self.blocks = self.blocks, []
        for block in blocks:
            self._keep(block, [place for place, number in enumerate(block.numbers) if number not in gone])
        for number in gone:
            self._keys.pop(number, None)

    def _keep(self, block: Block, places: list[int]) -> None:
        if len(places) == len(block.numbers):
            self.blocks.append(block)
        elif places:
            kept = tuple(block.numbers[place] for place in places)
            self.blocks.append(Block(kept, hfta.take(block.state, places)))

    def gather(self, numbers: Sequence[int]) -> Any:
        """The state of some members, in their order."""
        wanted, device = tuple(numbers), self.array.state.keys.device
        parts, found = [], []
        for block in self.blocks:
            if block.numbers == wanted:
                return _moved(block.state, device)
            places = [place for place, number in enumerate(block.numbers) if number in wanted]
            if places:
                part = block.state if len(places) == len(block.numbers) else hfta.take(block.state, places)
                parts.append(_moved(part, device))
                found += [block.numbers[place] for place in places]
        state = hfta.concat(parts) if len(parts) > 1 else parts[0]
        order = [found.index(number) for number in wanted]
        return state if order == [*range(len(order))] else hfta.take(state, order)

    def put(self, numbers: Sequence[int], state: Any) -> None:
        """Replace the state of some members."""
        keys = {number: self._keys[number] for number in numbers if number in self._keys}
        self.drop(numbers)
        self._keys |= keys
        self.blocks.append(Block(tuple(numbers), state))

    def train(self, numbers: Sequence[int], epoch: Mapping[int, int], epochs: int) -> Trained:
        """Train members together for some more epochs; those that raise fail alone, and the others go on without them."""
        try:
            return self._train(numbers, epoch, epochs)
        except Exception as error:
            if len(numbers) == 1:
                return Trained({}, {}, {numbers[0]: error}, False)
            half = -(-len(numbers) // 2)
            if hfta.is_out_of_memory(error):
                warnings.warn(
                    f"an array of {len(numbers)} members ran out of memory; arrays of {half} are trained instead",
                    stacklevel=2,
                )
                self.limit = half
            error.__traceback__ = None
        first = self.train(numbers[:half], epoch, epochs)
        # Ctrl-C ends both.
        second = Trained({}, {}, {}, True) if first.interrupted else self.train(numbers[half:], epoch, epochs)
        return Trained(
            first.metrics | second.metrics,
            first.seconds | second.seconds,
            first.errors | second.errors,
            first.interrupted or second.interrupted,
        )

    def _train(self, numbers: Sequence[int], epoch: Mapping[int, int], epochs: int) -> Trained:
        step, _, loader, evaluate, _ = self.array
        state, count = self.gather(numbers), len(numbers)
        # A step that writes its state must not write what is needed if it fails.
        places = [*range(count)] + [0] * (self._size(count) - count)
        if len(places) > count or getattr(getattr(step, "options", None), "donate", True):
            state = hfta.take(state, places)
        if len(places) > count:
            active = state.active.clone()
            active[count:] = False
            state = state._replace(active=active)
        if isinstance(loader, hfta.ArrayLoader):
            if loader.shared:
                loader.load_state_dict({"epoch": epoch[numbers[0]], "batches": 0})
            else:
                members = [numbers[place] for place in places]
                keys = torch.stack([self._keys[number] for number in members])
                loader = loader.of_members(keys, [epoch[number] for number in members])
        start = time.perf_counter()
        state, history = hfta.fit(step, state, loader, epochs=epochs, evaluate=evaluate, progress=False)
        seconds = time.perf_counter() - start
        if history.interrupted:
            return Trained({}, {}, {}, True)
        if len(places) > count:
            state = hfta.take(state, slice(count))
        self.put(numbers, state)
        self._rest()
        columns = [
            {name: values[:count].tolist() for name, values in found.items() if values.dim() == 1}
            for found in history.epochs
        ]
        metrics = {
            number: [{name: values[place] for name, values in column.items()} for column in columns]
            for place, number in enumerate(numbers)
        }
        return Trained(metrics, dict.fromkeys(numbers, seconds / count), {}, False)

    def _rest(self) -> None:
        """Members that did not train last rest in the host's memory, where there is more than on a device."""
        resting = self.blocks[:-1]
        for place, block in enumerate(resting):
            moved = _moved(block.state, torch.device("cpu"))
            if moved is not block.state:
                self.blocks[place] = block._replace(state=moved)

    def _size(self, count: int) -> int:
        """Members of an array that trains ``count``: compiled steps see few sizes, because each is compiled once."""
        if isinstance(self.array.step, hfta.TrainStep):
            return count
        size = 1
        while size < count:
            size *= 2
        return min(size, self.limit) if isinstance(self.limit, int) else size

    def capacity(self, wanted: int) -> int:
        """The largest number of members that train together, if ``wanted`` do; measured once where that is "auto"."""
        if self.limit == "auto":
            sizes = [size for size in (1, 4, 16) if size <= wanted]
            if len(sizes) == 1:
                return 1 if wanted == 1 else min(wanted, 4)
            numbers = [number for block in self.blocks for number in block.numbers][:wanted]
            state = self.gather(numbers)
            loader = self.array.loader
            if isinstance(loader, hfta.ArrayLoader) and not loader.shared:
                loader = loader.of_members(torch.stack([self._keys[number] for number in numbers]))
            found = hfta.plan(self.array.step, state, next(iter(loader)), limit=wanted, sizes=sizes)
            self.limit = max(1, found.chunk_size or found.num_models)
        if isinstance(self.limit, str) or wanted <= self.limit:
            return wanted
        # Arrays of like sizes, not full ones and a small one, unless each size is compiled.
        turns = -(-wanted // self.limit)
        return -(-wanted // turns) if isinstance(self.array.step, hfta.TrainStep) else self.limit

    def _culprit(self, config: Mapping[str, Any]) -> str:
        """The name whose value makes members of other shapes: the first member's with this value is of other shapes, too."""
        for name, value in config.items():
            if name != "seed" and value != self._first[name]:
                made = self._built({0: {**self._first, name: value}})
                if _shapes(made.state) != _shapes(self.array.state):
                    return (
                        f"'{name}' decides the shapes of members, which differ for {self._first[name]!r} and {value!r}; pass "
                        f"nonfusible=['{name}'] among the others"
                    )
        return "several names together decide the shapes of members; pass them as nonfusible"


def _moved(state: Any, device: torch.device) -> Any:
    """A state on a device: the same one if it is there already."""
    if all(leaf.device == device for leaf in optree.tree_leaves(state)):
        return state
    return optree.tree_map(lambda leaf: leaf.to(device), state)


def _shapes(state: Any) -> Any:
    return optree.tree_structure(state), [(leaf.shape[1:], leaf.dtype) for leaf in optree.tree_leaves(state)]


def _takes_shared_batches(step: Any) -> bool:
    return getattr(inspect.unwrap(step), "batch_dims", None) is None
