"""What trains an array, a segment at a time: the contract, and the trainer that uses this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hfta_func._torch import original
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Metrics, Running
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
SegmentEnd = tuple[TrainState, bool]
"""The state after a segment, and whether the epoch has ended."""


class SegmentHooks(NamedTuple):
    """Functions that are called while a segment trains.

    Args:
        begin: Called before the first step, when a loader knows its position.
        tick: Called after each step.
        stopped: Whether to stop after the current step.
    """

    begin: Callable[[], None] = lambda: None
    tick: Callable[[], object] = lambda: None
    stopped: Callable[[], bool] = lambda: False


class Trainer(Protocol):
    """What trains an array for :func:`fit`, segment by segment.

    Attributes:
        kept: The members of the loader's batches that are trained; all if None.
    """

    kept: Tensor | None = None

    @property
    def status(self) -> str:
        """What trains, how, and why."""
        ...

    def segment(self, state: TrainState, running: Running, limit: int | None, hooks: SegmentHooks) -> SegmentEnd:
        """Train on the next batches of the epoch, to its end or up to a number of them.

        Args:
            state: The state to go on from.
            running: The sums of the epoch, to which the metrics are added.
            limit: Number of batches, None for the rest of the epoch.
            hooks: What is called meanwhile.

        Returns:
            The next state, and whether the epoch has ended.
        """
        ...

    def follow(self, loader: Any) -> None:
        """Go on with another loader, for other members, between two epochs."""
        ...

    def close(self) -> None:
        """Train no more, and give back what was taken to train."""


class LocalTrainer(Trainer):
    """A :class:`Trainer` that trains in this process.

    Args:
        step: The training step.
        batches: What is left of the first epoch.
        loader: All later epochs.

    Attributes:
        step: The training step, which another may replace that calls it.
    """

    def __init__(self, step: Step, batches: Iterable[Any], loader: Iterable[Any]):
        self.step, self._batches, self._loader = step, batches, loader
        self._left: Iterator[Any] | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        status = getattr(self.step, "status", "eager: not a training step")
        return status if isinstance(status, str) else "; ".join(f"{name} {one}" for name, one in status.items())

    def follow(self, loader: Iterable[Any]) -> None:
        """See :class:`Trainer`."""
        self._left, self._batches, self._loader = None, loader, loader

    def segment(self, state: TrainState, running: Running, limit: int | None, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        self._left = self._begin() if self._left is None else self._left
        for count, batch in enumerate(self._left, start=1):
            hooks.begin()
            # A copy, because a step with donate=True writes the state.
            active = state.active.clone()
            state, metrics = self.step(state, batch)
            running.add(metrics, active, state.step)
            if state.keys.device.type == "xla":
                # XLA only records operations; without this, an epoch would become one program.
                importlib.import_module("torch_xla").sync()
            hooks.tick()
            if hooks.stopped() or count == limit:
                return state, False
        self._left, self._batches = None, self._loader
        return state, True

    def _begin(self) -> Iterator[Any]:
        batches, kept, dims = self._batches, self.kept, getattr(original(self.step), "batch_dims", 0)
        if kept is None:
            return iter(batches)
        if isinstance(batches, ArrayLoader) and not batches.shared and dims == 0:
            # Loads nothing for members that are not trained.
            return batches.iter_of(batches.take(kept))
        return (take_batch(dims, batch, kept) for batch in batches)
