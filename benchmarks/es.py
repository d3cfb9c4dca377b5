"""Evolution strategies: a population as an array against a loop over members, ``python -m benchmarks es``.

Processor time of one thread for a generation (noise, fitness of all members, update), interleaved in one run. The loop is
plain PyTorch: it adds noise to the parameters of one model in place, evaluates it on both sides, and draws the noise again
for the update. Before anything is timed, both take three generations in float64 with the same noise, which must agree.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks._measure import interleaved, machine, table
from hfta_func import es, random

SIGMA, LR = 0.1, 0.01
Draw = Callable[[int, int, Sequence[Tensor]], list[Tensor]]


class Threshold(nn.Module):
    """Steps, which have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Plus or minus one."""
        return (x > 0).to(x.dtype) * 2 - 1


def make_network(width: int) -> nn.Module:
    """A network of two hidden layers of thresholds."""
    layers = [nn.Linear(64, width), Threshold(), nn.Linear(width, width), Threshold(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The fitness of one model."""
    return -nn.functional.cross_entropy(model(batch[0]), batch[1])


def as_array(model: nn.Module, batch: Any, population: int, rank: int | None) -> Callable[[], Tensor]:
    """Generations as an array; each call returns the fitness of all members."""
    strategy = es.make_strategy(model, hfta.adam(lr=LR), population=population, sigma=SIGMA, rank=rank)
    evaluate = hfta.make_eval_step(strategy.model, likelihood, verify="first")
    state = strategy.init(*hfta.stack_params([model]), seeds=[0])

    def generation() -> Tensor:
        nonlocal state
        fitness = evaluate(strategy.ask(state), batch)["likelihood"]
        state, _ = strategy.tell(state, fitness)
        return fitness

    return generation


def as_loop(model: nn.Module, batch: Any, population: int, draw: Draw) -> Callable[[], Tensor]:
    """Generations as a loop over pairs; each call returns the fitness of all members."""
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=LR)
    steps = 0

    @torch.no_grad()
    def generation() -> Tensor:
        nonlocal steps
        fitness = torch.empty(population, dtype=params[0].dtype)
        for pair in range(population // 2):
            noise = draw(steps, pair, params)
            for param, offset in zip(params, noise, strict=True):
                param.add_(offset, alpha=SIGMA)
            fitness[2 * pair] = likelihood(model, batch)
            for param, offset in zip(params, noise, strict=True):
                param.sub_(offset, alpha=2 * SIGMA)
            fitness[2 * pair + 1] = likelihood(model, batch)
            for param, offset in zip(params, noise, strict=True):
                param.add_(offset, alpha=SIGMA)
        ranks = fitness.argsort().argsort().to(fitness.dtype) / (population - 1) - 0.5
        weights = ((ranks[::2] - ranks[1::2]) / (population * SIGMA)).tolist()
        for param in params:
            param.grad = torch.zeros_like(param)
        for pair in range(population // 2):
            for param, offset in zip(params, draw(steps, pair, params), strict=True):
                assert param.grad is not None
                param.grad.sub_(offset, alpha=weights[pair])
        optimizer.step()
        steps += 1
        return fitness

    return generation


def by_generator(step: int, pair: int, params: Sequence[Tensor]) -> list[Tensor]:
    """Noise of PyTorch's generator."""
    torch.manual_seed(step * 100_000 + pair)
    return [torch.randn_like(param) for param in params]


def by_key(step: int, pair: int, params: Sequence[Tensor]) -> list[Tensor]:
    """The noise of the array."""
    key = random.fold_in(random.fold_in(random.fold_in(random.keys([0]), es.NOISE), step), pair)
    return [random.normal(random.fold_in(key, i), p.shape, dtype=p.dtype)[0] for i, p in enumerate(params)]


def difference(rows: int, population: int) -> float:
    """The greatest difference of fitness between array and loop in three generations with the same noise."""
    batch = _batch(rows, torch.float64)
    models = [make_network(8).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    array, loop = as_array(models[0], batch, population, None), as_loop(models[1], batch, population, by_key)
    return max(float((array() - loop()).abs().max()) for _ in range(3))


def measure(width: int, rows: int, population: int, rounds: int) -> dict[str, float]:
    """Seconds of each way for a generation."""
    batch = _batch(rows, torch.float32)
    ways = {
        "loop": as_loop(make_network(width), batch, population, by_generator),
        "array": as_array(make_network(width), batch, population, None),
        "rank 1": as_array(make_network(width), batch, population, 1),
    }

    def timed(generation: Callable[[], Tensor]) -> Callable[[], float]:
        def timer() -> float:
            begin = time.process_time()
            generation()
            return time.process_time() - begin

        generation()
        return timer

    times = interleaved({name: timed(way) for name, way in ways.items()}, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def _batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 64, dtype=dtype), torch.randint(10, (rows,))


def code_lines(function: Callable[..., Any]) -> int:
    """Lines of a function that are neither blank, nor comment, nor docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    (made,) = ast.parse(source).body
    text = made.body[0]  # pyright: ignore
    return len(lines - {*range(text.lineno, (text.end_lineno or 0) + 1)})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and say whether array and loop agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks es", description=__doc__)
    parser.add_argument("--population", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="of the batch that all members share")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    apart = difference(args.rows, args.population)
    found = {str(width): measure(width, args.rows, args.population, args.rounds) for width in args.widths}
    rows = [
        [width, *(f"{1e3 * seconds:.2f}" for seconds in row.values())]
        + [f"{row['loop'] / row[way]:.2f}" for way in ("array", "rank 1")]
        for width, row in found.items()
    ]
    print(table(["width", "loop, ms", "array, ms", "rank 1, ms", "array, ratio", "rank 1, ratio"], rows))
    lines = {"loop": code_lines(as_loop) + code_lines(by_generator), "array": code_lines(as_array)}
    print(f"lines of code: {lines['loop']} of the loop, {lines['array']} of the array")
    if args.json:
        numbers = {"machine": machine(), "es": {"widths": found, "difference": apart, "lines": lines}}
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0 if math.isfinite(apart) and apart < 1e-8 else 1
