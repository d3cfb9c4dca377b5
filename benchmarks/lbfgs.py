"""Physics-informed networks by L-BFGS: an array of members against a loop with closures, ``python -m benchmarks lbfgs``.

Processor time of one thread, side by side in one run, per evaluation of a member, since rounding makes line searches
differ. Losses of the first two steps are compared. The networks solve Burgers' equation (Raissi et al., 2019).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks._measure import interleaved, machine, table


def make_network(width: int) -> nn.Module:
    """Two hidden layers over place and time."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def equation(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The residual at points, and the difference from what is known at the start."""
    points = batch[0].detach().requires_grad_()
    u = model(points)
    slopes = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    curvature = torch.autograd.grad(slopes[:, :1].sum(), points, create_graph=True)[0][:, :1]
    residual = slopes[:, 1:] + u * slopes[:, :1] - 0.01 / torch.pi * curvature
    return residual.square().mean() + (model(batch[1]) - batch[2]).square().mean()


def measure(models: int, points: int, width: int, history: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways for an evaluation of a member, and the greatest difference of losses after the first step."""
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "history_size": history, "tolerance_change": 0.0}
    torch.manual_seed(0)
    start = torch.cat([torch.rand(100, 1) * 2 - 1, torch.zeros(100, 1)], 1)
    batch = (
        torch.rand(points, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0]),
        start,
        -(torch.pi * start[:, :1]).sin(),
    )
    alone = [make_network(width) for _ in range(models)]
    step = hfta.make_train_step(alone[0], equation, hfta.lbfgs(**options), verify="first")
    state = step.init(*hfta.stack_params(copy.deepcopy(alone)), seeds=range(models))
    stacked = tuple(leaf.expand(models, *leaf.shape) for leaf in batch)
    searches = [torch.optim.LBFGS(model.parameters(), **options) for model in alone]
    losses: dict[str, list[Any]] = {"loop": [], "array": []}

    def closure(model: nn.Module, search: torch.optim.Optimizer) -> Tensor:
        search.zero_grad()
        loss = equation(model, batch)
        loss.backward()
        return loss

    def array() -> int:
        nonlocal state
        before = state.opt_state.func_evals.sum()
        state, metrics = step(state, stacked)
        losses["array"].append(metrics["loss"])
        return int(state.opt_state.func_evals.sum() - before)

    def loop() -> int:
        count, found = 0, []
        for model, search in zip(alone, searches, strict=True):
            before = search.state[next(model.parameters())].get("func_evals", 0)
            found.append(search.step(lambda model=model, search=search: closure(model, search)).detach())
            count += search.state[next(model.parameters())]["func_evals"] - before
        losses["loop"].append(torch.stack(found))
        return count

    def timed(work: Callable[[], int]) -> Callable[[], float]:
        def timer() -> float:
            begin = time.process_time()
            count = work()
            return (time.process_time() - begin) / count

        return timer

    times = interleaved({"loop": timed(loop), "array": timed(array)}, rounds)
    difference = max(
        float((a / b - 1).abs().max()) for a, b in zip(*(each[:2] for each in losses.values()), strict=True)
    )
    return {"difference": difference} | {name: statistics.median(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and say whether array and loop agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lbfgs", description=__doc__)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--points", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--history", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {str(n): measure(args.models, n, args.width, args.history, args.rounds) for n in args.points}
    rows = [
        [n, *(f"{1e3 * row[w]:.3f}" for w in ("loop", "array")), f"{row['loop'] / row['array']:.2f}"]
        for n, row in found.items()
    ]
    print(table(["points", "loop, ms", "array, ms", "ratio"], rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "lbfgs": found}, indent=2) + "\n")
    return 0 if all(row["difference"] < 0.05 for row in found.values()) else 1
