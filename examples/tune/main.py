"""Hyperparameters of MobileNet or of PointNet, searched as HFTA's tuner HFHT does: at random, or by Hyperband.

    python examples/tune/main.py mobilenet --algorithm hyperband --mode array
    python examples/tune/main.py pointnet --algorithm random --mode serial --size small --limit 200

Batch size and version, or batch size and feature transform, keep trials apart; trials that agree in them share arrays. The
other modes train trials alone in plain PyTorch, one after another or in as many processes as there are cores. In every mode
the survivors of a rung go on where they stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

try:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    import hfta_func as hfta
    from hfta_func import tune
    from hfta_func.tune.sampling import SamplerSession
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples,tune]'") from None

from examples.common import fused, solo
from examples.common.flags import AdamFlags
from examples.common.task import Task, evaluate, find_device
from examples.mobilenet import main as mobilenet
from examples.pointnet import main as pointnet


class Searched(NamedTuple):
    """What is searched: an example, and the names that keep trials apart, with their values."""

    flags: type[AdamFlags]
    task: Callable[[Any], Task]
    apart: dict[str, tuple[Any, ...]]


STUDIES = {
    "mobilenet": Searched(mobilenet.Flags, mobilenet.task, {"batch_size": (1024, 2048), "version": ("v2", "v3l")}),
    "pointnet": Searched(
        pointnet.Flags, pointnet.task, {"batch_size": (8, 16, 32), "feature_transform": (True, False)}
    ),
}
FUSED = {
    "lr": FloatDistribution(1e-4, 1e-2),
    "beta1": FloatDistribution(0.001, 0.999),
    "beta2": FloatDistribution(0.001, 0.999),
    "weight_decay": FloatDistribution(0.0, 0.5),
    "gamma": FloatDistribution(0.1, 0.9),
    "step_size": CategoricalDistribution((5, 10, 20, 40)),
}
"""What all trials of an array may differ in; the spaces are HFHT's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Search, and write ``history.csv`` and ``trajectory.csv``; returns the exit status."""
    args = _parse(argv)
    searched = STUDIES[args.study]
    space = {**FUSED, **{name: CategoricalDistribution(values) for name, values in searched.apart.items()}}
    if args.algorithm == "hyperband":
        scheduler = tune.hyperband(args.hyperband_eta, args.hyperband_skip_last)
        trials, epochs = 0, args.hyperband_max_iters
    else:
        scheduler, trials, epochs = None, args.random_n_configs, args.random_n_iters
    shared = searched.flags(
        **{name: getattr(args, name) for name in ("size", "data", "limit", "device", "amp", "compile")}
    )
    begin = time.perf_counter()
    if args.mode == "array":
        study = tune.run(
            lambda fixed, members: build(searched, shared, fixed, members),
            *(space,), metric="accuracy", nonfusible=[*searched.apart], trials=trials, epochs=epochs, scheduler=scheduler,
            max_models=args.max_models, seed=args.seed, resume=args.outdir / "study",
        )  # fmt: skip
        write_tables(args.outdir, study.rows(), study.trajectory)
        best, value = study.best.params, study.best.values[-1][0]
        seconds = sum(member.seconds for member in study.population.members)
    else:
        cohorts = (scheduler or tune.Scheduler()).cohorts(trials, epochs)
        sampler = SamplerSession(space, ["maximize"], None, args.seed)
        configs = [{**sampler.ask()[1], "seed": args.seed} for cohort in cohorts for _ in range(cohort.trials)]
        workers = 1 if args.mode == "serial" else len(os.sched_getaffinity(0))
        with tempfile.TemporaryDirectory() as folder, mapped(train_alone, workers) as run:
            rows = search(
                cohorts, configs, args.hyperband_eta,
                lambda tasks: run([(args.study, shared, folder, *task) for task in tasks]),
            )  # fmt: skip
        shown = [{name: value for name, value in row.items() if name != "seed"} for row in rows]
        write_tables(args.outdir, shown, improvements(rows))
        finished = [row for row in rows if row["status"] == "complete"]
        row = max(finished, key=lambda row: row["accuracy"])
        best, value, seconds = configs[row["trial"]], row["accuracy"], sum(row["seconds"] for row in rows)
    print(f"Best: {value:.4f} by {', '.join(f'{name} {found}' for name, found in best.items())}")
    print(f"Training {seconds:.1f} s, in all {time.perf_counter() - begin:.1f} s; tables in {args.outdir}")
    return 0


def build(
    searched: Searched, shared: Any, fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]
) -> tune.Array:
    """Trials of one batch size and version as an array."""
    own = {"seeds": members["seed"], **{name: members[name] for name in FUSED}}
    flags = dataclasses.replace(shared, **fixed, **{name: tuple(values) for name, values in own.items()})
    task, device = searched.task(flags), find_device(flags.device)
    step, state, loader = fused.prepare(task, flags, device)
    measure = hfta.make_eval_step(
        task.factory(),
        lambda model, batch: task.metric_fn(model, task.prepare(batch)),
        autocast=torch.bfloat16 if flags.amp else None,
        batch_dims=None,
    )

    def test(state: hfta.step.TrainState) -> dict[str, torch.Tensor]:
        # Every batch gets different noise, as when a member trains alone.
        numbers = itertools.count()
        return task.derive(
            evaluate(
                lambda rows: measure(state._replace(keys=hfta.random.fold_in(state.keys, next(numbers))), rows),
                *(task.test, flags.batch_size, device),
            )
        )

    run = hfta.compile(step) if flags.compile else step
    return tune.Array(run, state, loader, test, task.factory())


def search(
    cohorts: Sequence[Any],
    configs: Sequence[Mapping[str, Any]],
    eta: float,
    run: Callable[[list[tuple[int, Mapping[str, Any], int]]], list[tuple[float, float]]],
) -> list[dict[str, Any]]:
    """Trials that train by themselves, under the rule of the arrays.

    Args:
        cohorts: How many trials are compared at which epochs.
        configs: One for each trial.
        eta: How many trials there are for each that goes on.
        run: Trains trials, given by number, configuration and epoch, up to that epoch; returns values and seconds.

    Returns:
        A row for each trial.
    """
    rows, start = [], 0
    for cohort in cohorts:
        own = [
            {"trial": number, **configs[number], "status": "stopped", "epochs": 0, "seconds": 0.0, "accuracy": math.nan}
            for number in range(start, start + cohort.trials)
        ]
        start, left = start + cohort.trials, own
        for rung in cohort.rungs:
            found = run([(row["trial"], configs[row["trial"]], rung) for row in left])
            for row, (value, seconds) in zip(left, found, strict=True):
                row |= {"epochs": rung, "accuracy": value, "seconds": row["seconds"] + seconds}
            left = sorted((row for row in left if math.isfinite(row["accuracy"])), key=lambda row: -row["accuracy"])
            if rung != cohort.rungs[-1]:
                left = left[: max(1, int(len(found) / eta + 1e-9))]
        for row in left:
            row["status"] = "complete"
        rows += own
    return rows


def train_alone(task: tuple[str, Any, str, int, Mapping[str, Any], int]) -> tuple[float, float]:
    """A trial in plain PyTorch up to an epoch, from where it stopped before; its accuracy, and how long it took."""
    name, shared, folder, number, config, epochs = task
    searched = STUDIES[name]
    own = {key: (value,) if key in FUSED else value for key, value in config.items() if key != "seed"}
    flags = dataclasses.replace(shared, **own, seeds=(config["seed"],), epochs=epochs)
    begin = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        found = solo.train(searched.task(flags), flags, Path(folder, f"{number}.run"))
    return float(found.last["accuracy"][0]), time.perf_counter() - begin


@contextlib.contextmanager
def mapped(work: Callable[[Any], Any], workers: int) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """A ``map`` of a function over tasks, in this process or in processes of one thread each."""
    if workers == 1:
        yield lambda tasks: [work(task) for task in tasks]
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield lambda tasks: pool.map(work, tasks, chunksize=1)


def improvements(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, int, float]]:
    """Seconds of training until each trial that was better than all before, its number and its accuracy."""
    best, seconds = -math.inf, 0.0
    for row in rows:
        seconds += row["seconds"]
        if row["accuracy"] > best:
            best = row["accuracy"]
            yield seconds, row["trial"], best


def write_tables(folder: Path, rows: Sequence[Mapping[str, Any]], trajectory: Iterable[Sequence[Any]]) -> None:
    """Write a row per trial, and each new best accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "history.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*rows[0]], *([*row.values()] for row in rows)])
    with (folder / "trajectory.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["seconds", "trial", "accuracy"], *trajectory])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--algorithm", choices=["hyperband", "random"], default="hyperband")
    parser.add_argument("--mode", choices=["array", "serial", "processes"], default="array", help="how trials train")
    parser.add_argument("--hyperband-max-iters", type=int, default=81, help="epochs of a trial that nothing stops")
    parser.add_argument("--hyperband-eta", type=float, default=3, help="trials for each that goes on")
    parser.add_argument(
        "--hyperband-skip-last", type=int, default=2, help="last rungs of every bracket that are left out"
    )
    parser.add_argument("--random-n-configs", type=int, default=81, help="configurations of random search")
    parser.add_argument("--random-n-iters", type=int, default=10, help="their epochs")
    parser.add_argument("--max-models", type=_models, default="auto", help="the largest array")
    parser.add_argument("--seed", type=int, default=1117)
    parser.add_argument("--outdir", type=Path, default=Path("out/tune"), help="folder for the tables")
    parser.add_argument("--size", choices=["paper", "small"], default="paper")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the original archives")
    parser.add_argument("--limit", type=int, help="use only this many samples, for training and for testing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--amp", action="store_true", help="automatic mixed precision in bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile before training")
    return parser.parse_args(argv)


def _models(text: str) -> int | str:
    return text if text == "auto" else int(text)


if __name__ == "__main__":
    sys.exit(main())
