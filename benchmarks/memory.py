"""What a step keeps for its backward pass: memory and time of arrays that keep less, against one that keeps everything.

Memory is what an array holds between steps and the peak of a step. The arrays take turns in one run. They write their state
in place, and small ones are replayed, as ``fit`` does it. Their losses are
compared before anything is shown: of eager ones in float64 and without anything random, as Adam makes full steps of rounding
noise, and of a compiled one the first. ``python -m benchmarks memory``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import torch

import hfta_func as hfta
from benchmarks import _code
from benchmarks._measure import add_to, interleaved, peak_bytes, resident_bytes, seconds, table
from benchmarks.modes import RUN, array
from benchmarks.sweep import ROUNDING, TOLERANCE, difference
from benchmarks.workloads import WORKLOADS, Spec, batch_size, make

ALL = "array"
WAYS: dict[str, dict[str, Any]] = {
    ALL: {},
    'save="less"': {"save": "less"},
    "checkpoint=True": {"checkpoint": True},
    "both": {"save": "less", "checkpoint": True},
}
"""Options of a step by name."""
COMPILED = "compiled"
STEPS, WARM, TURN = 3, 6, 0.3
"""Steps whose losses are compared, steps before the first turn, and seconds that a turn takes at least."""


def measure(spec: Spec, compile: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds, bytes and agreement of every way, relative to the array that keeps everything."""
    hfta.step.keep_memory()
    job = make(spec)
    runs = {name: array(job, steps=RUN, **own) for name, own in WAYS.items()}
    differences = _differences(spec)
    if compile:
        runs[COMPILED] = array(job, compiled=True)
    first, timers = job.batches[0], {}
    starts = {name: run.step(first).tolist() for name, run in runs.items()}
    differences[COMPILED] = difference(starts.get(COMPILED, starts[ALL]), starts[ALL])
    for name, run in runs.items():
        work = functools.partial(run.step, first)
        # The first steps find things out, and record what is replayed.
        for _ in range(WARM):
            work()
        timers[name] = functools.partial(seconds, work, max(1, round(TURN / seconds(work, 1))))
    times = interleaved(timers, rounds)
    found = {}
    for name, run in runs.items():
        found[name] = {
            "seconds": times[name],
            "time": statistics.median(own / base for own, base in zip(times[name], times[ALL], strict=True)),
            "bytes": resident_bytes(run.held()) + peak_bytes(functools.partial(run.step, first)),
            "agrees": differences[name] < (ROUNDING if name == COMPILED else TOLERANCE),
        }
    for row in found.values():
        row["memory"] = row["bytes"] / found[ALL]["bytes"]
    return found


def _differences(spec: Spec) -> dict[str, float]:
    """By how much the losses of every eager way differ from those of the array that keeps everything."""
    torch.set_default_dtype(torch.float64)
    try:
        losses = {}
        for name, own in WAYS.items():
            job = make(spec._replace(quiet=True))
            run = array(job, **own)
            losses[name] = [run.step(batch).tolist() for batch in job.batches[:STEPS]]
        return {name: difference(own, losses[ALL]) for name, own in losses.items()}
    finally:
        torch.set_default_dtype(torch.float32)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say whether all ways agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=["bert", "transformer", "pointnet-cls"])
    parser.add_argument("--size", choices=["paper", "small"], default="small")
    parser.add_argument("--models", nargs="+", type=int, default=[16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="also a compiled array, whose compiler plans its memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    args = parser.parse_args(argv)
    about, rows, results = _code.stamp(), [], {}
    for name in args.workloads:
        for count in args.models:
            size = batch_size(name, args.size, "cpu")
            found = measure(Spec(name, args.size, count, size), args.compile, args.rounds)
            results[f"{name} {args.size} {count} {size}"] = found
            rows += [
                [
                    f"{WORKLOADS[name].title} ({args.size}), M = {count}, {way}",
                    f"{1e3 * statistics.median(one['seconds']):.1f}",
                    f"{one['time']:.2f}x" if one["agrees"] else "differs",
                    f"{one['bytes'] / 2**20:.1f}",
                    f"{one['memory']:.2f}x",
                ]
                for way, one in found.items()
            ]
    print(table(["", "ms", "time", "MiB", "memory"], rows), flush=True)
    if args.json:
        add_to(args.json, "memory", about, results)
    return 0 if all(one["agrees"] for found in results.values() for one in found.values()) else 1
