"""Training by an executor: the members are divided into parts, which its workers train at the same time."""

from __future__ import annotations

import functools
import itertools
import queue
import time
from typing import Any

from hfta_func._tree import concat, num_models, take, tree_map
from hfta_func.errors import WorkerError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.parts import NEVER, PartWorker, StateBuffers, renumbered
from hfta_func.run.running import Running
from hfta_func.run.trainer import END, SegmentEnd, SegmentHooks, Step, Trainer
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState
from hfta_func.workers.executor import Executor, Inline
from hfta_func.workers.pool import Pool, shares
from hfta_func.workers.process import cores, threads
from hfta_func.workers.wire import Folder, dumps

Parts = list[tuple[int, int, int]]
"""The first member of each, the one after its last, and the limit of the workers that train it."""
Orders = dict[int, dict[str, Any]]
"""The arguments of calls, by number of the part."""
_By = tuple[Executor, PartWorker]
LOOK = 0.05
"""Seconds between two looks at what the workers have done."""
_PIECE = 0.2
"""Seconds for which this process trains before it looks again whether the workers have started."""


class ExecutorTrainer(Trainer):
    """The :class:`Trainer` of an array that an executor trains, a part of the members in each call.

    Progress is seen, and Ctrl-C heeded, after every step by workers of this machine, and after every segment by others. An
    executor that is ``owned`` is a pool for this run alone.
    """

    def __init__(
        self, step: Step, batches: Any, loader: Any, executor: Executor | Pool, compile: bool, owned: bool = False
    ):
        self._owned = executor if owned and isinstance(executor, Pool) else None
        self._step, self._loader, self._executor, self._compile = step, loader, executor, compile
        self._dealt = isinstance(loader, ArrayLoader)
        self._left = None if self._dealt else [*batches]
        self._function: PartWorker | None = None
        # What trains in this process while workers start, and how many steps at a time.
        self._local: PartWorker | None = None
        self._few = 1
        self._states: StateBuffers | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return f"{type(self._executor).__qualname__}: {'compiled while they train' if self._compile else 'replayed or eager'}"

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._executor.forget()
        for held in (self._owned, self._states):
            if held is not None:
                held.close()

    def is_ready(self) -> bool:
        """Whether all workers of a pool for this run alone can train now; raises a WorkerError if one cannot be started."""
        return self._owned is None or self._owned.ready(0, everyone=True)

    def follow(self, loader: Any) -> None:
        """See :class:`Trainer`."""
        self._left = None
        if loader is not self._loader:
            old, self._function, self._loader = self._function, None, loader
            if old is not None:
                self._executor.forget(old)

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        hooks.begin()
        if self._function is None:
            data = self._loader if self._dealt else None
            kind = state.keys.device.type
            self._function = PartWorker(self._step, data, kind, self._compile)
            if self._owned is not None:
                # What cannot be sent is refused now, and not when workers have started.
                self._owned.prepare(self._function)
                self._local = PartWorker(self._step, data, kind, compile=False)
        if not self._dealt and self._left is None:
            self._left = [*self._loader]
        while not self.is_ready():
            # Meanwhile some steps in this process: part by part and with the workers' threads, to the same bits.
            assert self._local is not None and self._owned is not None
            some, start = min(until, running.batches + self._few), time.perf_counter()
            with threads(len(cores()) // self._owned.count):
                state, ended = self._piece(state, running, some, hooks, (Inline(), self._local))
            if time.perf_counter() - start < _PIECE:
                self._few *= 2
            if ended or hooks.stopped() or running.batches == until:
                return state, ended
        return self._piece(state, running, until, hooks, (self._executor, self._function))

    def _piece(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks, by: _By) -> SegmentEnd:
        """Have an executor train the next batches by calls of a function."""
        (executor, _), device, parts = by, state.keys.device, _parts(num_models(state), self._executor)
        buffers = self._shared(state) if executor.shares else None
        # Of this segment alone: batches may have other values in the next one.
        folder = Folder() if executor.shares and not self._dealt else None
        try:
            orders = self._orders(state, running, parts, until, buffers, folder)
            train = functools.partial(_train, *by, parts, hooks)
            ticked, answers = train(orders)
            results = _level(train, parts, orders, answers, buffers)
        finally:
            if folder is not None:
                folder.close()
        done = results[0]["running"]["batches"] - running.batches
        running.join([answer["running"] for answer in results], device)
        if self._dealt:
            self._loader.load_state_dict(results[0]["position"])
        ended = all(answer["ended"] for answer in results)
        if self._left is not None:
            self._left = None if ended else self._left[done:]
        for _ in range(ticked, done):
            hooks.tick()
        if buffers is not None:
            return buffers.get(state), ended
        after = concat([answer["state"] for answer in results]) if len(results) > 1 else results[0]["state"]
        return tree_map(lambda leaf: leaf.to(device), after), ended

    def _shared(self, state: TrainState) -> StateBuffers:
        """A state in shared memory, where workers read it."""
        if self._states is None or not self._states.fits(state):
            if self._states is not None:
                self._states.close()
            self._states = StateBuffers(state)
        self._states.put(state)
        return self._states

    def _orders(
        self,
        state: TrainState,
        running: Running,
        parts: Parts,
        until: int,
        buffers: StateBuffers | None,
        folder: Folder | None,
    ) -> Orders:
        """The arguments of each part's call, by number of the part."""
        dims, orders = getattr(self._step, "batch_dims", 0), {}
        position = self._loader.state_dict() if self._dealt else None
        control = None if buffers is None else buffers.control(len(parts))
        for number, (low, high, _) in enumerate(parts):
            where = slice(low, high) if self.kept is None else self.kept[low:high].cpu()
            batches = None
            if not self._dealt:
                left = (self._left or [])[: until - running.batches]
                batches = dumps([take_batch(dims, batch, where) for batch in left], folder)
            orders[number] = {
                "state": take(state, slice(low, high)) if buffers is None else buffers.part(low, high),
                **{"sums": running.part(low, high), "positions": where, "position": position},
                **{"batches": batches, "skip": 0, "until": until},
                "control": None if control is None else (control, number),
            }
        return orders


def _train(
    executor: Executor, function: PartWorker, parts: Parts, hooks: SegmentHooks, orders: Orders
) -> tuple[int, dict[int, Any]]:
    """Have some parts trained; returns how many steps have been shown, and the answers by number of the part."""
    control = next(iter(orders.values()))["control"]
    cells = None if control is None else control[0].tensor()
    calls = {executor.submit(function, parts[part][2], **orders[part]): part for part in orders}
    answers: dict[int, Any] = {}
    ticked = 0
    while len(answers) < len(orders):
        try:
            call, answer = executor.wait(None if cells is None else LOOK)
        except queue.Empty:
            assert cells is not None
            made = int(cells[:-1].min())
            for _ in range(ticked, made):
                hooks.tick()
            ticked = max(ticked, made)
            if hooks.stopped() and cells[-1] == NEVER:
                # All after the same step, which none has begun yet.
                cells[-1] = cells[:-1].max() + 2
            continue
        part = calls[call]
        if isinstance(answer, Exception):
            low, high, _ = parts[part]
            if isinstance(answer, WorkerError):
                raise WorkerError(f"models {low} to {high - 1}: {answer}")
            raise renumbered(answer, range(low, high))
        answers[part] = answer
    return ticked, answers


def _level(
    train: Any, parts: Parts, orders: Orders, results: dict[int, Any], buffers: StateBuffers | None
) -> list[Any]:
    """Have the parts that stopped earlier catch up with the others; returns the results of all in order."""
    most, over = (max(result) for result in zip(*map(_done, results.values()), strict=True))
    behind: Orders = {}
    for part, answer in results.items():
        if _done(answer) != (most, over):
            state = answer["state"] if buffers is None else buffers.further(*parts[part][:2])
            skip = answer["running"]["batches"] - orders[part]["sums"]["batches"]
            gone = {"state": state, "sums": answer["running"], "position": answer["position"], "skip": skip}
            behind[part] = orders[part] | gone | {"control": None, "until": END if over else most}
    for part, answer in train(behind)[1].items() if behind else ():
        results[part] = answer
        if buffers is not None:
            buffers.level(*parts[part][:2])
    return [results[part] for part in range(len(parts))]


def _done(answer: Any) -> tuple[int, bool]:
    """The batches of the epoch that a part has seen, and whether these were all."""
    return answer["running"]["batches"], answer["ended"]


def _parts(size: int, executor: Executor) -> Parts:
    """The parts of an array, in proportion to the limits of workers."""
    limits = sorted(executor.limits, reverse=True)
    if not limits:
        return [(low, high, 0) for low, high in shares(size, min(executor.count, size))]
    edges = [size * edge // sum(limits) for edge in (0, *itertools.accumulate(limits))]
    result: Parts = []
    for first, last, limit in zip(edges, edges[1:], limits, strict=False):
        if last > first:
            pieces = shares(last - first, -(-(last - first) // limit))
            result += [(first + low, first + high, limit) for low, high in pieces]
    return result
