"""What ``hfta.plan`` predicts of every workload's step from few models, next to what more models take."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch

import hfta_func as hfta
from benchmarks import _code
from benchmarks._measure import interleaved, peak_bytes, resident_bytes, seconds, table
from benchmarks.modes import array
from benchmarks.workloads import WORKLOADS, Spec, batch_size, make

MEASURED, PREDICTED = (2, 4, 8), (12, 16)


def compare(spec: Spec, rounds: int, turns: int) -> dict[str, Any]:
    """Predicted and measured seconds and bytes at each M of :data:`PREDICTED`, and by what share the prediction is off.

    Predicting and measuring take turns: medians of turns, so that no slow phase of the machine falls on one alone.
    """
    job = make(spec)
    step, state = job.array()
    pairs: dict[int, list[tuple[float, float]]] = {count: [] for count in PREDICTED}
    memory = {}
    for _ in range(turns):
        found = hfta.plan(step, state, job.batches[0], sizes=MEASURED)
        for count in PREDICTED:
            larger = make(spec._replace(num_models=count))
            run = array(larger)
            work = lambda run=run, larger=larger: run.step(larger.batches[0])  # noqa: E731
            (times,) = interleaved({"": lambda work=work: seconds(work, 1, spec.device)}, rounds, warmup=3).values()
            pairs[count].append((found.time(count), statistics.median(times)))
            memory[count] = found.memory(count), resident_bytes(run.held()) + peak_bytes(work, spec.device)
            del run, work
    rows = {}
    for count, both in pairs.items():
        predicted, measured = map(statistics.median, zip(*both, strict=True))
        off = statistics.median(a / b for a, b in both) - 1
        bytes_predicted, bytes_measured = memory[count]
        rows[str(count)] = {
            "predicted": [predicted, bytes_predicted],
            "measured": [measured, bytes_measured],
            "off": [off, bytes_predicted / bytes_measured - 1],
        }
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks predict", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--size", choices=["paper", "small"], default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="steps of a measurement")
    parser.add_argument("--turns", type=int, default=5, help="how often to predict and measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    # The profiler talks.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    lines = []
    for name in args.workloads:
        spec = Spec(name, args.size, 1, batch_size(name, args.size, args.device), args.device)
        found = compare(spec, args.rounds, args.turns)
        results[name] = {"size": args.size, "machine": _code.stamp(), "rows": found}
        for count, row in found.items():
            (time, memory), (own_time, own_memory) = row["predicted"], row["measured"]
            times = f"{1e3 * time:.1f}", f"{1e3 * own_time:.1f}", f"{row['off'][0]:+.0%}"
            sizes = f"{memory / 2**20:.1f}", f"{own_memory / 2**20:.1f}", f"{row['off'][1]:+.0%}"
            lines.append([name, count, *times, *sizes])
            print(*lines[-1], flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    head = ["workload", "M", "predicted ms", "measured", "off by", "predicted MiB", "measured", "off by"]
    print(table(head, lines))
    return 0
