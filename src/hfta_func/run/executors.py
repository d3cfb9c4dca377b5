"""Who trains an array's segments: this process, or others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from hfta_func.run.history import Metrics, Running
from hfta_func.step.state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class Executor(Protocol):
    """What :func:`fit` asks to train."""

    def segment(
        self,
        state: TrainState,
        running: Running,
        limit: int | None,
        *,
        begin: Callable[[], None],
        tick: Callable[[], object],
        stopped: Callable[[], bool],
    ) -> tuple[TrainState, bool]:
        """Train on the next batches of the epoch, to its end or up to a number of them.

        Args:
            state: The state to go on from.
            running: The sums of the epoch, to which the metrics are added.
            limit: Number of batches, None for the rest of the epoch.
            begin: Called before the first step, when a loader knows its position.
            tick: Called after each step.
            stopped: Whether to stop after the current step.

        Returns:
            The next state, and whether the epoch has ended.
        """
        ...


class Here:
    """Training in this process.

    Args:
        step: The training step.
        batches: What is left of the first epoch.
        loader: All later epochs.
    """

    def __init__(self, step: Step, batches: Iterable[Any], loader: Iterable[Any]):
        self._step, self._batches, self._loader = step, batches, loader
        self._left: Iterator[Any] | None = None

    def segment(
        self,
        state: TrainState,
        running: Running,
        limit: int | None,
        *,
        begin: Callable[[], None],
        tick: Callable[[], object],
        stopped: Callable[[], bool],
    ) -> tuple[TrainState, bool]:
        """See :class:`Executor`."""
        self._left = iter(self._batches) if self._left is None else self._left
        for count, batch in enumerate(self._left, start=1):
            begin()
            # A copy, because a step with donate=True writes the state.
            active = state.active.clone()
            state, metrics = self._step(state, batch)
            running.add(metrics, active, state.step)
            if state.keys.device.type == "xla":
                # XLA only records operations; without this, an epoch would become one program.
                importlib.import_module("torch_xla").sync()
            tick()
            if stopped() or count == limit:
                return state, False
        self._left, self._batches = None, self._loader
        return state, True
