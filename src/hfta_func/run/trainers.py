"""The choice of what trains an array: this process, worker processes, or an executor."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from hfta_func._tree import num_models
from hfta_func.run import background
from hfta_func.run.background import replayed
from hfta_func.run.data import ArrayLoader
from hfta_func.run.executor_trainer import ExecutorTrainer
from hfta_func.run.run import Run
from hfta_func.run.running import Running
from hfta_func.run.trainer import LocalTrainer, SegmentEnd, SegmentHooks, Step, Trainer
from hfta_func.step.state import TrainState
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

    def __init__(
        self,
        local: LocalTrainer,
        loader: Any,
        make_parallel: Callable[[Any], ExecutorTrainer],
        steps: int | None = None,
    ):
        self._local, self._loader, self._make, self._left = local, loader, make_parallel, steps
        # Only an ArrayLoader has a position inside an epoch, from which another trainer can go on.
        self._dealt = isinstance(loader, ArrayLoader)
        self._parallel: ExecutorTrainer | None = None
        self._current: LocalTrainer | ExecutorTrainer = local
        self._is_decided, self._ended = False, True
        # In this process: seconds of all steps, and of the latest ones.
        self._spent, self._times = 0.0, collections.deque[float](maxlen=_LATEST)
        # In worker processes: pieces, and steps and seconds of all but the first, in which a new process does much once.
        self._tried: list[tuple[int, float]] = []
        self._compared = "worker processes have not been tried"

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return f"{self._current.status}; {self._compared}"

    def follow(self, loader: Any) -> None:
        """See :class:`Trainer`."""
        self._loader = loader
        for one in (self._local, self._parallel):
            if one is not None:
                one.follow(loader)

    def close(self) -> None:
        """See :class:`Trainer`."""
        if self._parallel is not None:
            self._parallel.close()

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        while True:
            if not self._is_decided and (self._ended or self._dealt):
                self._choose()
            trainer, start, before = self._current, time.perf_counter(), running.batches
            trainer.kept, some = self.kept, until
            if not self._is_decided and trainer is self._local:
                some = min(until, before + 1)
            elif not self._is_decided and self._dealt:
                some = min(until, before + (self._wanted() if self._tried else 1))
            state, self._ended = trainer.segment(state, running, some, hooks)
            made, took = running.batches - before, time.perf_counter() - start
            if trainer is self._local:
                self._spent += took
                self._times += [took / made] if made else []
                self._left = None if self._left is None else self._left - made
            elif not self._is_decided:
                self._tried.append((made, took) if self._tried else (0, 0.0))
            if self._ended or hooks.stopped() or running.batches == until:
                return state, self._ended

    def _choose(self) -> None:
        """Choose who trains the next piece."""
        if self._parallel is None:
            left = self._spent if self._left is None or not self._times else self._left * statistics.median(self._times)
            if len(self._times) >= _FIRST and left >= _LEAST:
                self._parallel = self._make(self._loader)
            return
        if not self._parallel.is_ready():
            return
        self._current, steps = self._parallel, sum(made for made, _ in self._tried)
        if steps < (self._wanted() if self._dealt else 1):
            return
        self._is_decided = True
        parallel, local = sum(took for _, took in self._tried) / steps, statistics.median(self._times)
        self._compared = f"a step took {1e3 * local:.1f} ms in this process, {1e3 * parallel:.1f} in worker processes"
        if parallel >= local:
            self._parallel.close()
            self._parallel, self._current = None, self._local
            # Goes on where the workers have stopped.
            self._local.follow(self._loader)

    def _wanted(self) -> int:
        """Steps of a trial."""
        return max(2, math.ceil(_TRIAL / statistics.median(self._times)))


def make_trainer(
    step: Step,
    run: Run,
    workers: int | Literal["auto"] | None,
    compile: bool,
    steps: int | None = None,
    executor: Executor | None = None,
) -> Trainer:
    """What trains: this process, an executor, or a pool of processes for this run alone.

    A run that goes on may have fewer members than it had: then some processes have nothing to do.
    """
    batches, loader = run.batches, run.loader
    if executor is not None:
        if workers is not None:
            raise ValueError(f"workers is {workers!r} and there is an executor, which has its own; pass one of both")
        return ExecutorTrainer(step, batches, loader, executor, compile)
    local = LocalTrainer(background.compile(step, steps=steps) if compile else replayed(step, steps), batches, loader)
    if workers is None or workers == 1:
        return local
    is_auto, kind = workers == "auto", run.state.keys.device.type
    most = {"members": num_models(run.state) if is_auto else len(run.history.seeds)}
    if kind == "cpu":
        most[PROCESSORS] = len(cores())
    if kind == "cuda" and is_auto:
        most["GPUs"] = torch.cuda.device_count()
    count = number_of(workers, min(most.values()), most, "'auto', or None for this process")
    if is_auto and (count == 1 or not isinstance(loader, ArrayLoader | Sequence) or batches is not loader):
        return local

    def make_parallel(loader: Any) -> ExecutorTrainer:
        return ExecutorTrainer(
            step, batches, loader, Pool(processes(count, kind == "cuda"), share=True), compile, owned=True
        )

    return make_parallel(loader) if not is_auto else AutoTrainer(local, loader, make_parallel, steps)
