"""How long a step takes to compile for the first time, what its step takes then, and how a later process begins.

Every row is a process of its own with empty caches, apart from headers that PyTorch precompiles once for a machine. Seconds
in Python and in C++ are those of processors, which depend little on other work. ``python -m benchmarks compiling``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks._measure import ROOT, seconds, table
from benchmarks.modes import MODES
from benchmarks.workloads import WORKLOADS, Spec, batch_size, make
from hfta_func.run import kept
from hfta_func.step.replay import reached_by

WAYS = ("kept", "later process", "array compiled", "stock vmap compiled")
"""A graph as ``hfta.compile`` keeps it, its first step in another process, and modes whose first call compiles."""


def row(way: str, spec: Spec) -> dict[str, float]:
    """Seconds from the first call to the second, on a clock, of this process and of its children; then those of a step."""
    job = make(spec)
    batches = itertools.cycle(job.batches)
    before, start = os.times(), time.perf_counter()
    run = _kept(job, way == WAYS[0]) if way in WAYS[:2] else MODES[way](job).step
    run(next(batches))
    after, took = os.times(), time.perf_counter() - start
    return {
        "clock": took,
        "Python": after.user + after.system - before.user - before.system,
        "C++": after.children_user + after.children_system - before.children_user - before.children_system,
        "step, ms": 1e3 * min(seconds(lambda: run(next(batches)), 20) for _ in range(5)),
    }


def _kept(job: Any, makes: bool) -> Callable[[Any], Any]:
    step, state = job.array()
    if makes:
        kept.make(step, (state, job.batches[0]), "graph")
    graph = kept.load("graph", reached_by(step).tensors)
    assert graph is not None, "nothing is kept"
    return lambda batch: graph(state, batch)


def measured(spec: Spec) -> dict[str, dict[str, float]]:
    """The rows of one workload, by way."""
    rows = {}
    with tempfile.TemporaryDirectory() as cache:
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.compiling", json.dumps([way, spec])],
                cwd=ROOT,
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{WAYS.index(way)}",
                    "HFTA_FUNC_CACHE": f"{cache}/kept",
                },
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            rows[way] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=["mlp", "transformer", "resnet"])
    parser.add_argument("--models", nargs="+", type=int, default=[16])
    args = parser.parse_args(argv)
    rows = []
    for name, count in itertools.product(args.workloads, args.models):
        for way, found in measured(Spec(name, "small", count, batch_size(name, "small", "cpu"))).items():
            rows.append([WORKLOADS[name].title, f"{count}", way, *(f"{value:.2f}" for value in found.values())])
            print(*rows[-1], sep=" | ", flush=True)
    print()
    print(table(["", "M", "", "clock, s", "Python, s", "C++, s", "step, ms"], rows))
    return 0


if __name__ == "__main__":
    asked, asked_spec = json.loads(sys.argv[1])
    print(json.dumps(row(asked, Spec(*asked_spec))))
