"""The choice of what trains an array: this process, worker processes, or an executor."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from hfta_func._tree import num_models
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.executor_trainer import ExecutorTrainer
from hfta_func.run.trainer import LocalTrainer, Members, SegmentHooks, Step, Trainer
from hfta_func.workers.executor import Executor
from hfta_func.workers.pool import PROCESSORS, Pool, number_of, processes
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
        self._local, self._make, self._left = local, make_parallel, steps
        self._current: LocalTrainer | ExecutorTrainer = local
        self._parallel: ExecutorTrainer | None = None
        # In this process: seconds of all steps, and of the latest ones.
        self._spent, self._times = 0.0, collections.deque[float](maxlen=_LATEST)
        # In worker processes: steps and seconds of all pieces but the first, in which a new process does much once.
        self._tried: list[tuple[int, float]] = []
        self._is_decided, self._compared = False, "worker processes have not been tried"

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
            if not self._is_decided:
                self._choose()
            start, before, some = time.perf_counter(), run.running.batches, until
            if not self._is_decided:
                some = min(until, before + (self._wanted() if self._tried else 1))
            ended = self._current.segment(run, some, hooks)
            made, took = run.running.batches - before, time.perf_counter() - start
            if self._current is not self._local:
                self._tried.append((made, took) if self._tried else (0, 0.0))
            elif made:
                self._spent += took
                self._times.append(took / made)
                self._left = self._left and max(0, self._left - made)
            if ended or hooks.stopped() or run.running.batches == until:
                return ended

    def _choose(self) -> None:
        """Choose who trains the next piece."""
        if self._parallel is None:
            left = self._spent if self._left is None or not self._times else self._left * statistics.median(self._times)
            if len(self._times) >= _FIRST and left >= _LEAST:
                self._parallel = self._make()
            return
        if not self._parallel.is_ready():
            return
        self._current, steps = self._parallel, sum(made for made, _ in self._tried)
        if steps < self._wanted():
            return
        self._is_decided = True
        parallel, local = sum(took for _, took in self._tried) / steps, statistics.median(self._times)
        self._compared = f"a step took {1e3 * local:.1f} ms in this process, {1e3 * parallel:.1f} in worker processes"
        if parallel >= local:
            self._parallel.close()
            self._parallel, self._current = None, self._local

    def _wanted(self) -> int:
        """Steps of a trial."""
        return max(2, math.ceil(_TRIAL / statistics.median(self._times)))


def make_trainer(
    step: Step,
    run: Members,
    workers: int | Literal["auto"] | None,
    compile: bool,
    steps: int | None = None,
    executor: Executor | None = None,
    most: int | None = None,
) -> Trainer:
    """What trains: this process, an executor, or a pool of processes for this run alone, of at most as many as members."""
    if executor is not None:
        if workers is not None:
            raise ValueError(f"workers is {workers!r} and there is an executor, which has its own; pass one of both")
        return ExecutorTrainer(step, executor, compile)
    local = LocalTrainer(background.compile(step, steps=steps) if compile else background.replayed(step, steps))
    if workers is None or workers == 1:
        return local
    is_auto, kind = workers == "auto", run.state.keys.device.type
    limits = {"members": num_models(run.state) if is_auto or most is None else most}
    if kind == "cpu":
        limits[PROCESSORS] = len(cores())
    if kind == "cuda" and is_auto:
        limits["GPUs"] = torch.cuda.device_count()
    count = number_of(workers, min(limits.values()), limits, "'auto', or None for this process")

    def make_parallel() -> ExecutorTrainer:
        return ExecutorTrainer(step, Pool(processes(count, kind == "cuda"), share=True), compile, owned=True)

    if not is_auto:
        return make_parallel()
    # Only an ArrayLoader has a position inside an epoch, from which another trainer can go on.
    return AutoTrainer(local, make_parallel, steps) if count > 1 and isinstance(run.loader, ArrayLoader) else local
