"""An array in several processes: each trains a part of the members with processors of its own.

Members are independent, so the processes exchange nothing while they train. A process that dies is started again and repeats
its part of the segment.
"""

from __future__ import annotations

import itertools
import re
import selectors
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._tree import leaves, num_models, tree_map, write
from hfta_func._types import HFTAError, WorkerError
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
        self.kept: Tensor | None = None
        """The members of the loader's batches that are trained; all if None."""
        self._folder = Folder()
        # How many steps each has made in this segment, and after which one all stop.
        control = self._folder.write(torch.zeros(count + 1, dtype=torch.int64))
        self._control = control.tensor()
        self._returned: TrainState | None = None
        processors = cores()
        self._cores = [processors[low:high] or processors for low, high in shares(len(processors), count)]
        kind = state.keys.device.type
        self._on_gpu = kind == "cuda"
        common = {"step": step, "control": control, "kind": kind, "compile": compile, "settings": settings()}
        # The tensors of the members, whose number may change.
        self._members: Folder | None = None
        self._told: set[int] = set()
        try:
            self._orders = [self._message({**common, "number": number}) for number in range(count)]
            self._deal(state)
        except BaseException:
            self._close()
            raise
        self._processes = [self._started(number) for number in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
        self._close()

    def _close(self) -> None:
        self._folder.close()
        if self._members is not None:
            self._members.close()

    def follow(self, loader: Any) -> None:
        """See :class:`Segments`."""
        self._loader, self._left, self._cut = loader, None, None

    def _deal(self, state: TrainState) -> None:
        """Give every process its part of the members of a state; if there are too few, some have none."""
        if self._members is not None:
            self._members.close()
        self._members = folder = Folder()
        shared = tree_map(lambda leaf: Leaf(folder.write(leaf.cpu())), state)
        self._shared = tree_map(lambda leaf: leaf.place.tensor(), shared)
        size = num_models(state)
        self.parts = shares(size, min(size, len(self._orders)))
        self._deals = []
        for part in self.parts:
            found = places(self.kept, *part)
            order = {"shared": shared, "part": part, "places": found}
            order["loader"] = self._loader.take(found) if self._dealt else None
            self._deals.append(self._message(order))
        self._cut = self._cut_of(state)
        self._told.clear()

    def _message(self, order: dict[str, Any]) -> bytes:
        try:
            return dumps(order, self._folder)
        except OSError:
            raise
        except Exception as error:
            raise TypeError(
                f"the step or the loader cannot be sent to other processes ({line(error)}); make what it uses "
                f"inside its function, or in a module"
            ) from error

    def _cut_of(self, state: TrainState) -> Any:
        """What the parts are parts of."""
        return self.kept, optree.tree_structure(state), [(leaf.shape, leaf.dtype) for leaf in leaves(state)]  # pyright: ignore

    def segment(self, state: TrainState, running: Running, limit: int | None, watch: Watch) -> tuple[TrainState, bool]:
        """See :class:`Segments`."""
        watch.begin()
        other = self._cut is None or self._cut[0] is not self.kept or self._cut[1:] != self._cut_of(state)[1:]
        anew = other or state is not self._returned
        if other:
            self._deal(state)
        elif anew:
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
        count = len(self.parts)
        for number in range(count):
            self._send(number, order, folder)
        answers: dict[int, Any] = {}
        tries = [0] * count
        ticked = 0
        while len(answers) < count:
            with selectors.DefaultSelector() as selector:
                for number, process in enumerate(self._processes[:count]):
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
                self._send(number, {**order, "anew": True}, folder)
            made = int(self._control[:count].min())
            for _ in range(ticked, made):
                watch.tick()
            ticked = max(ticked, made)
            if watch.stopped() and self._control[-1] == NEVER:
                # All after the same step, which none has begun yet.
                self._control[-1] = self._control[:-1].max() + 2
        found = [answers[number] for number in range(len(answers))]
        for part, answer in zip(self.parts, found, strict=True):
            if isinstance(answer, BaseException):
                raise renumbered(answer, range(*part))
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
                raise renumbered(answers[number], range(*self.parts[number]))
        return answers

    def _started(self, number: int) -> Process:
        process = Process(number, self._cores[number], self._on_gpu)
        process.send(self._orders[number])
        self._told.discard(number)
        return process

    def _send(self, number: int, order: dict[str, Any], folder: Folder) -> None:
        """Tell a process what to do, and which members it has unless it knows."""
        deal = None if number in self._told else self._deals[number]
        self._told.add(number)
        self._processes[number].send(dumps({**order, "deal": deal}, folder))


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """From where to where each of ``count`` parts goes."""
    edges = [size * number // count for number in range(count + 1)]
    return [*itertools.pairwise(edges)]


def places(kept: Tensor | None, low: int, high: int) -> slice | Tensor:
    """Where a part's members are in the loader's batches, of which those at ``kept`` are trained, or all."""
    return slice(low, high) if kept is None else kept[low:high].cpu()


def renumbered(error: BaseException, members: Sequence[int]) -> BaseException:
    """The error of a part, whose members have these numbers in the whole array, as one of the whole."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda found: f"model {members[int(found[1])]}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error
