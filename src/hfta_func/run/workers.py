"""An array in several processes: each trains a part of the members with processors of its own.

Members are independent, so the processes exchange nothing while they train. A process that dies is started again and repeats
its part of the segment.
"""

from __future__ import annotations

import itertools
import re
import selectors
from typing import Any

import torch

from hfta_func._tree import leaves, num_models, tree_map, write
from hfta_func._types import HFTAError, StateError, WorkerError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.executors import Step, Watch
from hfta_func.run.history import Running
from hfta_func.run.processes import Folder, Leaf, Process, cores, dumps, line
from hfta_func.run.settings import settings
from hfta_func.step.state import TrainState

_TRIES = 3
"""How often in a row a process may die before its segment is given up."""
LOOK = 0.05
"""Seconds between two looks at what the processes have done."""
NEVER = 1 << 62
"""The step after which processes stop that nobody stops."""


class Workers:
    """The :class:`Segments` of ``count`` processes.

    Args:
        step: The training step.
        state: The state of all members, for its structure.
        batches: What is left of the first epoch.
        loader: All later epochs.
        count: Number of processes.
        compile: Whether they compile the step while they train.
    """

    def __init__(self, step: Step, state: TrainState, batches: Any, loader: Any, count: int, compile: bool = False):
        self._loader, self._dealt = loader, isinstance(loader, ArrayLoader)
        # What is left of an epoch of any other loader, in this process.
        self._left = None if self._dealt else [*batches]
        size = num_models(state)
        self.parts = shares(size, count)
        self._folder = Folder()
        places = tree_map(lambda leaf: Leaf(self._folder.write(leaf.cpu())), state)
        self._shared = tree_map(lambda leaf: leaf.place.tensor(), places)
        # How many steps each has made in this segment, and after which one all stop.
        control = self._folder.write(torch.zeros(count + 1, dtype=torch.int64))
        self._control = control.tensor()
        self._returned: TrainState | None = None
        processors = cores()
        self._cores = [processors[low:high] or processors for low, high in shares(len(processors), count)]
        kind = state.keys.device.type
        self._on_gpu = kind == "cuda"
        common = {"step": step, "shared": places, "control": control, "kind": kind, "compile": compile}
        try:
            self._orders = [
                dumps(
                    {
                        **common,
                        **{"number": number, "part": part, "loader": loader.part(*part) if self._dealt else None},
                        "settings": settings(),
                    },
                    self._folder,
                )
                for number, part in enumerate(self.parts)
            ]
        except Exception as error:
            self._folder.close()
            raise TypeError(
                f"the step or the loader cannot be sent to other processes ({line(error)}); make what it uses "
                f"inside its function, or in a module"
            ) from error
        self._processes = [self._started(number) for number in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
        self._folder.close()

    def segment(self, state: TrainState, running: Running, limit: int | None, watch: Watch) -> tuple[TrainState, bool]:
        """See :class:`Segments`."""
        watch.begin()
        anew = state is not self._returned
        if anew:
            check_same(state, self._shared)
            write(self._shared, tree_map(lambda leaf: leaf.cpu(), state))
        if not self._dealt and self._left is None:
            self._left = [*self._loader]
        order = {"limit": limit, "position": self._loader.state_dict() if self._dealt else None, "batches": self._left}
        answers = self._run({"kind": "segment", "anew": anew, **order}, state, watch)
        done = answers[0]["done"]
        running.join([answer["running"] for answer in answers])
        ended = all(answer["ended"] for answer in answers)
        if self._dealt:
            self._loader.load_state_dict(answers[0]["position"])
        elif self._left is not None:
            self._left = None if ended else self._left[done:]
        self._returned = after = tree_map(lambda own, old: own.clone().to(old.device), self._shared, state)
        return after, ended

    def speed(self, seconds: float, batch: Any) -> float:
        """Steps a second of all processes at once, on copies of the state."""
        order = {"kind": "trial", "anew": True, "seconds": seconds, "batch": batch}
        return min(self._run(order, None, Watch()))

    def _run(self, order: dict[str, Any], state: TrainState | None, watch: Watch) -> list[Any]:
        """Have all processes do something, and wait for it; one that dies is started again and does it again."""
        # Of its own, since tensors of an order may have other values in the next one.
        folder = Folder()
        try:
            return self._ordered(order, folder, state, watch)
        finally:
            folder.close()

    def _ordered(self, order: dict[str, Any], folder: Folder, state: TrainState | None, watch: Watch) -> list[Any]:
        self._control[:] = 0
        self._control[-1] = NEVER
        message = dumps(order, folder)
        for process in self._processes:
            process.send(message)
        answers: dict[int, Any] = {}
        tries = [0] * len(self._processes)
        ticked = 0
        while len(answers) < len(self._processes):
            with selectors.DefaultSelector() as selector:
                for number, process in enumerate(self._processes):
                    if number not in answers:
                        selector.register(process.answers, selectors.EVENT_READ, number)
                ready = [key.data for key, _ in selector.select(LOOK)]
            for number in ready:
                answer = self._processes[number].receive()
                if answer is not None:
                    answers[number] = answer
                    continue
                tries[number] += 1
                if tries[number] == _TRIES:
                    low, high = self.parts[number]
                    raise WorkerError(
                        f"the process of models {low} to {high - 1} died {_TRIES} times in a row, last with status "
                        f"{self._processes[number].status()}; what it printed says why, or the system's log if it ran out of "
                        f"memory: use fewer workers"
                    )
                self._control[number] = 0
                if state is not None:
                    # It may have died while it wrote its part.
                    low, high = self.parts[number]
                    tree_map(
                        lambda own, old, low=low, high=high: own[low:high].copy_(old[low:high]), self._shared, state
                    )
                self._processes[number].close()
                self._processes[number] = self._started(number)
                self._processes[number].send(dumps({**order, "anew": True}, folder))
            made = int(self._control[:-1].min())
            for _ in range(ticked, made):
                watch.tick()
            ticked = max(ticked, made)
            if watch.stopped() and self._control[-1] == NEVER:
                # All after the same step, which none has begun yet.
                self._control[-1] = self._control[:-1].max() + 2
        found = [answers[number] for number in range(len(answers))]
        for (low, _), answer in zip(self.parts, found, strict=True):
            if isinstance(answer, BaseException):
                raise renumbered(answer, low)
        if order["kind"] == "segment" and len({answer["done"] for answer in found}) > 1:
            found = self._level(found)
        return found

    def _level(self, answers: list[Any]) -> list[Any]:
        """Have those that stopped earlier catch up with the others."""
        most = max(answer["done"] for answer in answers)
        self._control[-1] = NEVER
        behind = [number for number, answer in enumerate(answers) if answer["done"] < most]
        for number in behind:
            left = most - answers[number]["done"]
            self._processes[number].send(dumps({"kind": "segment", "anew": None, "limit": left}, self._folder))
        for number in behind:
            answers[number] = self._processes[number].receive()
            if answers[number] is None:
                raise WorkerError(
                    "a process died while training was being stopped; go on from the last file of the run"
                )
            if isinstance(answers[number], BaseException):
                raise renumbered(answers[number], self.parts[number][0])
        return answers

    def _started(self, number: int) -> Process:
        process = Process(number, self._cores[number], self._on_gpu)
        process.send(self._orders[number])
        return process


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """From where to where each of ``count`` parts goes."""
    edges = [size * number // count for number in range(count + 1)]
    return [*itertools.pairwise(edges)]


def check_same(state: Any, shared: Any) -> None:
    """Refuse a state of other members."""
    if [leaf.shape for leaf in leaves(state)] != [leaf.shape for leaf in leaves(shared)]:
        raise StateError(
            "a callback returned a state of other members than the array had; with workers, make members inactive instead "
            "(state.active), or drop them between two calls of fit"
        )


def renumbered(error: BaseException, first: int) -> BaseException:
    """The error of a part as one of the whole array."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda found: f"model {int(found[1]) + first}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error
