"""Ensembles against loops over their members: inference of small CNNs, and updates of an agent with ten critics."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from examples.critics.model import Agent, Batch
from examples.digits import CNN
from torch import Tensor

import hfta_func as hfta
from benchmarks import _code
from benchmarks._measure import interleaved, seconds, table

LOOP = "loop"


def networks(count: int, batch: int, compiled: bool) -> dict[str, Callable[[], Tensor]]:
    """Predictions of ``count`` small CNNs on digits, by each way: ``[M, N, 10]``."""
    models = [CNN().eval() for _ in range(count)]
    images = torch.randn(batch, 1, 8, 8)
    ensemble = hfta.Ensemble.from_modules(models)
    ways: dict[str, Callable[[], Tensor]] = {
        LOOP: lambda: torch.stack([model(images) for model in models]),
        "Ensemble": lambda: ensemble(images),
    }
    if compiled:
        each, whole = [torch.compile(model) for model in models], torch.compile(ensemble)
        ways["loop, compiled"] = lambda: torch.stack([model(images) for model in each])
        ways["Ensemble, compiled"] = lambda: whole(images)
        program = torch.export.export(ensemble, (images,)).run_decompositions()
        exported = program.module()
        ways["Ensemble, exported"] = lambda: exported(images)
    return {name: torch.no_grad()(way) for name, way in ways.items()}


def agents(count: int, width: int, batch: int, compiled: bool) -> dict[str, Callable[[], Tensor]]:
    """Updates of agents with ``count`` critics, each way from the same weights and with the same noise."""
    made = Batch(
        torch.randn(batch, 3), torch.rand(batch, 1), torch.randn(batch), torch.randn(batch, 3), torch.zeros(batch)
    )
    ways: dict[str, Callable[[], Tensor]] = {}
    for way, name in (("loop", LOOP), ("array", "Ensemble")):
        for compiles in (False, True)[: 1 + compiled]:
            agent = Agent(way, 3, 1, count=count, width=width, compile=compiles)
            ways[f"{name}, compiled" if compiles else name] = lambda agent=agent: agent.update(made)
    return ways


def measure(ways: dict[str, Callable[[], Tensor]], rounds: int, calls: int) -> dict[str, Any]:
    """Calls a second of each way, its ratio to the loop round by round, and whether their first results agree."""
    first = {name: way() for name, way in ways.items()}
    times = interleaved({name: lambda way=way: seconds(way, calls) for name, way in ways.items()}, rounds)
    return {
        name: {
            "rate": 1 / statistics.median(values),
            "ratio": statistics.median(own / other for own, other in zip(times[LOOP], values, strict=True)),
            "agrees": torch.allclose(first[name], first[LOOP], rtol=1e-4, atol=1e-5),
        }
        for name, values in times.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether all ways agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ensembles", description=__doc__)
    parser.add_argument("--models", type=int, default=20, help="networks of the ensemble")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64], help="images of a prediction")
    parser.add_argument("--critics", type=int, default=10, help="critics of the agent")
    parser.add_argument("--widths", type=int, nargs="*", default=[32, 64, 256], help="units of their hidden layers")
    parser.add_argument("--size", type=int, default=64, help="transitions of an update")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each way, of which the median counts")
    parser.add_argument("--calls", type=int, default=20, help="calls of a measurement")
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave compiled ways out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    about = _code.stamp()
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    jobs = {
        **{f"{args.models} CNNs, batch {size}": networks(args.models, size, args.compile) for size in args.batches},
        **{
            f"{args.critics} critics, width {width}, batch {args.size}": agents(
                args.critics, width, args.size, args.compile
            )
            for width in args.widths
        },
    }
    found: dict[str, dict[str, Any]] = {}
    for name, ways in jobs.items():
        torch.manual_seed(0)
        # The agents share their code, which the compiler makes only so many graphs of.
        torch.compiler.reset()
        found[name] = measure(ways, args.rounds, args.calls)
        rows = [[way, f"{row['rate']:.0f}", f"{row['ratio']:.2f}"] for way, row in found[name].items()]
        print(f"\n{table([name, 'calls a second', 'of the loop'], rows)}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "ensembles": found}, indent=2) + "\n")
    wrong = [f"{name}: {way}" for name, ways in found.items() for way, row in ways.items() if not row["agrees"]]
    print("\n".join(f"results differ: {line}" for line in wrong))
    return 1 if wrong else 0
