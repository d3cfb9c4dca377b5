"""Profiles of the workloads: how far the sum of the lines is from a step that is not profiled, and what recording costs.

With ``--follow``, what following a profile's advice gains, and then that of the profile after it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hfta_func as hfta
from benchmarks._measure import interleaved, machine, table
from benchmarks.workloads import WORKLOADS, Job, Spec, batch_size, make

EXAMPLES = ("mlp", "resnet", "mobilenet-v2", "mobilenet-v3s", "pointnet-cls", "dcgan", "transformer", "bert")
MOST_BIAS = 0.05


def measure(name: str, models: int, turns: int, show: bool) -> tuple[float, float, hfta.run.Profile]:
    """The medians over several profiles of the bias and of the share that recording costs; and the last profile."""
    spec = Spec(name, "small", models, batch_size(name, "small", "cpu"))
    job = make(spec)
    step, state = job.array()
    profiles = [hfta.profile(step, state, job.batches[0]) for _ in range(turns)]
    costs = [result.profiled / result.unprofiled - 1 for result in profiles]
    if show:
        print(f"\n{name}\n{profiles[-1]}", flush=True)
    return statistics.median(result.bias for result in profiles), statistics.median(costs), profiles[-1]


def followed(advice: str, job: Job) -> tuple[str, Callable[..., Any], Any] | None:
    """What an advice says to do, and step and state that follow it; None if it names nothing that a program can do."""
    if "replay=True" in advice:
        return "replay=True", *job.array(replay=True)
    if "hfta_func.compile(step)" in advice:
        step, state = job.array()
        return "compiled", torch.compile(step, fullgraph=True, dynamic=False), state
    return None


def gain(ways: dict[str, tuple[Callable[..., Any], Any]], batch: Any, rounds: int) -> float:
    """How many times as fast the second of two steps is: the median ratio of processor time, taken by turns."""
    states = {name: state for name, (_, state) in ways.items()}

    def cpu(name: str, calls: int) -> float:
        start = time.process_time()
        for _ in range(calls):
            states[name], _ = ways[name][0](states[name], batch)
        return (time.process_time() - start) / calls

    # Until a replayed step has its record and a compiled one its graph.
    for name, (step, _) in ways.items():
        while cpu(name, 8) and "has not paid" in getattr(step, "status", ""):
            pass
    calls = max(1, int(0.2 / min(cpu(name, 8) for name in ways)))
    before, after = interleaved({name: lambda name=name: cpu(name, calls) for name in ways}, rounds).values()
    return statistics.median(one / other for one, other in zip(before, after, strict=True))


def follow(name: str, models: int, times: int, rounds: int) -> list[list[str]]:
    """Rows of what profiles said, what was done, and what that gained; after each the step is profiled again."""
    job, rows = make(Spec(name, "small", models, batch_size(name, "small", "cpu"))), []
    latest = "", *job.array()
    for _ in range(times):
        result = hfta.profile(*latest[1:], job.batches[0])
        following = followed(result.advice, job)
        if following is None:
            return [*rows, [name, f"{1e3 * result.unprofiled:.2f}", result.advice, "-", "-"]]
        ratio = gain({"before": latest[1:], "after": following[1:]}, job.batches[0], rounds)
        said = result.advice.partition(":")[0]
        rows.append([name, f"{1e3 * result.unprofiled:.2f}", said, following[0], f"{ratio:.2f}x"])
        print(*rows[-1], flush=True)
        latest = following
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line; the status is 1 if a workload is off by more than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks profiles", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*EXAMPLES])
    parser.add_argument("--models", type=int, default=8, help="M")
    parser.add_argument("--turns", type=int, default=3, help="profiles of each, of which medians are taken")
    parser.add_argument("--show", action="store_true", help="print the profiles, too")
    parser.add_argument(
        "--follow", type=int, default=0, metavar="N", help="follow the advice of N profiles in a row instead"
    )
    parser.add_argument("--rounds", type=int, default=7, help="with --follow, measurements of which the median counts")
    args = parser.parse_args(argv)
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**machine()), flush=True)
    if args.follow:
        rows = [row for name in args.workloads for row in follow(name, args.models, args.follow, args.rounds)]
        print(table(["workload", "ms", "profile", "change", "gain"], rows))
        return 0
    rows, failed = [], False
    for name in args.workloads:
        bias, cost, result = measure(name, args.models, args.turns, args.show)
        wrong = abs(bias) > MOST_BIAS
        failed |= wrong
        times = f"{1e3 * result.unprofiled:.2f}", f"{1e3 * result.seconds:.2f}"
        rows.append([name, *times, f"{bias:+.1%}", f"{cost:+.1%}", "off" if wrong else ""])
        print(*rows[-1], flush=True)
    print(table(["workload", "unprofiled ms", "sum of lines", "bias", "recording", ""], rows))
    return int(failed)
