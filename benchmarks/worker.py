"""One way to train one workload, in a process of its own that does what it is told, line by line.

Ways do not disturb each other so: allocator settings, batching rules, compiled graphs and memory are each one's own, and
only one process works at a time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

import hfta_func as hfta
from benchmarks._child import Child, serve
from benchmarks._measure import peak_bytes, resident_bytes, seconds
from benchmarks._roofline import roofline
from benchmarks.modes import MANY, MODES, SERIAL, Run
from benchmarks.workloads import Spec, make


class Worker(Child):
    """The side of the process that asks.

    Args:
        mode: A key of :data:`benchmarks.modes.MODES`.
        spec: What to train.
        threads: Of PyTorch.
        env: Further environment variables.
        cache: Folder of compiled graphs; one of its own, which is empty, unless one is given.
    """

    def __init__(
        self, mode: str, spec: Spec, threads: int, env: Mapping[str, str] | None = None, cache: str | None = None
    ):
        # Nothing is compiled before the clock runs.
        self._compiled = None if cache else tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        own = {
            # The profiler talks.
            "KINETO_LOG_LEVEL": "99",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCHINDUCTOR_CACHE_DIR": cache or (self._compiled.name if self._compiled else ""),
            # JAX would take most of a GPU's memory, where others work too.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        super().__init__("benchmarks.worker", [mode, spec, threads], {**own, **(env or {})})

    def close(self, grace: float = 0.0) -> None:
        """End the process, by force after ``grace`` seconds."""
        super().close(grace)
        if self._compiled:
            self._compiled.cleanup()


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that spans take together, where they overlap once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


class Desk:
    """The side that answers."""

    def __init__(self, mode: str, spec: Spec):
        self.mode, self.spec = mode, spec
        self.run: Run | None = None

    def losses(self, models: int | None = None, dtype: str = "float64", steps: int = 3) -> list[list[float]]:
        """Of some steps without anything random, each ``[M]``; in float64, as Adam makes steps of rounding noise.

        Args:
            models: Only the first so many models.
            dtype: Of parameters and data.
            steps: Number of steps.
        """
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            count = min(self.spec.num_models, models or self.spec.num_models)
            job = make(self.spec._replace(num_models=count, quiet=True, amp=False))
            run = MODES[self.mode](job)
            return [run.step(batch).tolist() for batch in job.batches[:steps]]
        finally:
            torch.set_default_dtype(torch.float32)
            gc.collect()
            if self.spec.device == "cuda":
                torch.cuda.empty_cache()

    def start(self) -> tuple[float, list[list[float]]]:
        """Make models and take two steps; returns the seconds of the first, with compiling, and the losses of both."""
        if self.spec.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        job = make(self.spec)
        self._batches = itertools.cycle(job.batches)
        start = time.perf_counter()
        self.run = MODES[self.mode](job)
        first = self.run.step(next(self._batches)).flatten().tolist()
        took = time.perf_counter() - start
        return took, [first, self.run.step(next(self._batches)).flatten().tolist()]

    def reach(self, steps: int, patience: float) -> tuple[float, float, list[float], float]:
        """Make models and take some steps; what is left after ``patience`` seconds is taken to last as long as the last ones.

        Returns:
            Seconds to the end of the first step and of the last one, the losses of the first, and seconds of the last ones.
        """
        job = make(self.spec)
        self._batches, taken = itertools.cycle(job.batches), list[float]()
        start = time.perf_counter()
        self.run = MODES[self.mode](job)
        losses = self.run.step(next(self._batches)).flatten().tolist()
        first = time.perf_counter() - start
        while len(taken) < steps - 1 and (len(taken) < 3 or sum(taken) < patience):
            taken.append(seconds(self._step, 1, self.spec.device))
        each = statistics.median(taken[-5:])
        return first, first + sum(taken) + (steps - 1 - len(taken)) * each, losses, each

    def roofline(self) -> dict[str, float]:
        """The least time of a step of one model on this machine."""
        job = make(self.spec._replace(num_models=1))
        run, batch = job.solo(0, False), tuple(leaf[0] for leaf in job.batches[0])
        run.step(batch)
        return roofline(lambda: run.step(batch))

    def time(self, calls: int) -> list[float]:
        """Seconds of a step, and of the processors at work meanwhile."""
        before = os.times()
        took = seconds(self._step, calls, self.spec.device)
        after = os.times()
        return [took, (after.user + after.system - before.user - before.system) / calls]

    def memory(self) -> int | None:
        """The most bytes of tensors at one time in a step."""
        assert self.run is not None
        if self.mode in ("JAX", MANY):
            return None
        if self.spec.device == "cuda":
            if "compiled" not in self.mode and "replayed" not in self.mode:
                # The replay of a CUDA graph allocates nothing: what it works in was allocated while it was captured.
                torch.cuda.reset_peak_memory_stats()
            self._step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return resident_bytes(self.run.held()) + peak_bytes(self._step)

    def kernels(self, calls: int) -> list[float]:
        """Seconds of a step in which the device worked, by the profiler, and seconds of a step.

        A GPU's step is timed without the profiler, which slows down Python and no kernel. On a CPU operators stand for
        kernels, and the profiler slows down both.
        """
        wall = seconds(self._step, calls, self.spec.device)
        cuda = self.spec.device == "cuda"
        kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
        activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profile:
            profiled = seconds(self._step, calls, self.spec.device)
        events = [event for event in profile.events() if event.device_type == kind and not event.is_user_annotation]
        return [
            covered((event.time_range.start, event.time_range.end) for event in events) / 1e6 / calls,
            wall if cuda else profiled,
        ]

    def largest(self) -> int:
        """The most models that fit as an array: tried on a GPU, predicted on a CPU."""
        job = make(self.spec)
        step, state = job.array()
        if self.spec.device == "cuda":
            return hfta.run.max_models(step, state, job.batches[0], limit=4096)
        return hfta.plan(step, state, job.batches[0], limit=100_000).num_models

    def _step(self) -> None:
        assert self.run is not None
        self.run.step(next(self._batches))


def main(argument: str) -> None:
    """Answer until nothing is asked."""
    mode, spec, threads = json.loads(argument)
    if mode != SERIAL:
        # Where there is too little memory, a mode is ended, and not the loop that all are compared with.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(threads)
    if "default allocator" not in mode:
        hfta.step.keep_memory()
    serve(Desk(mode, Spec(*spec)))


if __name__ == "__main__":
    main(sys.argv[1])
