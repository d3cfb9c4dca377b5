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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hfta_func as hfta
from benchmarks._measure import ROOT, peak_bytes, resident_bytes, seconds
from benchmarks.modes import MANY, MODES, SERIAL, Run
from benchmarks.workloads import Spec, make


class Worker:
    """The side of the process that asks: a method for each order; ``begin`` and ``end`` are its two halves."""

    def __init__(self, mode: str, spec: Spec, threads: int):
        order = json.dumps([mode, spec, threads])
        command = [sys.executable, "-m", "benchmarks.worker", order]
        # Nothing is compiled before the clock runs.
        self._compiled = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        own = {
            # The profiler talks.
            "KINETO_LOG_LEVEL": "99",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCHINDUCTOR_CACHE_DIR": self._compiled.name,
            # JAX would take most of a GPU's memory, where others work too.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdin=-1, stdout=-1, stderr=self._errors, text=True
        )

    def begin(self, order: str, *args: Any) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([order, *args]) + "\n")
            self._process.stdin.flush()

    def end(self) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: in the words of the process, if it could not.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:]
            raise RuntimeError(f"the process ended with status {status}: {' '.join(last)}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, order: str, *args: Any) -> Any:
        """Both."""
        self.begin(order, *args)
        return self.end()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._compiled.cleanup()


class Desk:
    """The side that answers."""

    def __init__(self, mode: str, spec: Spec):
        self.mode, self.spec = mode, spec
        self.run: Run | None = None

    def losses(self) -> list[list[float]]:
        """Of three steps without anything random, each ``[M]``; in float64, as Adam makes steps of rounding noise."""
        torch.set_default_dtype(torch.float64)
        try:
            job = make(self.spec._replace(quiet=True, amp=False))
            run = MODES[self.mode](job)
            return [run.step(batch).tolist() for batch in job.batches[:3]]
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
            if "compiled" not in self.mode:
                # The replay of a CUDA graph allocates nothing: what it works in was allocated while it was captured.
                torch.cuda.reset_peak_memory_stats()
            self._step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return resident_bytes(self.run.held()) + peak_bytes(self._step)

    def largest(self) -> int:
        """The most models that fit as an array: tried on a GPU, predicted on a CPU."""
        job = make(self.spec)
        step, state = job.array()
        if self.spec.device == "cuda":
            return hfta.max_models(step, state, job.batches[0], limit=4096)
        return hfta.plan(step, state, job.batches[0], limit=100_000).num_models

    def _step(self) -> None:
        assert self.run is not None
        self.run.step(next(self._batches))


def main(order: str) -> None:
    """Answer until nothing is asked."""
    # Only answers go to the standard output.
    answers, sys.stdout = sys.stdout, sys.stderr
    mode, spec, threads = json.loads(order)
    if mode != SERIAL:
        # Where there is too little memory, a mode is ended, and not the loop that all are compared with.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
    torch.set_num_threads(threads)
    if "default allocator" not in mode:
        hfta.keep_memory()
    desk = Desk(mode, Spec(*spec))
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = getattr(desk, name)(*args)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
