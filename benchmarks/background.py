"""Whether anybody waits for the compiler: K steps from the first call on, eagerly, compiled, and by ``hfta.compile``.

Every run is a process of its own with empty caches, and trains K steps from the first; imports and making the models are not
counted. ``python -m benchmarks background``.
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

import hfta_func as hfta
from benchmarks._measure import ROOT, table
from benchmarks.workloads import WORKLOADS, Spec, batch_size, make
from hfta_func.run.kept import graph, options

WAYS = ("eager", "compiled", "hfta.compile")


def seconds(way: str, spec: Spec, steps: int) -> dict[str, Any]:
    """From before the first call to after the last, and how many calls ran a graph."""
    hfta.step.keep_memory()
    job = make(spec)
    step, state = job.array()
    run: Callable[..., Any] = step
    if way == "compiled":
        run = graph(step, options(step, state, "cpu")[0])
    elif way == "hfta.compile":
        run = hfta.compile(step, steps=steps)
    batches, graphs = itertools.cycle(job.batches), 0
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = run(state, next(batches))
        graphs += getattr(run, "is_compiled", way == "compiled")
    return {"seconds": time.perf_counter() - start, "graphs": graphs}


def measured(way: str, spec: Spec, steps: int) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.background", json.dumps([way, spec, steps])],
            cwd=ROOT, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HFTA_FUNC_CACHE": cache},
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks background", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=["mlp"])
    parser.add_argument("--size", choices=["paper", "small"], default="small")
    parser.add_argument("--models", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--steps", nargs="+", type=int, default=[50, 500, 5000, 50000])
    args = parser.parse_args(argv)
    rows = []
    for name, count, steps in itertools.product(args.workloads, args.models, args.steps):
        spec = Spec(name, args.size, count, batch_size(name, args.size, "cpu"))
        found = {way: measured(way, spec, steps) for way in WAYS}
        best = min(found[way]["seconds"] for way in WAYS[:2])
        own = found[WAYS[2]]
        rows.append(
            [
                WORKLOADS[name].title,
                f"{count}",
                f"{steps:,}",
                *(f"{found[way]['seconds']:.2f} s" for way in WAYS),
                f"{own['seconds'] / best:.2f}x",
                f"{own['graphs']:,}",
            ]
        )
        print(table(["", "M", "steps", *WAYS, "of the better", "calls of the graph"], rows[-1:]), flush=True)
    print()
    print(table(["", "M", "steps", *WAYS, "of the better", "calls of the graph"], rows))
    return 0


if __name__ == "__main__":
    asked, asked_spec, asked_steps = json.loads(sys.argv[1])
    print(json.dumps(seconds(asked, Spec(*asked_spec), asked_steps)))
