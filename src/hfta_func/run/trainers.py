"""Trainers in other processes, and the choice of what trains an array: this process, worker processes, or an executor.

An executor's workers train at the same time a part of the members each.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import io
import math
import statistics
import time
from collections.abc import Callable, Generator
from typing import IO, Any

import torch
from torch import Tensor

from hfta_func._torch import writes
from hfta_func._tree import concat, num_models, take, tree_map
from hfta_func.errors import WorkerError
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.trainer import END, LocalTrainer, Members, Step, Tick, Trainer, renumbered
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.batch import take_batch
from hfta_func.workers.pool import Executor, Pool, processes, shares
from hfta_func.workers.process import Pickler, Shared, cores, dumps, loads


class _Fingerprint(Pickler):
    """Pickles which tensor there is instead of its values; buffers of NumPy's arrays are left out."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, buffer_callback=lambda buffer: None)
        # Kept, so that no other one gets their addresses.
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.layout != torch.strided:
            return None
        self.tensors.append(obj)
        return obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, obj.requires_grad, writes(obj)


def _fingerprint(value: Any) -> tuple[bytes, list[Tensor]]:
    """Bytes that change if anything does that is sent with a value, but for entries of NumPy's arrays, and its tensors."""
    pickler = _Fingerprint(file := io.BytesIO())
    # Sending what cannot be pickled raises an error that names the cure.
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return file.getvalue(), pickler.tensors


class PartWorker:
    """Trains a part of the members on a type of device, a segment in each call: the function that is sent to workers.

    It holds the loader of all members if that is an :class:`ArrayLoader`; batches of other loaders are sent.
    """

    label = "the step or the loader"

    def __init__(self, step: Step, loader: ArrayLoader | None, kind: str, compile: bool):
        self._step = background.compile(step) if compile else background.replayed(step)
        self._loader, self._kind = loader, kind
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Loader and trainer of the latest span, which go on with what they have begun to load.
        self._held: tuple[Any, Any, LocalTrainer] | None = None

    def __call__(
        self, part: bytes | str, sums: dict[str, Any], span: tuple[int, int], position: Any, until: int
    ) -> dict[str, Any]:
        """Train some steps of an epoch: up to batch ``until``, or the end of the epoch.

        A ``part`` is the state of a span of the members and, without a loader, their batches; the loader goes on from
        ``position``. Returns the state, whether the epoch has ended, the ``sums`` now, and the loader's position.
        """
        if self._kind == "cpu":
            # The state comes ready made, and where it was made the allocator is set up.
            keep_memory_once()
        state, batches = loads(part)
        # Copies, because a call may be repeated with the same memory.
        state = tree_map(lambda leaf: leaf.clone().to(self._kind), state)
        held, self._held = self._held, None
        if held is None or held[0] != span:
            held = span, self._loader and self._loader.take(slice(*span)), LocalTrainer(self._step)
        run = Members(state, batches if self._loader is None else held[1])
        if self._loader is not None:
            run.loader.load_state_dict(position)
        run.running.load_state_dict(sums, torch.device(self._kind))
        start, (enabled, dtype) = time.perf_counter(), self._autocast
        with torch.autocast(self._kind, dtype, enabled):
            ended = held[2].segment(run, until, lambda: False)
        self._held = held
        answer = {"ended": ended, "running": tree_map(cpu, run.running.state_dict()), "state": tree_map(cpu, run.state)}
        return answer | {"position": self._loader and run.loader.state_dict(), "seconds": time.perf_counter() - start}


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

    def __init__(self, step: Step, executor: Executor | Pool, compile: bool, owned: bool = False):
        self._owned = executor if owned and isinstance(executor, Pool) else None
        self._step, self._executor, self._compile = step, executor, compile
        # The loader, and of one that workers do not have the batches that are left of the epoch.
        self._loader: Any = None
        self._left: list[Any] | None = None
        # How many steps a call trains, and seconds that the longest one took.
        self._few, self._busy = 1, 0.0
        self._function: PartWorker | None = None
        # What it held of Python when it was sent.
        self._sent: Any = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return f"{type(self._executor).__qualname__}: {'compiled while they train' if self._compile else 'replayed or eager'}"

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._executor.forget()
        if self._owned is not None:
            self._owned.close()

    def is_ready(self) -> bool:
        """Whether all workers of a pool for this run alone can train now; raises a WorkerError if one cannot be started."""
        return self._owned is None or self._owned.ready(0, everyone=True)

    def segment(self, run: Members, until: int, tick: Tick) -> bool:
        """See :class:`Trainer`."""
        run.begin()
        function, running = self._prepared(run), run.running
        while True:
            start, before = time.perf_counter(), running.batches
            some = min(until, before + self._few) if self._executor.shares else until
            ended = self._piece(run, some, function)
            is_stopped = any([tick() for _ in range(running.batches - before)])
            took = time.perf_counter() - start
            # Passing a large state takes a small share of the time.
            enough = min(max(_PIECE, _SHARE * (took - self._busy)), _MOST)
            self._few = max(1, int(self._few * (2 if took < enough / 2 else 0.5 if took > enough else 1)))
            if ended or is_stopped or running.batches == until:
                return ended

    def _prepared(self, run: Members) -> PartWorker:
        """The function that workers call, made anew for another loader, and where a callback has changed what it holds."""
        dealt = run.loader if isinstance(run.loader, ArrayLoader) else None
        at_start = copy.copy(dealt)
        if at_start is not None:
            at_start.load_state_dict({"epoch": 0, "batches": 0})
        held = _fingerprint((self._step, at_start))
        if run.loader is not self._loader or self._function is None or held[0] != self._sent[0]:
            if run.loader is not self._loader:
                self._left = None
            old, self._loader, self._sent = self._function, run.loader, held
            if old is not None:
                self._executor.forget(old)
            self._function = PartWorker(self._step, dealt, run.state.keys.device.type, self._compile)
        if dealt is None and self._left is None:
            self._left = [*run.loader]
        return self._function

    def _piece(self, run: Members, until: int, function: PartWorker) -> bool:
        """Have the executor train the next batches by calls of a function."""
        executor, running, device, calls = self._executor, run.running, run.state.keys.device, {}
        size, dims = num_models(run.state), getattr(inspect.unwrap(self._step), "batch_dims", 0)
        parts = shares(size, min(executor.count, size))
        position = run.loader.state_dict() if self._left is None else None
        left, before = (self._left or [])[: until - running.batches], running.batches
        # Of this call alone: state and batches have other values in the next one.
        held: list[Any] = []
        for part, (low, high) in enumerate(parts):
            where = torch.arange(low, high, device=device)
            given = take(run.state, where), [take_batch(dims, batch, where) for batch in left]
            held.append(Shared(given) if executor.shares else dumps(given))
            sums = tree_map(cpu, running.part(where).state_dict())
            order = {"part": getattr(held[-1], "path", held[-1]), "sums": sums, "span": (low, high)}
            calls[executor.submit(function, position=position, until=until, **order)] = part
        results: list[Any] = [None] * len(parts)
        for _ in parts:
            call, answer = executor.wait(None)
            low, high = parts[calls[call]]
            if isinstance(answer, WorkerError):
                raise WorkerError(f"models {low} to {high - 1}: {answer}")
            if isinstance(answer, Exception):
                raise renumbered(answer, range(low, high))
            results[calls[call]] = answer
        self._busy = max(answer["seconds"] for answer in results)
        running.join([answer["running"] for answer in results], device)
        ended = all(answer["ended"] for answer in results)
        if self._left is None:
            run.loader.load_state_dict(results[0]["position"])
        else:
            # Batches that were not sent are left, also where the last one sent ends the list.
            self._left = self._left[running.batches - before :] or None
            ended = self._left is None
        after = concat([answer["state"] for answer in results]) if len(results) > 1 else results[0]["state"]
        run.state = tree_map(lambda leaf: leaf.to(device), after)
        return ended


_LEAST = 60.0
"""Seconds that a run must still take in this process for worker processes to be tried: they cost two to start."""
_FIRST, _LATEST = 3, 20
"""Steps after which is known how long one takes, and the number of the latest ones that tell."""
_TRIAL = 0.5
"""Seconds of steps in this process that worker processes are timed with."""


class AutoTrainer(Trainer):
    """Trains in this process, tries worker processes where they may pay, and goes on with what is faster.

    Workers start while this process trains. The trial is a part of the run, of ``steps`` steps if that is known: no step is
    made twice.
    """

    def __init__(self, local: LocalTrainer, make_parallel: Callable[[], ExecutorTrainer], steps: int | None):
        self._local, self._make, self._steps = local, make_parallel, steps
        self._parallel: ExecutorTrainer | None = None
        self._compared = f"no worker processes: {_FIRST} steps tell whether they may pay"
        self._pieces = self._plan()
        self._current, self._some = next(self._pieces)

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return f"{self._current.status}; {self._compared}"

    def close(self) -> None:
        """See :class:`Trainer`."""
        if self._parallel is not None:
            self._parallel.close()

    def segment(self, run: Members, until: int, tick: Tick) -> bool:
        """See :class:`Trainer`."""
        while True:
            start, before = time.perf_counter(), run.running.batches
            some = min(until, before + self._some)
            ended = self._current.segment(run, some, tick)
            piece = run.running.batches - before, time.perf_counter() - start
            self._current, self._some = self._pieces.send(piece)
            if ended or run.running.batches != some or some == until:
                return ended

    def _plan(self) -> Generator[tuple[LocalTrainer | ExecutorTrainer, int], tuple[int, float], None]:
        """Who trains the next piece, and at most how many steps; is sent how many they were, and seconds."""
        times, spent, left, longest = collections.deque[float](maxlen=_LATEST), 0.0, self._steps, 0.0
        while self._parallel is None or not self._parallel.is_ready():
            made, took = yield self._local, 1
            spent, left = spent + took, left and max(0, left - made)
            times.extend([took / made] if made else [])
            expected = spent if left is None else left * statistics.median(times or [0.0])
            if self._parallel is None and len(times) >= _FIRST:
                longest = max(longest, expected)
                reason = f"they start for {_LEAST:g} s of training, not for {longest:.1f} s"
                self._compared = f"no worker processes: {reason}"
                if expected >= _LEAST:
                    self._parallel, self._compared = self._make(), "worker processes have not started yet"
        # The first steps of a new process do much once.
        yield self._parallel, 1
        local, steps, seconds = statistics.median(times), 0, 0.0
        while steps < max(2, math.ceil(_TRIAL / local)):
            made, took = yield self._parallel, max(2, math.ceil(_TRIAL / local))
            steps, seconds = steps + made, seconds + took
        parallel, winner = seconds / steps, self._parallel
        self._compared = f"a step took {1e3 * local:.1f} ms in this process, {1e3 * parallel:.1f} in worker processes"
        if parallel >= local:
            self._parallel.close()
            self._parallel, winner = None, self._local
        while True:
            yield winner, END


def make_trainer(
    step: Step, run: Members, workers: Any, compile: bool, steps: int | None, executor: Executor | None
) -> Trainer:
    """What trains: this process, an executor, or a pool of processes for this run alone."""
    if executor is not None:
        if workers is not None:
            raise ValueError(f"workers is {workers!r} and there is an executor, which has its own; pass one of both")
        return ExecutorTrainer(step, executor, compile)
    local = LocalTrainer(background.compile(step, steps=steps) if compile else background.replayed(step, steps))
    if workers is None or workers == 1:
        return local
    kind = run.state.keys.device.type
    auto = min(num_models(run.state), torch.cuda.device_count() if kind == "cuda" else len(cores()))
    if workers == "auto" and (auto < 2 or not isinstance(run.loader, ArrayLoader)):
        # Only an ArrayLoader has a position inside an epoch, from which another trainer can go on.
        why = "there is one processor or one model" if auto < 2 else "the loader is no ArrayLoader"
        local.note = f"; no worker processes: {why}"
        return local
    made = processes(workers, auto, kind == "cuda")

    def make_parallel() -> ExecutorTrainer:
        return ExecutorTrainer(step, Pool(made, share=True), compile, owned=True)

    return AutoTrainer(local, make_parallel, steps) if workers == "auto" else make_parallel()
