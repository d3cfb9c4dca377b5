"""The choice of what trains an array: this process, worker processes, or an executor."""

from __future__ import annotations

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
        self._local, self._loader, self._make, self._steps = local, loader, make_parallel, steps
        # Only an ArrayLoader has a position inside an epoch, from which another trainer can go on.
        self._dealt = isinstance(loader, ArrayLoader)
        self._parallel: ExecutorTrainer | None = None
        self._current: LocalTrainer | ExecutorTrainer = local
        self._is_decided, self._ended = False, True
        # In this process: seconds of the latest steps, steps, seconds.
        self._times: list[float] = []
        self._made, self._spent = 0, 0.0
        # In worker processes: steps and seconds, without the first piece, in which a new process does much once.
        self._tried, self._took = -1, 0.0
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
                self._turn()
            state, self._ended = self._piece(state, running, until, hooks)
            if self._ended or hooks.stopped() or running.batches == until:
                return state, self._ended

    def _turn(self) -> None:
        """Choose who trains the next piece."""
        if self._parallel is None or not self._parallel.is_ready():
            return
        self._current = self._parallel
        if self._tried >= (self._wanted() if self._dealt else 1):
            self._is_decided = True
            parallel, local = self._took / self._tried, statistics.median(self._times)
            self._compared = (
                f"a step took {1e3 * local:.1f} ms in this process, {1e3 * parallel:.1f} in worker processes"
            )
            if parallel >= local:
                self._parallel.close()
                self._parallel, self._current = None, self._local
                # Goes on where the workers have stopped.
                self._local.follow(self._loader)

    def _wanted(self) -> int:
        """Steps of a trial."""
        return max(2, math.ceil(_TRIAL / statistics.median(self._times)))

    def _piece(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        trainer = self._current
        trainer.kept = self.kept
        if self._is_decided or trainer is self._local:
            return trainer.segment(state, running, until, hooks if self._is_decided else self._timed(hooks))
        start, before = time.perf_counter(), running.batches
        if self._dealt:
            until = min(until, before + (self._wanted() - self._tried if self._tried >= 0 else 1))
        state, ended = trainer.segment(state, running, until, hooks)
        if self._tried >= 0:
            self._took += time.perf_counter() - start
            self._tried += running.batches - before
        else:
            self._tried = 0
        return state, ended

    def _timed(self, hooks: SegmentHooks) -> SegmentHooks:
        """Hooks that time the steps, and stop when workers are ready to be tried."""
        start = time.perf_counter()

        def tick() -> None:
            nonlocal start
            now = time.perf_counter()
            self._made += 1
            self._spent += now - start
            if self._parallel is None:
                self._times = [*self._times[1 - _LATEST :], now - start]
                known, each = self._steps, statistics.median(self._times)
                left = self._spent if known is None else (known - self._made) * each
                if len(self._times) >= _FIRST and left >= _LEAST:
                    self._parallel = self._make(self._loader)
            start = now
            hooks.tick()

        def stopped() -> bool:
            return (self._dealt and self._parallel is not None and self._parallel.is_ready()) or hooks.stopped()

        return hooks._replace(tick=tick, stopped=stopped)


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
    on_gpu = run.state.keys.device.type == "cuda"
    most = {"members": num_models(run.state) if workers == "auto" else len(run.history.seeds)}
    if run.state.keys.device.type == "cpu":
        most[PROCESSORS] = len(cores())
    if on_gpu and workers == "auto":
        most["GPUs"] = torch.cuda.device_count()
    count = number_of(workers, min(most.values()), most, "'auto', or None for this process")
    if workers == "auto" and (count == 1 or not isinstance(loader, ArrayLoader | Sequence) or batches is not loader):
        return local

    def make_parallel(loader: Any) -> ExecutorTrainer:
        return ExecutorTrainer(step, batches, loader, Pool(processes(count, on_gpu), share=True), compile, owned=True)

    return make_parallel(loader) if workers != "auto" else AutoTrainer(local, loader, make_parallel, steps)
