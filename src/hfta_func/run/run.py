"""A run: everything that follows the members of an array from its first step to its last."""

from __future__ import annotations

import itertools
import random as python_random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import optree
import torch

from hfta_func._torch import original
from hfta_func._tree import concat, followed, leaves, take, tree_map, where
from hfta_func._types import SIGNS, direction_of
from hfta_func.errors import BatchError, CheckpointError, StateError
from hfta_func.files import checkpoint
from hfta_func.files.atomic import PathLike
from hfta_func.rules import _choice
from hfta_func.rules._measured import choices
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import Evaluation, Running
from hfta_func.run.history import Callback, History, Metrics, Mode, is_better, present, widened
from hfta_func.run.row_sampling import is_dataset
from hfta_func.run.trainer import Members
from hfta_func.step.batch import is_table
from hfta_func.step.state import TrainState, restart


class Run(Members):
    """The members of an array with their history and best epochs, which change together.

    ``evaluate`` is a function of the state whose metrics are recorded after each epoch, and ``sums`` names metrics of steps
    that are summed over an epoch.
    """

    def __init__(
        self,
        state: TrainState,
        loader: Iterable[Any],
        best: Best | None = None,
        evaluate: Callable[[TrainState], Metrics] | None = None,
        sums: Collection[str] = (),
    ):
        if is_table(loader) or is_dataset(loader):
            cure = "pass an iterable over batches, such as an ArrayLoader, or a DataLoader or DatasetLoader of the data"
            raise BatchError(f"the loader is a {type(loader).__qualname__}, which does not yield batches; {cure}")
        if isinstance(loader, ArrayLoader):
            # Workers go on from its position.
            loader.leave()
        # What a loader has besides iteration is optional.
        has_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        super().__init__(state, loader if has_position else Drawn(loader))
        self.history, self.best, self.evaluate, self.sums = History(state.keys), best, evaluate, sums

    def begin_epoch(self, step: Any = None) -> None:
        """Tell samplers that shuffle by the number of the epoch what it is, and users what a ``step`` does not see."""
        getattr(original(step), "warn_if_changed", lambda: None)()
        if self.running.batches == 0:
            self.state = restart(self.state)
        for owner in _samplers(self.loader):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(len(self.history))

    def end_epoch(self) -> Metrics:
        """Record the metrics of an epoch, and return them; raises a ValueError if it had no batch."""
        if self.running.batches == 0:
            cure = "pass an iterable that yields its batches in every epoch, and no batch_size above the number of rows"
            raise ValueError(f"the loader has no batch; {cure}")
        history, means = self.history, self.running.means(self.sums)
        further: Any = {} if self.evaluate is None else self.evaluate(self.state)
        if written := getattr(self.evaluate, "written", {}):
            self.state = self.state._replace(buffers={**self.state.buffers, **written})
        if hidden := means.keys() & further.keys():
            raise ValueError(f"evaluate returned '{min(hidden)}', which the step reports too; give it another name")
        metrics = {name: value.detach().cpu() for name, value in (means | further).items()}
        if unknown := [name for name in self.sums if name not in metrics]:
            raise ValueError(f"sums names '{unknown[0]}', but step and evaluate report {', '.join(sorted(metrics))}")
        members, width = history.members, len(history.seeds)
        history.epochs.append({name: widened(value, members, len(members), width) for name, value in metrics.items()})
        history.failures += self.running.failures(history)
        self.running = Running()
        if isinstance(self.loader, Drawn):
            self.loader.end_epoch()
        if self.best is not None:
            self.best.note(self.state, history)
        return metrics

    def follow(self, callback: Callback) -> None:
        """Call a callback and go on with the state that it returns, if any."""
        with followed(self.state.keys) as places_of:
            members = callback(self.state, self.history)
            if members is None:
                return
            places = places_of(members.keys)
        self.state, positions = members, self.history.follow(members.keys, places)
        if positions is not None:
            self._move(positions)
            if self.best is not None:
                self.best.follow(positions, members)

    def _move(self, positions: list[int]) -> None:
        """Have loader and evaluation follow the members, which were at ``positions`` before."""
        if isinstance(self.evaluate, Evaluation):
            self.evaluate = self.evaluate.follow(positions, self.state.keys)
        if isinstance(self.loader, ArrayLoader):
            since = self.history.since[self.history.members].tolist()
            starts = [self.loader.epoch - len(self.history) + epoch for epoch in since]
            self.loader = self.loader.follow(positions, self.state.keys, starts)

    def state_dict(self) -> dict[str, Any]:
        """What a file holds of the run besides the state."""
        held = {"history": self.history.state_dict(), "running": self.running.state_dict()}
        held |= {"loader": self.loader.state_dict(), "lowerings": choices()}
        return {"run": held if self.best is None else {**held, "best": self.best.state_dict()}}

    def load(self, path: PathLike) -> None:
        """Go on from a file; the state so far gives structure and device."""
        like, count = self.state, len(self.state.keys)
        self.state, metadata = checkpoint.read(path, like)
        if not isinstance(metadata, dict) or "run" not in metadata:
            cure = "start from it with fit(step, load(path, like=state), ...) and pass another path as resume"
            raise CheckpointError(f"{path} holds a state but no run; {cure}")
        held = metadata["run"]
        self.history.load_state_dict(held["history"])
        # Callbacks add members after an epoch only.
        began = self.history.seeds[self.history.since == 0].tolist()
        if began != like.keys.tolist():
            text = f"{path} holds a run with seeds {began} but the state has {like.keys.tolist()}"
            raise StateError(f"{text}; use a file of its own for every run, or remove this one to start again")
        self.running.load_state_dict(held["running"], like.keys.device)
        if self.best is not None:
            if "best" not in held:
                raise CheckpointError(f"{path} holds a run that was begun without restore_best; go on without it, too")
            self.best.load_state_dict(held["best"], self.state)
        if held["loader"] is not None:
            self.loader.load_state_dict(held["loader"])
        if isinstance(self.loader, Drawn):
            self.loader.skipped = self.running.batches
        # Files of earlier versions have none.
        _choice.adopt(held.get("lowerings", {"rows": {}}), as_worker=False)
        positions = [number if number < count else -1 for number in self.history.members.tolist()]
        if positions != [*range(count)]:
            self._move(positions)


class Drawn:
    """A loader without a position, which repeats an epoch by the states of the generators that it draws from."""

    def __init__(self, loader: Iterable[Any]):
        self.loader, self.skipped = loader, 0
        self._start: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._start = self._states()
        # Batches that were seen before a run was broken off.
        skipped, self.skipped = self.skipped, 0
        return itertools.islice(self.loader, skipped, None)

    def end_epoch(self) -> None:
        """Note that the next epoch is drawn from the states that the generators have from now on."""
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        """The states at the start of the epoch."""
        return self._states() if self._start is None else self._start

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators back to the states of :meth:`state_dict`."""
        for generator, state in zip(self._generators(), state_dict["generators"], strict=True):
            generator.set_state(state.cpu())
        # Files of earlier versions have those of PyTorch alone.
        if "python" in state_dict:
            version, words, gauss = state_dict["python"]
            python_random.setstate((version, (*words,), gauss))
        if "numpy" in state_dict and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state((*state_dict["numpy"],))

    def _states(self) -> dict[str, Any]:
        states = {"generators": [generator.get_state() for generator in self._generators()]}
        if numpy := sys.modules.get("numpy"):
            kind, words, *others = numpy.random.get_state()
            states["numpy"] = [kind, words.tolist(), *others]
        return {**states, "python": python_random.getstate()}

    def _generators(self) -> list[torch.Generator]:
        held = [torch.default_generator, *(getattr(owner, "generator", None) for owner in _samplers(self))]
        # PyTorch's own, and those that a DataLoader and its samplers have; several may hold the same one.
        return [*dict.fromkeys(generator for generator in held if isinstance(generator, torch.Generator))]


def _samplers(loader: Any) -> list[Any]:
    """A loader, and the data set and the samplers that one of PyTorch has."""
    loader = loader.loader if isinstance(loader, Drawn) else loader
    batches = getattr(loader, "batch_sampler", None)
    inner = (getattr(loader, name, None) for name in ("dataset", "sampler"))
    return [loader, *inner, batches, getattr(batches, "sampler", None)]


class Best:
    """The state of each member after its own best epoch, by the name of a metric, or a pair of it and its mode."""

    def __init__(self, metric: str | tuple[str, Mode]):
        self._metric, mode = (metric, "min") if isinstance(metric, str) else metric
        self._sign = SIGNS[direction_of(mode)]
        self._state: Any = None
        self._value = torch.empty(0)

    def note(self, state: TrainState, history: History) -> None:
        """Keep the members whose last epoch was their best."""
        value = present(history, self._metric)[-1].double()
        if self._state is None:
            # Copies, because a step with donate=True writes the state.
            self._state, self._value = tree_map(torch.clone, state), value
        better = is_better(value, self._value, self._sign)
        self._state = where(better.to(state.active.device), state, self._state)
        self._value = torch.where(better, value, self._value)

    def follow(self, positions: list[int], state: TrainState) -> None:
        """Go on with the members of ``state``, which were at ``positions`` before; -1 for new ones."""
        if self._state is not None:
            count = len(self._value)
            members = [count + number if place < 0 else place for number, place in enumerate(positions)]
            self._state = take(concat([self._state, state]), members)
            self._value = torch.cat([self._value, self._value.new_full((len(positions),), torch.nan)])[members]

    def restored(self, state: TrainState) -> TrainState:
        """The members as of their best epochs; who is active stays as it is."""
        return state if self._state is None else self._state._replace(active=state.active)

    def state_dict(self) -> dict[str, Any] | None:
        """Value and tensors of the best epochs."""
        return None if self._state is None else {"value": self._value, "leaves": leaves(self._state)}

    def load_state_dict(self, held: Any, like: TrainState) -> None:
        """Restore what :meth:`state_dict` returned."""
        if held is not None:
            moved = [leaf.to(to.device, to.dtype) for leaf, to in zip(held["leaves"], leaves(like), strict=True)]
            structure = optree.tree_structure(like)  # pyright: ignore[reportArgumentType]
            self._state, self._value = optree.tree_unflatten(structure, moved), held["value"]
