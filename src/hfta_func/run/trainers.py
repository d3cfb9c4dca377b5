"""The choice of what trains an array: this process, worker processes, or an executor."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Generator
from typing import Literal

import torch

from hfta_func._tree import num_models
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.executor_trainer import ExecutorTrainer
from hfta_func.run.trainer import END, LocalTrainer, Members, SegmentHooks, Step, Trainer
from hfta_func.workers.pool import Executor, Pool, processes
from hfta_func.workers.process import cores

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
        self._compared = "worker processes have not been tried"
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

    def segment(self, run: Members, until: int, hooks: SegmentHooks) -> bool:
        """See :class:`Trainer`."""
        while True:
            start, before = time.perf_counter(), run.running.batches
            ended = self._current.segment(run, min(until, before + self._some), hooks)
            piece = run.running.batches - before, time.perf_counter() - start
            self._current, self._some = self._pieces.send(piece)
            if ended or hooks.stopped() or run.running.batches == until:
                return ended

    def _plan(self) -> Generator[tuple[LocalTrainer | ExecutorTrainer, int], tuple[int, float], None]:
        """Who trains the next piece, and at most how many steps; is sent how many they were, and seconds."""
        times, spent, left = collections.deque[float](maxlen=_LATEST), 0.0, self._steps
        while self._parallel is None or not self._parallel.is_ready():
            made, took = yield self._local, 1
            spent, left = spent + took, left and max(0, left - made)
            times.extend([took / made] if made else [])
            expected = spent if left is None else left * statistics.median(times or [0.0])
            if self._parallel is None and len(times) >= _FIRST and expected >= _LEAST:
                self._parallel = self._make()
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
    step: Step,
    run: Members,
    workers: int | Literal["auto"] | None,
    compile: bool,
    steps: int | None = None,
    executor: Executor | None = None,
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
        return local
    made = processes(workers, auto, kind == "cuda")

    def make_parallel() -> ExecutorTrainer:
        return ExecutorTrainer(step, Pool(made, share=True), compile, owned=True)

    return AutoTrainer(local, make_parallel, steps) if workers == "auto" else make_parallel()
