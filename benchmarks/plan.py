"""Steps predicted from single operators, next to what they take: of workloads left out, and of another machine.

Operators of all steps are listed without running these, and each is measured by itself; what this process does between them
is fitted to steps. A workload is predicted from the others alone: from their operators and their steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks._measure import RESULTS, machine, peak_bytes, seconds, table
from benchmarks.workloads import Spec, batch_size, make
from hfta_func._torch import pytree
from hfta_func._tree import leaves
from hfta_func.run.predict import (
    FILE,
    Like,
    Measured,
    Operator,
    Predictor,
    Row,
    Walk,
    features,
    find_device,
    host_work,
    walk,
)

SEVEN = ("mlp", "resnet", "mobilenet-v3s", "pointnet-cls", "dcgan", "transformer", "bert")
MODELS = (1, 2, 4, 8, 16, 32)
_AT_ONCE = 20
"""Calls that a GPU is given at once."""


class Cell(NamedTuple):
    """A workload at some M: its step, which trains on, what it consists of, and what it takes."""

    workload: str
    models: int
    step: Callable[[], object]
    walk: Walk
    held: int
    times: list[float]
    peaks: list[int]


def cell(workload: str, models: int, device: str) -> Cell:
    """A workload at some M, not measured yet."""
    job = make(Spec(workload, "small", models, batch_size(workload, "small", "cpu"), device))
    step, state = job.array()
    batch = job.batches[0]
    walk(step, state, batch)  # The first one finds out what views a model writes.
    walked, held = walk(step, state, batch), sum(leaf.nbytes for leaf in leaves(state))

    def train() -> None:
        nonlocal state
        state, _ = step(state, batch)

    return Cell(workload, models, train, walked, held, [], [])


def least(work: Callable[[], object], limit: float, device: str, calls: int = 3) -> float:
    """Seconds of a call, the least of those that fit into a limit; on one thread its own, whatever else runs.

    A GPU is given several calls at once, so that it does not wait for this process.
    """
    now = time.thread_time if torch.get_num_threads() == 1 and device == "cpu" else time.perf_counter
    work()
    begin, times = now(), []
    while len(times) < calls or now() - begin < limit:
        if device == "cuda":
            times.append(seconds(work, _AT_ONCE, device))
            continue
        start = now()
        work()
        times.append(now() - start)
    return min(times)


def run_alone(operator: Operator, device: str) -> Callable[[], object]:
    """The operator by itself, on random numbers; indices are zero."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Like):
            return leaf
        last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride, strict=True))
        entries = 0 if 0 in leaf.shape else last + 1
        kind = torch.randn if leaf.dtype.is_floating_point else torch.zeros
        return kind(entries, dtype=leaf.dtype, device=device).as_strided(leaf.shape, leaf.stride)

    args, kwargs = pytree.tree_map(real, operator.inputs, is_leaf=lambda leaf: isinstance(leaf, Like))
    return lambda: operator.call(*args, **kwargs)


Key = tuple[str, tuple[float, ...]]


class Single:
    """An operator that is measured by itself, once a round."""

    def __init__(self, operator: Operator, device: str):
        self.operator, self.device, self.times, self.workloads = operator, device, [], set()

    @torch.no_grad()
    def measure(self) -> None:
        """Once more."""
        self.times.append(least(run_alone(self.operator, self.device), 0.001, self.device))

    @property
    def row(self) -> Row:
        """What was measured."""
        return Row(self.operator.name, features(self.operator), float(f"{min(self.times):.3g}"))


def measure(
    workloads: Sequence[str], models: Sequence[int], rounds: int, device: str
) -> tuple[list[Cell], dict[Key, Single]]:
    """Steps and operators, which take turns."""
    cells = [cell(workload, count, device) for workload in workloads for count in models]
    singles: dict[Key, Single] = {}
    for one in cells:
        for operator in one.walk.operators:
            if operator.is_kernel:
                key = operator.name, features(operator)
                singles.setdefault(key, Single(operator, device)).workloads.add(one.workload)
    for turn in range(rounds):
        for one in cells:
            one.times.append(least(one.step, 0.1, device))
            if turn == 1:
                one.peaks.append(peak_bytes(one.step, device))
        for single in singles.values():
            single.measure()
        print(f"round {turn + 1} of {rounds}", flush=True)
    return cells, singles


def fitted(cells: Iterable[Cell], rows: Iterable[Row], device: str) -> Measured:
    """What was measured, with what kernels take within steps and this process between them, fitted to steps."""
    known = Measured(device, torch.get_num_threads(), 1.0, (0.0, 0.0), [*rows])
    if find_device(device).kind == "cuda":
        # What this process does is that of a CPU.
        return known
    alone, work = Predictor(find_device(device), known, known.threads), []
    for one in cells:
        amounts = alone.step(one.walk)[0], *host_work(one.walk)
        work.append([amount / min(one.times) for amount in amounts])
    within, *host = (float(f"{each:.3g}") for each in nnls(np.array(work), np.ones(len(work)))[0])
    return known._replace(within=within, host=tuple(host))


def left_out(cells: list[Cell], singles: dict[Key, Single], device: str) -> list[list[str]]:
    """Each workload from the others: mean error of time and of memory, and both without a sign at every M."""
    lines = []
    for name in dict.fromkeys(one.workload for one in cells):
        others = [single.row for single in singles.values() if single.workloads - {name}]
        known = fitted([one for one in cells if one.workload != name], others, device)
        guess = Predictor(find_device(device), known, known.threads)
        pairs = [(one, *guess.step(one.walk)) for one in cells if one.workload == name]
        times = [seconds / min(one.times) - 1 for one, seconds, _ in pairs]
        memory = [(one.held + peak) / (one.held + one.peaks[0]) - 1 for one, _, peak in pairs]
        means = [f"{statistics.mean(map(abs, errors)):.1%}" for errors in (times, memory)]
        lines.append([name, *(f"{error:+.0%}" for error in times), *means])
    return lines


def elsewhere(cells: list[Cell], known: Measured, device: str, rows: Path) -> list[list[str]]:
    """The rows of another machine from what was measured here."""
    results, lines = json.loads(rows.read_text()), []
    for name in dict.fromkeys(one.workload for one in cells):
        errors: dict[int, float] = {}
        for one in cells:
            row = results.get(name, {}).get(str(one.models), {}).get("rows", {}).get("array")
            if one.workload == name and row and row["machine"]["cpu"] != machine()["cpu"]:
                guess = Predictor(find_device(device), known, row["machine"]["threads"])
                errors[one.models] = guess.step(one.walk)[0] / statistics.median(row["seconds"]) - 1
        if errors:
            cells_of = [f"M {count} {error:+.0%}" for count, error in errors.items()]
            lines.append([name, "  ".join(cells_of), f"{statistics.mean(map(abs, errors.values())):.1%}"])
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=SEVEN, default=[*SEVEN])
    parser.add_argument("--models", nargs="+", type=int, default=[*MODELS], help="each M")
    parser.add_argument("--rounds", type=int, default=3, help="how often steps and operators are measured, at least 2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--here", default="EPYC 9755", help="this machine's CPU, or its GPU, in the table of devices")
    parser.add_argument("--other", default="Xeon 8480+", help="that of the other machine that has rows")
    parser.add_argument("--rows", type=Path, default=RESULTS / "cpu-small.json", help="a sweep with its rows")
    parser.add_argument("--write", action="store_true", help="put what was measured where hfta.plan reads it")
    args = parser.parse_args(argv)
    # The profiler talks.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**machine()), flush=True)
    if find_device(args.here).kind != args.device:
        parser.error(f"--here {args.here}: with --device {args.device}, name a device of that kind")
    cells, singles = measure(args.workloads, args.models, args.rounds, args.device)
    if len(args.workloads) > 1:
        head = ["left out", *(f"M {count}" for count in args.models), "time, mean", "memory, mean"]
        print(table(head, left_out(cells, singles, args.here)))
    known = fitted(cells, [single.row for single in singles.values()], args.here)
    if args.device == "cpu":
        print(f"\nkernels take {known.within} times as long within a step as alone")
        print(f"seconds of this process for an operator and a rule: {known.host}")
        print(table([f"on {args.other}", "error", "mean"], elsewhere(cells, known, args.other, args.rows)))
    if args.write:
        held = json.loads(FILE.read_text()) if FILE.exists() else {}
        rows = sorted([*row] for row in known.rows)
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        kinds = {**{kind: json.dumps(one) for kind, one in held.items() if kind != args.device}}
        about = ", ".join(json.dumps(one) for one in known[:-1])
        kinds[args.device] = f"[{about}, [\n{lines}]]"
        FILE.write_text("{" + ",\n".join(f"{json.dumps(kind)}: {text}" for kind, text in kinds.items()) + "}\n")
    return 0
