"""What trains an array, a segment at a time: the contract, this process, and members that rest meanwhile."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hfta_func._torch import original
from hfta_func._tree import put, take
from hfta_func.errors import HFTAError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Metrics
from hfta_func.run.running import Running
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState


def renumbered(error: BaseException, members: Sequence[int]) -> BaseException:
    """The error of a part, whose members have these numbers in the whole array, as one of the whole."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda match: f"model {members[int(match[1])]}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error


Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
SegmentEnd = tuple[TrainState, bool]
"""The state after a segment, and whether the epoch has ended."""


END = sys.maxsize
"""The batch at which a segment to the end of the epoch stops."""


class SegmentHooks(NamedTuple):
    """Functions that are called while a segment trains."""

    begin: Callable[[], None] = lambda: None  # before the first step, when a loader knows its position
    tick: Callable[[], object] = lambda: None  # after each step
    stopped: Callable[[], bool] = lambda: False  # whether to stop after the current step


class Trainer(Protocol):
    """What trains an array for :func:`fit`, segment by segment."""

    kept: Tensor | None = None
    """The members of the loader's batches that are trained; all if None."""

    @property
    def status(self) -> str:
        """What trains, how, and why."""
        ...

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """Train on the next batches of the epoch, up to its end or batch ``until``; metrics are added to ``running``."""
        ...

    def follow(self, loader: Any) -> None:
        """Go on with another loader, for other members, between two epochs."""
        ...

    def close(self) -> None:
        """Train no more, and give back what was taken to train."""


class LocalTrainer(Trainer):
    """A :class:`Trainer` that trains in this process: on ``batches`` in the first epoch, and later on those of ``loader``."""

    def __init__(self, step: Step, batches: Iterable[Any], loader: Iterable[Any]):
        self.step, self._batches, self._loader = step, batches, loader
        # A profile replaces the step that is called, and has no status.
        self._given = step
        self._left: Iterator[Any] | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return getattr(self._given, "status", "eager: not a training step")

    @property
    def position(self) -> dict[str, int] | None:
        """The position of an :class:`ArrayLoader`."""
        return self._loader.state_dict() if isinstance(self._loader, ArrayLoader) else None

    def follow(self, loader: Iterable[Any]) -> None:
        """See :class:`Trainer`."""
        self._left, self._batches, self._loader = None, loader, loader

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        self._left = self._begin() if self._left is None else self._left
        for batch in self._left:
            hooks.begin()
            # A copy, because a step with donate=True writes the state.
            active = state.active.clone()
            state, metrics = self.step(state, batch)
            running.add(metrics, active, state.step)
            if state.keys.device.type == "xla":
                # XLA only records operations; without this, an epoch would become one program.
                importlib.import_module("torch_xla").sync()
            hooks.tick()
            if hooks.stopped() or running.batches == until:
                return state, False
        self._left, self._batches = None, self._loader
        return state, True

    def _begin(self) -> Iterator[Any]:
        batches, kept, dims = self._batches, self.kept, getattr(original(self.step), "batch_dims", 0)
        if not isinstance(batches, ArrayLoader):
            left = iter(batches)
        elif kept is not None and not batches.shared and dims == 0:
            # Loads nothing for members that are not trained.
            return batches.iter_of(batches.take(kept))
        else:
            left = batches.iter_of(batches) if batches.rests else iter(batches)
        return left if kept is None else (take_batch(dims, batch, kept) for batch in left)


_FEW = 0.75
"""The share of members at or below which those left are packed: every new number of members is compiled anew."""


def resting(trainer: Trainer, loader: Any, compact: bool) -> Trainer:
    """A trainer by which members rest, where they may; with ``compact`` as a smaller array."""
    return Resting(trainer, loader, compact) if compact or _rests(loader) else trainer


def _rests(loader: Any) -> bool:
    return isinstance(loader, ArrayLoader) and loader.rests


class Resting(Trainer):
    """A :class:`Trainer` by which members rest from the last batch of their own to the end of the epoch.

    They stay as they are meanwhile, as inactive members do. With ``compact``, those that neither rest nor are inactive are
    trained as a smaller array, and put back afterwards.
    """

    def __init__(self, trainer: Trainer, loader: Any, compact: bool):
        self._trainer, self._loader, self._compact = trainer, loader, compact
        # Who was active when the epoch began.
        self._active: Tensor | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return self._trainer.status

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._trainer.close()

    def follow(self, loader: Any) -> None:
        """See :class:`Trainer`."""
        self._trainer.kept, self._loader = None, loader
        self._trainer.follow(loader)

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        while True:
            if self._active is None:
                # A copy, because a step with donate=True writes the state.
                self._active = state.active.clone()
            present, count = self._ahead(self._active)
            if count:
                state, ended = self._piece(state, running, min(until, running.batches + count), hooks, present)
            else:
                self._loader.load_state_dict({"epoch": self._loader.state_dict()["epoch"] + 1, "batches": 0})
                self._trainer.follow(self._loader)
                ended = True
            if ended:
                self._active = None
            if ended or hooks.stopped() or running.batches == until:
                return state, ended

    def _ahead(self, active: Tensor) -> tuple[Tensor, int]:
        """Who has the next batch, and after how many batches one of those that are trained rests; 0 if these all do."""
        if not _rests(self._loader):
            return torch.ones_like(active), END
        # A loader may have begun the first epoch elsewhere than at its first batch.
        done, longest = self._loader.state_dict()["batches"], len(self._loader)
        lengths = torch.tensor(self._loader.lengths, device=active.device)
        present = lengths > done
        edge = min(lengths[present & (active | (not self._compact))].tolist(), default=done)
        return present, END if longest in (done, edge) else edge - done

    def _piece(
        self, state: TrainState, running: Running, until: int, hooks: SegmentHooks, present: Tensor
    ) -> SegmentEnd:
        """Train those that are ``present``, up to a batch before which nobody comes or goes."""
        kept = self._choose(self._active & present) if self._compact and self._active is not None else None
        if kept is not self._trainer.kept:
            self._trainer.kept = kept
            if running.batches > 0 and isinstance(self._loader, ArrayLoader):
                self._loader.load_state_dict(self._loader.state_dict())
                self._trainer.follow(self._loader)
        if kept is None and bool(present.all()):
            return self._trainer.segment(state, running, until, hooks)
        members = torch.arange(len(present), device=present.device) if kept is None else kept
        given = state._replace(active=state.active & present)
        few_running = running.take(members)
        try:
            few, ended = self._trainer.segment(given if kept is None else take(given, kept), few_running, until, hooks)
        except HFTAError as error:
            renumbered(error, members.tolist())
            raise
        running.put(few_running, members, present)
        after = few if kept is None else put(state, kept, few)
        return after._replace(active=torch.where(present, after.active, state.active)), ended

    def _choose(self, wanted: Tensor) -> Tensor | None:
        """The members to train; None for all."""
        chosen = wanted.nonzero().flatten()
        kept = self._trainer.kept
        if not len(chosen) or (
            kept is not None and len(chosen) > _FEW * len(kept) and bool(torch.isin(chosen, kept).all())
        ):
            return kept
        return chosen if len(chosen) <= _FEW * len(wanted) else None
