"""What asking for a batch of trials at a time costs a sampler that learns: ``python -m benchmarks batches``.

The functions are some of COCO's bbob (Hansen et al., 2021), from `pip install coco-experiment`; the sampler is Optuna's TPE.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import cocoex
import optuna
from optuna.distributions import FloatDistribution

from hfta_func.tune.sampling import SamplerSession

FUNCTIONS = (1, 2, 3, 8, 15, 20)


def best(function: int, dimension: int, trials: int, batch: int, seed: int) -> float:
    """The best value found, of a function's instance ``seed + 1``, above its optimum."""
    problem = cocoex.Suite("bbob", f"instances: {seed + 1}", "").get_problem_by_function_dimension_instance(
        function, dimension, seed + 1
    )
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=batch > 1)
    asking = SamplerSession({f"x{i}": FloatDistribution(-5, 5) for i in range(dimension)}, ["minimize"], sampler, seed)
    found = float("inf")
    for start in range(0, trials, batch):
        numbers = range(start, min(start + batch, trials))
        values = [float(problem([*asking.ask()[1].values()])) for _ in numbers]
        for number, value in zip(numbers, values, strict=True):
            asking.tell(number, "complete", [value])
        found = min(found, *values)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batches", description=__doc__)
    parser.add_argument("--trials", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dimension", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"{'function':>9}{'one by one':>12}{'batches':>10}{'random':>10}{'lost':>8}")
    for function in FUNCTIONS:
        one, many, random = (
            [best(function, args.dimension, args.trials, batch, seed) for seed in range(args.seeds)]
            for batch in (1, args.batch, args.trials)
        )
        # Values lie around an optimum of any size; what counts is how far the best comes from random search.
        gain = statistics.fmean(random) - statistics.fmean(one)
        lost = (statistics.fmean(many) - statistics.fmean(one)) / gain if gain > 0 else float("nan")
        print(
            f"{function:9d}{statistics.fmean(one):12.2f}{statistics.fmean(many):10.2f}{statistics.fmean(random):10.2f}{lost:8.1%}"
        )
    return 0
