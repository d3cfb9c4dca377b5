"""Training by an executor: the members are divided into parts, which its workers train at the same time."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from hfta_func._tree import concat, leaves, num_models, take, tree_map, write
from hfta_func.errors import WorkerError
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.running import Running
from hfta_func.run.trainer import LocalTrainer, SegmentEnd, SegmentHooks, Step, Trainer, renumbered
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState
from hfta_func.workers.executor import Executor, Inline
from hfta_func.workers.pool import Pool, shares
from hfta_func.workers.process import cores, threads
from hfta_func.workers.wire import Folder, dumps, loads


class SharedPart(NamedTuple):
    """Members ``low`` to ``high - 1`` of a state whose leaves lie in shared memory."""

    source: Any  # references to the leaves of the whole array, to go on from
    target: Any  # references to where its leaves are written afterwards
    low: int
    high: int
    version: int  # what source holds: a worker that has made this version of the part itself does not read it


class StateBuffers:
    """Two copies of a state in shared memory: workers read one and write the other, so that a call can be repeated."""

    def __init__(self, state: TrainState):
        self._layout, self._latest = _layout(state), state
        # Counts what has been written.
        self._folder, self._number = Folder(), 0
        self._source, self._target = (tree_map(lambda leaf: self._folder.write(leaf.cpu()), state) for _ in range(2))

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
            self._number += 1

    def part(self, low: int, high: int) -> SharedPart:
        """The members ``low`` to ``high - 1``, to be trained."""
        return SharedPart(self._source, self._target, low, high, self._number)

    def turn(self) -> None:
        """Go on from what workers have written."""
        self._source, self._target = self._target, self._source
        self._number += 1

    def get(self, like: TrainState) -> TrainState:
        """The state that workers have made, on the devices of another one."""
        self._latest = tree_map(lambda leaf, old: leaf.clone().to(old.device), _opened(self._source), like)
        return self._latest


def _opened(refs: Any) -> Any:
    return tree_map(lambda ref: ref.tensor(), refs)


def _layout(state: TrainState) -> Any:
    structure = optree.tree_structure(state)  # pyright: ignore[reportArgumentType]
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves(state)]


class PartWorker:
    """Trains a part of the members on a type of device, a segment in each call: the function that is sent to workers.

    It holds the loader of all members if that is an :class:`ArrayLoader`; batches of other loaders are sent.
    """

    label = "the step or the loader"

    def __init__(self, step: Step, loader: ArrayLoader | None, kind: str, compile: bool):
        self._step = background.compile(step) if compile else background.replayed(step)
        self._loader, self._kind = loader, kind
        # The part that was trained last: its members and version, its state, and what trains it on in its epoch.
        self._held: tuple[tuple[int, int, int], TrainState, LocalTrainer | None] | None = None

    def __call__(
        self,
        state: TrainState | SharedPart,
        sums: dict[str, Any],
        positions: slice | Tensor,
        position: Any,
        batches: bytes | None,
        until: int,
    ) -> dict[str, Any]:
        """Train some steps of an epoch: up to batch ``until``, or the end of the epoch.

        The loader goes on from ``position`` with the members at ``positions``; without a loader, there are ``batches``.
        Returns the state unless it is shared, whether the epoch has ended, the ``sums`` now, and the loader's position.
        """
        if self._kind == "cpu":
            # The state comes ready made, and where it was made the allocator is set up.
            keep_memory_once()
        running, trainer, held, self._held = Running(), None, self._held, None
        running.load_state_dict(sums, torch.device(self._kind))
        if not isinstance(state, SharedPart):
            trained = tree_map(lambda leaf: leaf.to(self._kind), state)
        elif held is not None and held[0] == (state.low, state.high, state.version):
            _, trained, trainer = held
        else:
            whole = _opened(state.source)
            trained = tree_map(lambda leaf: leaf[state.low : state.high].clone().to(self._kind), whole)
        if trainer is None or self._loader is None or trainer.position != position:
            loader: Any = None if batches is None else loads(batches)
            if self._loader is not None:
                loader = self._loader.take(positions)
                loader.load_state_dict(position)
            trainer = LocalTrainer(self._step, loader, loader)
        start = time.perf_counter()
        trained, ended = trainer.segment(trained, running, until, SegmentHooks())
        answer = {"ended": ended, "running": tree_map(cpu, running.state_dict()), "position": trainer.position}
        answer["seconds"] = time.perf_counter() - start
        if not isinstance(state, SharedPart):
            return answer | {"state": tree_map(cpu, trained)}
        write(tree_map(lambda leaf: leaf[state.low : state.high], _opened(state.target)), tree_map(cpu, trained))
        self._held = (state.low, state.high, state.version + 1), trained, None if ended else trainer
        return answer


def cpu(value: Any) -> Any:
    """A tensor in the host's memory; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value


_PIECE = 0.4
"""Seconds between two looks at what workers of this machine have done: their calls train about as long."""
_SHARE, _MOST = 20, 10.0
"""Or so many times as long as it takes to make a call and to pass the state, and seconds that it takes at most."""


class ExecutorTrainer(Trainer):
    """The :class:`Trainer` of an array that an executor trains, a part of the members in each call.

    Progress is seen, and Ctrl-C heeded, after a step or within a second by workers of this machine, and after every segment
    by others. An executor that is ``owned`` is a pool for this run alone.
    """

    def __init__(
        self, step: Step, batches: Any, loader: Any, executor: Executor | Pool, compile: bool, owned: bool = False
    ):
        self._owned = executor if owned and isinstance(executor, Pool) else None
        self._step, self._loader, self._executor, self._compile = step, loader, executor, compile
        self._dealt = isinstance(loader, ArrayLoader)
        self._left = None if self._dealt else [*batches]
        # How many steps a call trains, and what trains in this process while workers start.
        self._few, self._busy = 1, 0.0
        self._local: PartWorker | None = None
        self._function: PartWorker | None = None
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
            data, kind = self._loader if self._dealt else None, state.keys.device.type
            self._function = PartWorker(self._step, data, kind, self._compile)
            if self._owned is not None:
                # What cannot be sent is refused now, and not when workers have started.
                self._owned.prepare(self._function)
                self._local = PartWorker(self._step, data, kind, compile=False)
        if not self._dealt and self._left is None:
            self._left = [*self._loader]
        buffers: StateBuffers | None = None
        while True:
            start, before = time.perf_counter(), running.batches
            with contextlib.ExitStack() as stack:
                if buffers is None and not self.is_ready():
                    # Meanwhile some steps in this process: part by part and with the workers' threads, to the same bits.
                    assert self._local is not None and self._owned is not None
                    executor, function = Inline(), self._local
                    stack.enter_context(threads(len(cores()) // self._owned.count))
                else:
                    executor, function = self._executor, self._function
                    buffers = self._shared(state) if executor.shares and buffers is None else buffers
                is_near = executor.shares or executor is not self._executor
                some = min(until, before + self._few) if is_near else until
                state, ended = self._piece(state, running, some, executor, function, buffers)
            for _ in range(running.batches - before):
                hooks.tick()
            took = time.perf_counter() - start
            # Passing a large state takes a small share of the time.
            passed = took - self._busy if executor is self._executor else 0.0
            enough = min(max(_PIECE, _SHARE * passed), _MOST)
            if took < enough / 2:
                self._few *= 2
            elif took > enough:
                self._few = max(1, self._few // 2)
            if ended or hooks.stopped() or running.batches == until:
                return state if buffers is None else buffers.get(state), ended

    def _piece(
        self,
        state: TrainState,
        running: Running,
        until: int,
        executor: Executor | Pool,
        function: PartWorker,
        buffers: StateBuffers | None,
    ) -> SegmentEnd:
        """Have an executor train the next batches by calls of a function; the state stays in buffers, if given."""
        device, calls, size = state.keys.device, {}, num_models(state)
        parts = shares(size, min(self._executor.count, size))
        dims, position = getattr(self._step, "batch_dims", 0), self._loader.state_dict() if self._dealt else None
        left, before = (self._left or [])[: until - running.batches], running.batches
        with contextlib.ExitStack() as stack:
            folder = None
            if executor.shares and not self._dealt:
                # Of this call alone: batches may have other values in the next one.
                stack.callback((folder := Folder()).close)
            for part, (low, high) in enumerate(parts):
                where = slice(low, high) if self.kept is None else self.kept[low:high].cpu()
                batches = None if self._dealt else dumps([take_batch(dims, batch, where) for batch in left], folder)
                order = {
                    "state": take(state, slice(low, high)) if buffers is None else buffers.part(low, high),
                    **{"sums": running.part(low, high), "positions": where, "position": position},
                    **{"batches": batches, "until": until},
                }
                calls[executor.submit(function, **order)] = part
            answers: dict[int, Any] = {}
            while len(answers) < len(parts):
                call, answer = executor.wait(None)
                low, high = parts[calls[call]]
                if isinstance(answer, WorkerError):
                    raise WorkerError(f"models {low} to {high - 1}: {answer}")
                if isinstance(answer, Exception):
                    raise renumbered(answer, range(low, high))
                answers[calls[call]] = answer
        results = [answers[part] for part in range(len(parts))]
        self._busy = max(answer["seconds"] for answer in results)
        running.join([answer["running"] for answer in results], device)
        if self._dealt:
            self._loader.load_state_dict(results[0]["position"])
        ended = all(answer["ended"] for answer in results)
        if self._left is not None:
            # Batches that were not sent are left, also where the last one sent ends the list.
            self._left = self._left[running.batches - before :]
            ended = ended or not self._left
            self._left = None if ended else self._left
        if buffers is not None:
            buffers.turn()
            return state, ended
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
