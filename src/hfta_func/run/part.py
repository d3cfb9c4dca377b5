"""The side of a worker, which trains some members of an array as its standard input says."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hfta_func._tree import tree_map, write
from hfta_func._types import WorkerError
from hfta_func.run import background
from hfta_func.run.executors import Here, Step, Watch
from hfta_func.run.history import Running
from hfta_func.run.processes import Place, begin, line, loads, receive, send
from hfta_func.run.settings import settle
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState


def speed(step: Step, state: TrainState, batch: Any, seconds: float) -> float:
    """Steps a second on a copy of the state, without the first."""
    state = tree_map(torch.clone, state)
    state, _ = step(state, batch)
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < seconds:
        state, _ = step(state, batch)
        count += 1
    return count / (time.perf_counter() - start)


class Part:
    """The worker's own side."""

    def __init__(
        self,
        step: Step,
        control: Place,
        kind: str,
        compile: bool,
        number: int,
        settings: Mapping[str, Any],
    ):
        settle(settings)
        if kind == "cpu":
            # States come ready made, and where they are made the allocator is set up.
            keep_memory_once()
        self._step = background.compile(step) if compile else step
        self._kind, self._control, self._number = kind, control.tensor(), number
        self._dims = getattr(step, "batch_dims", 0)
        self._running = Running()

    def _deal(self, shared: Any, part: tuple[int, int], places: slice | Tensor, loader: Any) -> None:
        """From now on train these members: a part of what all share, with the batches at some places of the loader's."""
        self._whole, (self._low, self._high) = tree_map(lambda leaf: leaf.place.tensor(), shared), part
        self._places, self._loader = places, loader
        self._here = Here(self._step, loader or (), loader or ())

    def answer(self, kind: str, anew: bool | None, deal: bytes | None = None, **order: Any) -> Any:
        """Do what an order says; ``anew`` is None where it goes on with what it was doing."""
        if deal is not None:
            self._deal(**loads(deal))
        if anew:
            self._state = tree_map(lambda leaf: leaf[self._low : self._high].clone().to(self._kind), self._whole)
        if kind == "trial":
            return speed(self._step, self._state, self._own(order["batch"]), order["seconds"])
        if anew is not None:
            self._running = Running()
            if self._loader is None:
                batches = [*map(self._own, order["batches"])]
                self._here = Here(self._step, batches, ())
            elif anew:
                self._loader.load_state_dict(order["position"])
                self._here = Here(self._step, self._loader, self._loader)
        self._state, ended = self._here.segment(
            *(self._state, self._running, order["limit"]), Watch(tick=self._tick, stopped=self._is_stopped)
        )
        write(
            tree_map(lambda leaf: leaf[self._low : self._high], self._whole),
            tree_map(lambda leaf: leaf.cpu(), self._state),
        )
        position = None if self._loader is None else self._loader.state_dict()
        done, running = self._running.batches, self._running.state_dict()
        return {"ended": ended, "done": done, "running": tree_map(cpu, running), "position": position}

    def _tick(self) -> None:
        self._control[self._number] += 1

    def _is_stopped(self) -> bool:
        return bool(self._control[self._number] >= self._control[-1])

    def _own(self, batch: Any) -> Any:
        return take_batch(self._dims, batch, self._places)


def cpu(value: Any) -> Any:
    """A tensor in the host's memory; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value


def serve() -> None:
    """The worker's program: do what the standard input says, one order after another."""
    orders, answers = begin()
    part: Part | BaseException | None = None
    while (message := receive(orders)) is not None:
        answer: Any = None
        try:
            order = loads(message)
            if part is None:
                part = Part(**order)
                continue
            answer = part.answer(**order) if isinstance(part, Part) else part
        except Exception as error:
            answer = error
            if part is None:
                part = error
                continue
        try:
            found = cloudpickle.dumps(answer)
        except Exception:
            found = pickle.dumps(WorkerError(line(answer)))
        send(answers, found)
