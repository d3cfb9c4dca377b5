"""A run: everything that follows the members of an array from its first step to its last."""

from __future__ import annotations

import itertools
import random as python_random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hfta_func._tree import followed
from hfta_func.errors import BatchError, CheckpointError, StateError
from hfta_func.files import checkpoint
from hfta_func.files.atomic import PathLike
from hfta_func.rules import _choice
from hfta_func.rules._measured import choices
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import Evaluation
from hfta_func.run.history import Best, Callback, History, Metrics
from hfta_func.run.row_sampling import is_dataset
from hfta_func.run.running import Running
from hfta_func.step.batch import is_table
from hfta_func.step.state import TrainState


class Run:
    """The state, loader, history and best epochs of an array, which change together.

    ``running`` has sums of the current epoch's metrics, ``batches`` is what is left of the first epoch, and ``evaluate`` is a
    function of the state whose metrics are recorded after each.
    """

    def __init__(
        self,
        state: TrainState,
        loader: Iterable[Any],
        best: Best | None = None,
        evaluate: Callable[[TrainState], Metrics] | None = None,
    ):
        check_state(state)
        is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if is_table(loader) or is_dataset(loader) or not is_iterable:
            raise BatchError(
                f"the loader is a {type(loader).__qualname__}, which does not yield batches; pass an iterable over batches, "
                f"such as ArrayLoader(data, batch_size, seeds=seeds), or a DatasetLoader or DataLoader of a data set"
            )
        if isinstance(loader, ArrayLoader):
            # Workers go on from its position.
            loader.leave()
        # What a loader has besides iteration is optional.
        self.state, self.best, self.evaluate = state, best, evaluate
        self.loader: Any = loader if isinstance(loader, Sequence) or _has_position(loader) else Drawn(loader)
        self.batches: Iterable[Any] = self.loader
        self.history, self.running = History(state.keys), Running()

    def end_epoch(self) -> Metrics:
        """Record the metrics of an epoch, and return them; raises a ValueError if it had no batch."""
        if self.running.batches == 0:
            raise ValueError(
                "the loader has no batch; pass an iterable that yields its batches in every epoch, and no larger "
                "batch_size than there are rows if it has drop_last"
            )
        metrics = self.running.close(self.history, {} if self.evaluate is None else self.evaluate(self.state))
        self.running = Running()
        if isinstance(self.loader, Drawn):
            self.loader.end_epoch()
        if self.best is not None:
            self.best.note(self.state, self.history)
        return metrics

    def follow(self, callback: Callback) -> bool:
        """Call a callback and go on with the state that it returns, if any; returns whether its members are others."""
        with followed(self.state.keys) as places_of:
            members = callback(self.state, self.history)
            if members is None:
                return False
            check_state(members)
            places = places_of(members.keys)
        self.state, positions = members, self.history.follow(members.keys, places)
        if positions is None:
            return False
        self.loader = self._loader_of(positions)
        if self.best is not None:
            self.best.follow(positions, members)
        return True

    def _loader_of(self, positions: list[int]) -> Any:
        """The loader of the members that the array has now, which were at ``positions`` before; evaluation follows, too."""
        if isinstance(self.evaluate, Evaluation):
            self.evaluate = self.evaluate.follow(positions, self.state.keys)
        if not isinstance(self.loader, ArrayLoader):
            return self.loader
        since = self.history.since[self.history.members].tolist()
        starts = [self.loader.epoch - len(self.history) + epoch for epoch in since]
        return self.loader.follow(positions, self.state.keys, starts)

    @property
    def result(self) -> TrainState:
        """The state, with members as of their best epochs if these are kept."""
        return self.state if self.best is None else self.best.restored(self.state)

    def state_dict(self) -> dict[str, Any]:
        """What a file holds of the run besides the state."""
        position = self.loader.state_dict() if _has_position(self.loader) else None
        held = {"history": self.history.state_dict(), "running": self.running.state_dict(), "loader": position}
        held |= {"epochs": "of each member", "lowerings": choices()}
        return {"run": held if self.best is None else {**held, "best": self.best.state_dict()}}

    def load(self, path: PathLike) -> None:
        """Go on from a file; the state so far gives structure and device."""
        like = self.state
        self.state, metadata = checkpoint.read(path, like)
        if not isinstance(metadata, dict) or "run" not in metadata:
            raise CheckpointError(
                f"{path} holds a state but no run; start from it with fit(step, load(path, like=state), ...) and pass "
                f"another path as resume"
            )
        held, count = metadata["run"], len(like.keys)
        seeds = held["history"].get("seeds", self.state.keys)
        # Callbacks add members after an epoch only.
        began = seeds[held["history"].get("since", torch.zeros_like(seeds)) == 0].tolist()
        if began != like.keys.tolist():
            raise StateError(
                f"{path} holds a run with seeds {began} but the state has {like.keys.tolist()}; use a file of its own for "
                f"every run, or remove this one to start again"
            )
        if isinstance(self.loader, ArrayLoader) and self.loader.rests and "epochs" not in held:
            raise StateError(
                f"{path} is of an earlier version, in which members with rows of unequal number had epochs of one length; "
                f"start again with another file"
            )
        self.history.load_state_dict(held["history"])
        self.running.load_state_dict(held["running"], like.keys.device)
        if self.best is not None:
            if "best" not in held:
                raise CheckpointError(f"{path} holds a run that was begun without restore_best; go on without it, too")
            self.best.load_state_dict(held["best"], self.state)
        if _has_position(self.loader) and held["loader"] is not None:
            self.loader.load_state_dict(held["loader"])
        # Files of earlier versions have none.
        _choice.adopt(held.get("lowerings", {"rows": {}}), as_worker=False)
        if isinstance(self.loader, Drawn) or held["loader"] is None or not _has_position(self.loader):
            self.batches = itertools.islice(self.loader, self.running.batches, None)
            return
        positions = [number if number < count else -1 for number in self.history.members.tolist()]
        if positions != [*range(count)]:
            self.loader = self._loader_of(positions)
        self.batches = self.loader


class Drawn:
    """A loader without a position, which repeats an epoch by the states of the generators that it draws from."""

    def __init__(self, loader: Iterable[Any]):
        self._loader = loader
        self._start: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._start = self._states()
        return iter(self._loader)

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
        batches = getattr(self._loader, "batch_sampler", None)
        owners = self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None)
        held = [torch.default_generator, *(getattr(owner, "generator", None) for owner in owners)]
        # PyTorch's own, and those that a DataLoader and its samplers have; several may hold the same one.
        return [*dict.fromkeys(generator for generator in held if isinstance(generator, torch.Generator))]


def check_state(state: Any) -> None:
    """Raise a StateError unless a state has what a run needs."""
    # Steps with more than one model, such as a GAN's, have states of their own.
    if not all(hasattr(state, name) for name in ("keys", "step", "active")):
        raise StateError(
            f"expected a TrainState, or another state with keys, step and active, but got {type(state).__qualname__}; make "
            f"one with step.init(...)"
        )


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
