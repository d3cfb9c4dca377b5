"""Every lowering of every operator that has several, each direction by itself: what the table of lowerings is made from.

Operators of one direction are timed as a whole, forward and backward; of convolutions each of the three directions is timed
with the others as the table has them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hfta_func as hfta
from benchmarks._measure import interleaved, seconds, table
from benchmarks.ops import ROWS, Row, like, tensors
from hfta_func.rules._lowering import known_lowerings

DIRECTIONS = {"convolution": (), "convolution_input_grad": (0,), "convolution_weight_grad": (1,)}


CONVOLUTION_SAMPLES = 8
"""Times as many samples, of convolutions on a GPU, which a CPU's few would leave idle."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Median times in seconds, by row, operator and lowering; what the table chooses now stands under ``"chosen"``."""
    hfta.step.keep_memory()
    results: dict[str, Any] = {}
    for row in ROWS:
        if args.filter and args.filter not in f"{row.family} {row.name}":
            continue
        if args.samples > 1:
            if row.family != "conv":
                continue
            row = larger(row, args.samples)
        for name, found in one(row, args).items():
            results[name] = found
            if args.verbose:
                print(name, {key: f"{value * 1e3:.2f}" for key, value in found["times"].items()}, flush=True)
    return results


def one(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The operators of a row that have a choice."""
    return {
        f"{op}: M {row.num_models}, {row.name}": _measure(row, op, args.quick, args.device)
        for op in _operators(row, args.device)
    }


def rows() -> dict[str, Row]:
    """By name, as a GPU measures them: those other than convolutions first, of which no GPU's choice was measured yet."""
    sized = [larger(row, CONVOLUTION_SAMPLES) if row.family == "conv" else row for row in ROWS]
    return {
        f"{row.family}: M {row.num_models}, {row.name}": row for row in sorted(sized, key=lambda r: r.family == "conv")
    }


def larger(row: Row, times: int) -> Row:
    """The same on so many times as many samples."""

    def make() -> tuple[Tensor, ...]:
        x, *others = row.make()
        return x.repeat(times, *(1,) * (x.dim() - 1)), *others

    return row._replace(name=f"{row.name} x {times}", make=make)


def _operators(row: Row, device: str) -> list[str]:
    """Operators of the row that have a choice."""
    _, stacks = tensors(row, device)
    choices = hfta.rules.explain(hfta.vmap(row.func, row.dims()), *stacks)
    found = {choice.op for choice in choices if known_lowerings(choice.op) - {"loop", "folded"}}
    # Nobody asks for the gradient of what is frozen.
    return sorted(op for op in found if all(stacks[i].requires_grad for i in DIRECTIONS.get(op, ())))


def _measure(row: Row, op: str, quick: bool, device: str) -> dict[str, Any]:
    members, stacks = tensors(row, device)
    chosen = next(c.lowering for c in hfta.rules.explain(hfta.vmap(row.func, row.dims()), *stacks) if c.op == op)
    timers: dict[str, Callable[[], float]] = {}
    for lowering in sorted(known_lowerings(op)):
        with hfta.rules.override(**{op: lowering}):
            work = _work(row, op, stacks)
            timers[lowering] = _timer(work, op, lowering, quick, device)
    solo = [_work(row, op, member, alone=True) for member in members]
    timers["serial"] = _timer(lambda: [work() for work in solo], op, None, quick, device)
    times = interleaved(timers, 1 if quick else 7, warmup=0 if quick else 1)
    return {"chosen": chosen, "times": {name: statistics.median(values) for name, values in times.items()}}


def _timer(work: Callable[[], Any], op: str, lowering: str | None, quick: bool, device: str) -> Callable[[], float]:
    # A GPU's times vary less.
    turn = 0.03 if device == "cpu" else 0.01
    calls = 1 if quick else max(1, min(100, int(turn / seconds(work, 2, device))))

    def timer() -> float:
        if lowering is None:
            return seconds(work, calls, device)
        with hfta.rules.override(**{op: lowering}):
            return seconds(work, calls, device)

    return timer


def _work(row: Row, op: str, inputs: list[Tensor], alone: bool = False) -> Callable[[], Any]:
    func = row.func if alone else hfta.vmap(row.func, row.dims())
    if op not in DIRECTIONS:
        grad = like(func(*inputs).detach())
        wanted = [x for x in inputs if x.requires_grad]
        return lambda: torch.autograd.grad(func(*inputs), wanted, grad)
    inputs = [x.detach() for x in inputs]
    if op == "convolution":
        return lambda: func(*inputs)
    # Only what is asked for requires a gradient, so that nothing else is computed.
    (wanted,) = DIRECTIONS[op]
    inputs[wanted].requires_grad_()
    output = func(*inputs)
    grad = like(output.detach())
    return lambda: torch.autograd.grad(output, inputs[wanted], grad, retain_graph=True)


def show(results: dict[str, Any]) -> str:
    """One line per row and operator; the fastest lowering is marked, the chosen one bracketed."""
    lines = []
    for name, one in results.items():
        ours = {key: value for key, value in one["times"].items() if key != "serial"}
        best = min(ours, key=ours.__getitem__)
        cells = []
        for key, value in one["times"].items():
            cell = f"{key} {value * 1e3:.2f}{'*' if key == best else ''}"
            cells.append(f"[{cell}]" if key == one["chosen"] else cell)
        lines.append([name, "  ".join(cells)])
    return table(["operator", "ms by lowering (* fastest, [] chosen)"], lines)
