"""Training by an executor: the members are divided into parts, which its workers train at the same time."""

from __future__ import annotations

import itertools
import queue
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._tree import concat, leaves, num_models, take, tree_map, write
from hfta_func._types import WorkerError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Running
from hfta_func.run.parts import PartWorker, SharedPart, places, renumbered, shares
from hfta_func.run.trainer import SegmentHooks, Step
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState
from hfta_func.workers.executor import Executor
from hfta_func.workers.pool import Pool
from hfta_func.workers.wire import Folder, SharedTensorRef, dumps

Parts = list[tuple[int, int, int]]
"""The first member of each, the one after its last, and the limit of the workers that train it."""
LOOK = 0.05
"""Seconds between two looks at what the workers have done."""
NEVER = 1 << 62
"""Sentinel: no stop requested."""


class StateBuffers:
    """Two copies of a state in shared memory: workers read one and write the other, so that a call can be repeated.

    Args:
        state: The first state.
    """

    def __init__(self, state: TrainState):
        self._layout, self._latest = _layout(state), state
        self._folder = Folder()
        self._source, self._target = (tree_map(lambda leaf: self._folder.write(leaf.cpu()), state) for _ in range(2))
        self._versions = itertools.count()
        self._version, self._next = next(self._versions), next(self._versions)

    def close(self) -> None:
        """Remove the files."""
        self._folder.close()

    def fits(self, state: TrainState) -> bool:
        """Whether the buffers have room for just this state."""
        return self._layout == _layout(state)

    def put(self, state: TrainState) -> None:
        """Have workers go on from a state, which is written unless it is the one that they have made."""
        if state is not self._latest:
            write(_opened(self._source), tree_map(lambda leaf: leaf.cpu(), state))
            self._version, self._latest = next(self._versions), state

    def part(self, low: int, high: int) -> SharedPart:
        """The members ``low`` to ``high - 1``, to be trained."""
        return SharedPart(self._source, self._target, low, high, self._version, self._next)

    def further(self, low: int, high: int) -> SharedPart:
        """Members that have been trained, to be trained some more; :meth:`level` takes them over."""
        return SharedPart(self._target, self._source, low, high, self._next, next(self._versions))

    def level(self, low: int, high: int) -> None:
        """Take over what was trained further."""
        tree_map(lambda a, b: a[low:high].copy_(b[low:high]), _opened(self._target), _opened(self._source))

    def get(self, like: TrainState) -> TrainState:
        """The state that workers have made, on the devices of another one."""
        self._source, self._target = self._target, self._source
        self._version, self._next = self._next, next(self._versions)
        self._latest = tree_map(lambda leaf, old: leaf.clone().to(old.device), _opened(self._source), like)
        return self._latest


def _opened(refs: Any) -> Any:
    return tree_map(SharedTensorRef.tensor, refs)


def _layout(state: TrainState) -> Any:
    structure = optree.tree_structure(state)  # pyright: ignore[reportArgumentType]
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves(state)]


class ExecutorTrainer:
    """The :class:`Trainer` of an array that an executor trains, a part of the members in each call.

    Progress is seen, and Ctrl-C heeded, after every step by workers of this machine, and after every segment by others.

    Args:
        step: The training step.
        batches: What is left of the first epoch.
        loader: All later epochs.
        executor: What trains the parts.
        compile: Whether the workers compile the step while they train.
        owned: Whether the executor is a pool for this run alone.
    """

    def __init__(
        self, step: Step, batches: Any, loader: Any, executor: Executor | Pool, compile: bool, owned: bool = False
    ):
        self._owned = executor if owned and isinstance(executor, Pool) else None
        self._step, self._loader, self._executor, self._compile = step, loader, executor, compile
        self._dealt = isinstance(loader, ArrayLoader)
        self._left = None if self._dealt else [*batches]
        self._function: PartWorker | None = None
        self._folder = Folder() if executor.shares else None
        self._buffers: StateBuffers | None = None
        # By number of parts: how many steps each has made, and after which one all stop.
        self._controls: dict[int, SharedTensorRef] = {}
        self.kept: Tensor | None = None
        """The members of the loader's batches that are trained; all if None."""

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._executor.forget()
        for held in (self._owned, self._folder, self._buffers):
            if held is not None:
                held.close()

    def is_ready(self) -> bool:
        """Whether all workers of a pool for this run alone can train now.

        Raises:
            WorkerError: if one cannot be started.
        """
        return self._owned is None or self._owned.ready(0, everyone=True)

    def follow(self, loader: Any) -> None:
        """See :class:`Trainer`."""
        old, self._function = self._function, None
        self._loader, self._left = loader, None
        if old is not None:
            self._executor.forget(old)

    def segment(
        self, state: TrainState, running: Running, limit: int | None, hooks: SegmentHooks
    ) -> tuple[TrainState, bool]:
        """See :class:`Trainer`."""
        hooks.begin()
        device = state.keys.device
        if self._function is None:
            self._function = PartWorker(self._step, self._loader if self._dealt else None, device.type, self._compile)
        if not self._dealt and self._left is None:
            self._left = [*self._loader]
        parts = _parts(num_models(state), self._executor)
        self._share(state)
        # Of this segment alone: batches may have other values in the next one.
        folder = Folder() if self._executor.shares and not self._dealt else None
        try:
            orders = self._orders(state, parts, limit, folder)
            ticked, answers = self._train(parts, orders, hooks)
            found = self._level(parts, orders, answers, hooks)
        finally:
            if folder is not None:
                folder.close()
        done = found[0]["running"]["batches"]
        running.join([
            {**answer["running"], **{name: _on(answer["running"][name], device) for name in ("sums", "failed")}}
            for answer in found
        ])  # fmt: skip
        if self._dealt:
            self._loader.load_state_dict(found[0]["position"])
        ended = all(answer["ended"] for answer in found)
        if self._left is not None:
            self._left = None if ended else self._left[done:]
        for _ in range(ticked, done):
            hooks.tick()
        if self._buffers is not None:
            return self._buffers.get(state), ended
        after = concat([answer["state"] for answer in found]) if len(found) > 1 else found[0]["state"]
        return tree_map(lambda leaf: leaf.to(device), after), ended

    def _share(self, state: TrainState) -> None:
        """Have a state in shared memory, if workers read it there."""
        if self._buffers is not None and not self._buffers.fits(state):
            self._buffers.close()
            self._buffers = None
        if self._buffers is not None:
            self._buffers.put(state)
        elif self._executor.shares:
            self._buffers = StateBuffers(state)

    def _orders(
        self, state: TrainState, parts: Parts, limit: int | None, folder: Folder | None
    ) -> dict[int, dict[str, Any]]:
        """The arguments of each part's call, by number of the part."""
        dims, orders = getattr(self._step, "batch_dims", 0), {}
        position, control = self._loader.state_dict() if self._dealt else None, self._control(len(parts))
        for number, (low, high, _) in enumerate(parts):
            where = places(self.kept, low, high)
            batches = None
            if not self._dealt:
                batches = dumps([take_batch(dims, batch, where) for batch in (self._left or [])[:limit]], folder)
            orders[number] = {
                "state": take(state, slice(low, high)) if self._buffers is None else self._buffers.part(low, high),
                **{"places": where, "position": position, "batches": batches, "skip": 0, "limit": limit},
                "control": None if control is None else (control, number),
            }
        return orders

    def _control(self, count: int) -> SharedTensorRef | None:
        """Where that many parts count their steps; None if workers do not share memory with this process."""
        if self._folder is None:
            return None
        if count not in self._controls:
            self._controls[count] = self._folder.write(torch.zeros(count + 1, dtype=torch.int64))
        cells = self._controls[count].tensor()
        cells[:] = 0
        cells[-1] = NEVER
        return self._controls[count]

    def _train(
        self, parts: Parts, orders: dict[int, dict[str, Any]], hooks: SegmentHooks
    ) -> tuple[int, dict[int, Any]]:
        """Have some parts trained; returns how many steps have been shown, and the answers by number of the part."""
        assert self._function is not None
        control = next(iter(orders.values()))["control"]
        cells = None if control is None else control[0].tensor()
        calls = {self._executor.submit(self._function, parts[part][2], **orders[part]): part for part in orders}
        answers: dict[int, Any] = {}
        ticked = 0
        while len(answers) < len(orders):
            try:
                call, answer = self._executor.wait(None if cells is None else LOOK)
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
                raise _of_members(answer, *parts[part][:2])
            answers[part] = answer
        return ticked, answers

    def _level(
        self, parts: Parts, orders: dict[int, dict[str, Any]], answers: dict[int, Any], hooks: SegmentHooks
    ) -> list[Any]:
        """Have those that stopped earlier catch up with the others."""
        found = [answers[part] for part in range(len(parts))]
        done = [answer["running"]["batches"] for answer in found]
        over = any(answer["ended"] for answer in found)
        behind: dict[int, dict[str, Any]] = {}
        for part, answer in enumerate(found):
            if done[part] < max(done) or answer["ended"] != over:
                state = answer["state"] if self._buffers is None else self._buffers.further(*parts[part][:2])
                more = {"state": state, "position": answer["position"], "skip": done[part], "control": None}
                behind[part] = orders[part] | more | {"limit": None if over else max(done) - done[part]}
        for part, more in self._train(parts, behind, hooks)[1].items() if behind else ():
            running = Running()
            running.join([found[part]["running"]])
            if more["running"]["batches"]:
                running.join([more["running"]])
            found[part] = more | {"running": running.state_dict()}
            if self._buffers is not None:
                self._buffers.level(*parts[part][:2])
        return found


def _of_members(error: Exception, low: int, high: int) -> BaseException:
    """The error of the members ``low`` to ``high - 1``, as one of the whole array."""
    if isinstance(error, WorkerError):
        return WorkerError(f"models {low} to {high - 1}: {error}")
    return renumbered(error, range(low, high))


def _parts(size: int, executor: Executor) -> Parts:
    """The parts of an array, in proportion to the limits of workers."""
    limits = sorted(executor.limits, reverse=True)
    if not limits:
        return [(low, high, 0) for low, high in shares(size, min(executor.count, size))]
    edges = [size * edge // sum(limits) for edge in (0, *itertools.accumulate(limits))]
    found: Parts = []
    for first, last, limit in zip(edges, edges[1:], limits, strict=False):
        if last > first:
            pieces = shares(last - first, -(-(last - first) // limit))
            found += [(first + low, first + high, limit) for low, high in pieces]
    return found


def _on(values: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in values.items()}
