"""Who trains an array's segments, this process or others, and where calls of functions run."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hfta_func._torch import original
from hfta_func.run.history import Metrics, Running
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class Watch(NamedTuple):
    """What looks on while a segment trains.

    Args:
        begin: Called before the first step, when a loader knows its position.
        tick: Called after each step.
        stopped: Whether to stop after the current step.
    """

    begin: Callable[[], None] = lambda: None
    tick: Callable[[], object] = lambda: None
    stopped: Callable[[], bool] = lambda: False


class Segments(Protocol):
    """What :func:`fit` asks to train."""

    def segment(self, state: TrainState, running: Running, limit: int | None, watch: Watch) -> tuple[TrainState, bool]:
        """Train on the next batches of the epoch, to its end or up to a number of them.

        Args:
            state: The state to go on from.
            running: The sums of the epoch, to which the metrics are added.
            limit: Number of batches, None for the rest of the epoch.
            watch: Who looks on.

        Returns:
            The next state, and whether the epoch has ended.
        """
        ...

    def follow(self, loader: Any) -> None:
        """Go on with another loader, for other members, between two epochs."""
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
        self.kept: Tensor | None = None
        """The members of the loader's batches that are trained; all if None."""

    def follow(self, loader: Iterable[Any]) -> None:
        """See :class:`Segments`."""
        self._left, self._batches, self._loader = None, loader, loader

    def segment(self, state: TrainState, running: Running, limit: int | None, watch: Watch) -> tuple[TrainState, bool]:
        """See :class:`Segments`."""
        self._left = iter(self._batches) if self._left is None else self._left
        for count, batch in enumerate(self._left, start=1):
            watch.begin()
            # A copy, because a step with donate=True writes the state.
            active = state.active.clone()
            if self.kept is not None:
                batch = take_batch(getattr(original(self._step), "batch_dims", 0), batch, self.kept)
            state, metrics = self._step(state, batch)
            running.add(metrics, active, state.step)
            if state.keys.device.type == "xla":
                # XLA only records operations; without this, an epoch would become one program.
                importlib.import_module("torch_xla").sync()
            watch.tick()
            if watch.stopped() or count == limit:
                return state, False
        self._left, self._batches = None, self._loader
        return state, True


class Executor(Protocol):
    """Where arrays train: runs calls of functions, several at a time.

    A function is sent once and its copies are kept, so that what it holds, such as data, stays where it was sent. It must be
    possible to call it again with the same arguments, because that is what happens if a worker dies.

    Attributes:
        count: How many calls run at a time.
        limits: The largest array of each worker; empty if they are alike.
        shares: Whether workers map files of this machine into their memory.
    """

    count: int
    limits: list[int]
    shares: bool

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """Have a function called, by a worker with a limit if they have any; returns the number of the call."""
        ...

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """Wait for the end of any call; returns its number, and what it returned or the error that it raised.

        Raises:
            queue.Empty: if there is none in time.
        """
        ...

    def forget(self) -> None:
        """Drop all calls and functions."""
        ...

    def busy(self) -> dict[int, tuple[str, float]]:
        """By number of each call that runs, the name of its worker and the time when it began."""
        ...

    @property
    def deaths(self) -> int:
        """How many workers have died."""
        ...


class Inline:
    """An :class:`Executor` that calls functions in this process, one after another."""

    count, deaths, shares = 1, 0, False

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self.limits: list[int] = []

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """See :class:`Executor`."""
        number = next(self._numbers)
        self._calls[number] = function, arguments
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`Executor`."""
        number = min(self._calls)
        function, arguments = self._calls.pop(number)
        try:
            return number, function(**arguments)
        except Exception as error:
            return number, error

    def forget(self) -> None:
        """See :class:`Executor`."""
        self._calls.clear()

    def busy(self) -> dict[int, tuple[str, float]]:
        """See :class:`Executor`."""
        return {}
