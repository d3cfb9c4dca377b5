"""Profiles of the workloads: whether lines add up to the step, and how far the sum is from a step that is not profiled."""

from __future__ import annotations

import argparse
import statistics

import hfta_func as hfta
from benchmarks._measure import machine, table
from benchmarks.workloads import WORKLOADS, Spec, batch_size, make

EXAMPLES = ("mlp", "resnet", "mobilenet-v2", "mobilenet-v3s", "pointnet-cls", "dcgan", "transformer", "bert")
MOST_DISTURBED, MOST_BIAS = 0.03, 0.05


def measure(name: str, models: int, turns: int, show: bool) -> tuple[float, float, hfta.Profile]:
    """The medians over several profiles of what lines leave of the step, and of the bias; and the last profile."""
    spec = Spec(name, "small", models, batch_size(name, "small", "cpu"))
    job = make(spec)
    step, state = job.array()
    profiles = [hfta.profile(step, state, job.batches[0]) for _ in range(turns)]
    left = [result.phases["disturbed"] / result.seconds for result in profiles]
    if show:
        print(f"\n{name}\n{profiles[-1]}", flush=True)
    return statistics.median(left), statistics.median(result.bias for result in profiles), profiles[-1]


def main(argv: list[str] | None = None) -> int:
    """The command line; the status is 1 if a workload is off by more than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks profiles", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*EXAMPLES])
    parser.add_argument("--models", type=int, default=8, help="M")
    parser.add_argument("--turns", type=int, default=3, help="profiles of each, of which medians are taken")
    parser.add_argument("--show", action="store_true", help="print the profiles, too")
    args = parser.parse_args(argv)
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**machine()), flush=True)
    rows, failed = [], False
    for name in args.workloads:
        left, bias, result = measure(name, args.models, args.turns, args.show)
        wrong = abs(left) > MOST_DISTURBED or abs(bias) > MOST_BIAS
        failed |= wrong
        times = f"{1e3 * result.unprofiled:.2f}", f"{1e3 * result.seconds:.2f}"
        rows.append([name, *times, f"{left:+.1%}", f"{bias:+.1%}", "off" if wrong else ""])
        print(*rows[-1], flush=True)
    print(table(["workload", "unprofiled ms", "sum of lines", "left by medians", "bias", ""], rows))
    return int(failed)
