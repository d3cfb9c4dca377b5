"""A Hyperband study of the digits network in every way to run it: ``python -m benchmarks tune``.

All ways run the same schedule on the same configurations: arrays whose survivors go on in place; one trial after another in
plain PyTorch, with survivors that go on too; the same in as many processes as there are cores; and HFHT's own rule in arrays,
which trains the survivors of every rung again from the start.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from examples.digits import CNN, accuracy, load_digits, loss_fn
from examples.tune.main import mapped, search
from optuna.distributions import FloatDistribution

import hfta_func as hfta
from benchmarks import _code
from hfta_func import tune
from hfta_func.tune import Cohort

SPACE = {
    "lr": FloatDistribution(1e-4, 0.3, log=True),
    "beta1": FloatDistribution(0.5, 0.99),
    "weight_decay": FloatDistribution(1e-6, 1e-1, log=True),
}
BATCH_SIZE = 32
data = functools.cache(load_digits)
Schedule = list[tuple[list[dict[str, Any]], tuple[int, ...]]]
"""Configurations and rungs of every bracket."""


def build(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    """The digits networks of some configurations."""
    train, test = data()
    seeds = members["seed"]
    optimizer = hfta.adam(lr=members["lr"], betas=([*members["beta1"]], 0.999), weight_decay=members["weight_decay"])
    step = hfta.make_train_step(CNN(), loss_fn, optimizer, donate=True)
    evaluate = hfta.make_eval_step(CNN(), accuracy, batch_dims=None)
    state = step.init(*hfta.init_params(CNN, seeds), seeds=seeds)
    loader = hfta.ArrayLoader(train, BATCH_SIZE, seeds=seeds, drop_last=True)
    return tune.Array(step, state, loader, lambda state: evaluate(state, test), CNN())


class Alone:
    """One trial in plain PyTorch, which goes on where it stopped."""

    def __init__(self, config: Mapping[str, Any]):
        torch.manual_seed(config["seed"])
        self.model = CNN()
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=config["lr"],
            betas=(config["beta1"], 0.999),
            weight_decay=config["weight_decay"],
            fused=True,
        )
        self.epoch, self.seed = 0, config["seed"]

    def train(self, epoch: int) -> float:
        """Train up to an epoch; returns the accuracy, which is looked at after every epoch."""
        (images, labels), test = data()
        found = 0.0
        while self.epoch < epoch:
            self.model.train()
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))
            for rows in order.split(BATCH_SIZE):
                if len(rows) == BATCH_SIZE:
                    self.optimizer.zero_grad()
                    loss_fn(self.model, (images[rows], labels[rows])).backward()
                    self.optimizer.step()
            self.model.eval()
            with torch.inference_mode():
                found = float(accuracy(self.model, test))
            self.epoch += 1
        return found


def _trained(task: tuple[Alone, int]) -> tuple[Alone, float]:
    one, rung = task
    return one, one.train(rung)


def alone(schedule: Schedule, run: Callable[[list[Any]], list[Any]]) -> float:
    """Trials that train by themselves; the best value of those that are not stopped."""
    configs = [config for own, _ in schedule for config in own]
    trials = {number: Alone(config) for number, config in enumerate(configs)}

    def train(tasks: list[tuple[int, Mapping[str, Any], int]]) -> list[tuple[float, float]]:
        found = run([(trials[number], rung) for number, _, rung in tasks])
        trials.update(zip((number for number, _, _ in tasks), (one for one, _ in found), strict=True))
        return [(value, 0.0) for _, value in found]

    rows = search([Cohort(len(own), rungs) for own, rungs in schedule], configs, 3, train)
    return max(row["accuracy"] for row in rows if row["status"] == "complete")


def trained_again(schedule: Schedule, max_models: int) -> float:
    """HFHT's rule in arrays: every rung starts anew."""
    best = 0.0
    for configs, rungs in schedule:
        left = configs
        for rung in rungs:
            population = tune.population(build, left, max_models=max_models)
            population.fit(rung)
            ranked = population.ranked("accuracy")
            values = [population.members[number].value("accuracy") for number in ranked]
            left = [left[number] for number in ranked[: max(1, len(ranked) // 3)]]
        best = max(best, values[0])
    return best


def overhead(rounds: int) -> list[float]:
    """What a study adds to the bare steps of 16 members, as a share of these; it compares them every 205 steps."""

    def quick(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        loader = hfta.ArrayLoader(data()[0], 7, seeds=members["seed"], drop_last=True)
        return build(fixed, members)._replace(loader=loader, evaluate=None)

    def study() -> None:
        tune.run(
            *(quick, SPACE), metric="loss", direction="minimize", trials=16, epochs=4, max_models=16, progress=False,
            scheduler=tune.median_stopping(every=1, startup=17),
        )  # fmt: skip

    def steps() -> None:
        step, state, loader, _, _ = quick(
            {}, {"lr": [0.001] * 16, **dict.fromkeys(("beta1", "weight_decay", "seed"), [0] * 16)}
        )
        for _ in range(4):
            for batch in loader:
                state, _ = step(state, batch)

    def seconds(work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    seconds(steps)
    return [seconds(study) / seconds(steps) - 1 for _ in range(rounds)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    parser.add_argument("--trials", type=int, default=81)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--max-models", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run, in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    hfta.step.keep_memory()
    torch.manual_seed(0)

    def study() -> tune.Study:
        return tune.run(
            *(build, SPACE), metric="accuracy", trials=args.trials, epochs=args.epochs, scheduler=tune.hyperband(eta=3),
            max_models=args.max_models, progress=False,
        )  # fmt: skip

    first = study()
    cohorts = tune.hyperband(eta=3).cohorts(args.trials, args.epochs)
    configs = [{**trial.params, "seed": 0} for trial in first.trials]
    schedule, start = [], 0
    for cohort in cohorts:
        schedule.append((configs[start : start + cohort.trials], cohort.rungs))
        start += cohort.trials
    cores = len(os.sched_getaffinity(0))
    with mapped(_trained, 1) as here, mapped(_trained, cores) as there:
        # Each process imports and reads the data before it is timed.
        there([(Alone(configs[0]), 1)] * cores)
        ways: dict[str, Callable[[], float]] = {
            "arrays": lambda: study().best.values[-1][0],
            "one after another": lambda: alone(schedule, here),
            f"{cores} processes": lambda: alone(schedule, there),
            "arrays, trained again": lambda: trained_again(schedule, args.max_models),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        best: dict[str, float] = {}
        for _ in range(args.rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                best[name] = way()
                seconds[name].append(time.perf_counter() - begin)
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**_code.stamp()))
    print(f"{'':>22}{'seconds':>9}{'arrays are':>12}{'best':>9}")
    rows = {}
    for name, taken in seconds.items():
        ratio = statistics.median(other / own for other, own in zip(taken, seconds["arrays"], strict=True))
        rows[name] = {"seconds": sorted(taken), "ratio": ratio, "best": best[name]}
        print(f"{name:>22}{statistics.median(taken):9.1f}{ratio:11.2f}x{best[name]:9.4f}")
    # Each is a difference of two short runs, which the machine disturbs more than it is long.
    added = sorted(overhead(3 * args.rounds))
    print(f"A study adds {statistics.median(added):.1%} to its steps ({added[0]:.1%} to {added[-1]:.1%})")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {"trials": len(configs), "epochs": args.epochs, "max_models": args.max_models}
        args.json.write_text(
            json.dumps({"machine": _code.stamp(), "settings": settings, "tune": rows, "overhead": added}, indent=2)
            + "\n"
        )
    return 0
