"""Peak memory of a training step as an array, against M times that of one ordinary model.

Counted are tensors: what stays alive through the step (parameters, buffers, optimizer state) and the most that the step
takes on top of it. A solo step changes its state in place; an array step makes the new state beside the old one, unless the
old one is donated.
Batches are outside on both sides.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import hfta_func as hfta
from benchmarks._measure import peak_bytes, resident_bytes, table
from benchmarks.training import PLAN, WORKLOADS, Workload


def solo(work: Workload) -> tuple[int, int]:
    """Resident and peak bytes of one member's step with ``torch.optim``."""
    model = work.make()
    optimizer = work.solo_optimizer(model, work.lr[0])
    batch = tuple(leaf[0].clone() for leaf in work.batches[0])

    def step() -> None:
        work.loss_fn(model, batch).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    held = [dict(model.named_parameters()), dict(model.named_buffers()), [*map(dict, optimizer.state.values())]]
    return resident_bytes(held), peak_bytes(step)


def array(work: Workload, chunk_size: int | None, compiled: bool, donate: bool = False) -> tuple[int, int]:
    """Resident and peak bytes of the array's step."""
    step = hfta.make_train_step(work.make(), work.loss_fn, work.optimizer(), chunk_size=chunk_size, donate=donate)
    # Other workloads' shapes would make the compiler take this one's for variables.
    run = torch.compile(step, fullgraph=True, dynamic=False) if compiled else step
    state = step.init(*hfta.init_params(work.make, work.seeds), seeds=work.seeds)
    for _ in range(2):
        state, _ = run(state, work.batches[0])
    return resident_bytes(state), peak_bytes(lambda: run(state, work.batches[0]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every workload."""
    plan = {"digits": (4, 8)} if args.quick else {name: sizes for name, (sizes, *_) in PLAN.items() if name != "mlp"}
    return {name: _measure(WORKLOADS[name](*sizes), args) for name, sizes in plan.items() if args.filter in name}


def _measure(work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """All rows; the ratio is that of resident and peak together to M times a solo step's."""
    count, chunk = len(work.lr), len(work.lr) // 4
    found = {f"{count} x solo": tuple(count * size for size in solo(work))}
    found["array eager"] = array(work, None, False)
    found[f"array eager, chunk_size={chunk}"] = array(work, chunk, False)
    found["array eager, donated"] = array(work, None, False, donate=True)
    if args.compile:
        found["array compiled"] = array(work, None, True)
        found["array compiled, donated"] = array(work, None, True, donate=True)
    base = sum(found[f"{count} x solo"])
    rows = {
        name: {"resident": resident, "peak": peak, "ratio": (resident + peak) / base}
        for name, (resident, peak) in found.items()
    }
    return {"title": work.title, "num_models": count, "rows": rows}


def show(results: dict[str, Any]) -> str:
    """The tables."""
    return "\n\n".join(map(_section, results.values()))


def _section(result: dict[str, Any]) -> str:
    mib = 1 / 2**20
    rows = [
        [name, f"{row['resident'] * mib:.3f}", f"{row['peak'] * mib:.3f}", f"{row['ratio']:.3f}"]
        for name, row in result["rows"].items()
    ]
    head = ["memory of a step", "resident MiB", "peak above MiB", "ratio to M x solo"]
    return f"{result['title']}\n" + table(head, rows)
