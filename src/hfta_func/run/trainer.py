"""What trains an array, a segment at a time: the contract, and the trainer that uses this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hfta_func._torch import original
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Metrics
from hfta_func.run.running import Running
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState

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
        self.step, self._batches, self.loader = step, batches, loader
        # A profile replaces the step that is called, and has no status.
        self._given = step
        self._left: Iterator[Any] | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return getattr(self._given, "status", "eager: not a training step")

    def follow(self, loader: Iterable[Any]) -> None:
        """See :class:`Trainer`."""
        self._left, self._batches, self.loader = None, loader, loader

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
        self._left, self._batches = None, self.loader
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
