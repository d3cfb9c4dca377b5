"""What executors cost: segments of some seconds in worker processes and in actors of Ray, by turns, and how long they start.

Every call sends a state of an array to a worker, which waits for as long as a segment would train and sends the state
back; what a call takes beyond the wait is overhead. With ``--compute`` it multiplies matrices for about as long, on one
thread each, so that what Ray's own processes take from the processors counts as well. ``--trials N`` searches with N trials
of one epoch of one batch of a linear model, one after another (arrays of one) and sixteen to an array.
``python -m benchmarks executors``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks import _code
from benchmarks._measure import table
from hfta_func import tune
from hfta_func.workers.pool import Pool

PACKED = (1, 16)
"""Trials in an array."""


class Segment:
    """Stands for the training of an array."""

    def __init__(self, products: float):
        self.products = products  # a second; 0 waits

    def __call__(self, state: torch.Tensor, seconds: float) -> torch.Tensor:
        """Take about so long, and return another state of the same size."""
        if self.products:
            multiply(round(self.products * seconds))
        else:
            time.sleep(seconds)
        return state + 1


def multiply(products: int) -> None:
    """Work of a fixed amount."""
    torch.set_num_threads(1)
    matrix = torch.eye(256)
    for _ in range(products):
        matrix = matrix @ matrix


def speed() -> float:
    """Products a second of this process."""
    multiply(100)
    begin = time.perf_counter()
    multiply(2000)
    return 2000 / (time.perf_counter() - begin)


def trivial(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    """An array that trains in no time."""

    def factory() -> nn.Module:
        return nn.Linear(4, 1)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"]))
    state = step.init(*hfta.init_params(factory, members["seed"]), seeds=members["seed"])
    return tune.Array(step, state, hfta.ArrayLoader((torch.ones(8, 4), torch.ones(8, 1)), 8, seeds=members["seed"]))


def queue(trials: int, pool: Pool | None, max_models: int) -> float:
    """Trials a second of a search in which training takes no time."""
    space = {"lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)}
    options: Any = {"metric": "loss", "direction": "minimize", "trials": trials, "epochs": 1, "progress": False}
    begin = time.perf_counter()
    study = tune.run(trivial, space, max_models=max_models, executor=pool, **options)
    took = time.perf_counter() - begin
    assert sum(trial.status == "complete" for trial in study.trials) == trials
    return trials / took


def crew(kind: str, workers: int) -> Pool:
    """Workers of a kind."""
    if kind == "processes":
        return hfta.workers.WorkerPool(workers)
    from hfta_func import cluster

    return cluster.ray(workers)


def overhead(
    pool: Pool, workers: int, megabytes: float, seconds: float, calls: int, products: float = 0.0
) -> dict[str, float]:
    """Seconds per call beyond its wait, with every worker busy all the time; and calls a second."""
    function = Segment(products)
    state = torch.zeros(int(megabytes * 1e6 / 4))
    for _ in range(2 * workers):
        # Functions are sent, and modules imported.
        pool.submit(function, state=state, seconds=0.0)
    for _ in range(2 * workers):
        pool.wait()
    begin = time.perf_counter()
    left = calls
    for _ in range(min(workers, left)):
        pool.submit(function, state=state, seconds=seconds)
        left -= 1
    for _ in range(calls):
        _, answer = pool.wait()
        if isinstance(answer, Exception):
            raise answer
        if left:
            # The next segment goes on from what the last one returned.
            pool.submit(function, state=answer, seconds=seconds)
            left -= 1
    took = time.perf_counter() - begin
    pool.forget()
    return {"overhead": took * workers / calls - seconds, "rate": calls / took}


def measured(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All numbers: seconds until workers have answered, overhead by size of the state, and calls a second without work."""
    products = speed() if args.compute else 0.0
    found: dict[str, Any] = {"start": {}, "overhead": {}, "rate": {}, "trials": {}}
    pools: dict[str, Pool] = {}
    try:
        for kind in ("processes", "ray"):
            begin = time.perf_counter()
            pools[kind] = crew(kind, args.workers)
            for _ in range(args.workers):
                pools[kind].submit(dict)
            for _ in range(args.workers):
                pools[kind].wait()
            found["start"][kind] = time.perf_counter() - begin
            say(f"{kind} have started")
        for megabytes in args.megabytes:
            rounds: dict[str, list[float]] = {kind: [] for kind in pools}
            for _ in range(args.rounds):
                for kind, pool in pools.items():
                    one = overhead(pool, args.workers, megabytes, args.seconds, args.calls * args.workers, products)
                    rounds[kind].append(one["overhead"])
            found["overhead"][f"{megabytes:g}"] = rounds
            say(f"{megabytes:g} MB")
        for megabytes in (0.001, *args.megabytes):
            calls = max(10, min(300, int(200 / megabytes)))
            found["rate"][f"{megabytes:g}"] = {
                kind: [overhead(pool, args.workers, megabytes, 0.0, calls)["rate"] for _ in range(args.rounds)]
                for kind, pool in pools.items()
            }
            say(f"calls of {megabytes:g} MB without work")
        for size in PACKED if args.trials else ():
            found["trials"][str(size)] = {kind: queue(args.trials, pool, size) for kind, pool in pools.items()}
            say(f"{args.trials} trials, {size} to an array")
    finally:
        for pool in pools.values():
            pool.close()
    return found


def show(found: dict[str, Any], seconds: float) -> str:
    """A table."""
    rows = [["start-up", *(f"{found['start'][kind]:.1f} s" for kind in ("processes", "ray")), ""]]
    for size, rounds in found["overhead"].items():
        own, ray = (statistics.median(rounds[kind]) for kind in ("processes", "ray"))
        share = (seconds + ray) / (seconds + own) - 1
        rows.append(
            [f"a segment of {seconds:g} s, {size} MB", f"{own * 1e3:+.0f} ms", f"{ray * 1e3:+.0f} ms", f"{share:+.2%}"]
        )
    for size, rounds in found["rate"].items():
        rates = [f"{statistics.median(rounds[kind]):.3g}" for kind in ("processes", "ray")]
        rows.append([f"calls a second without work, {size} MB", *rates, ""])
    for size, by_kind in found["trials"].items():
        rates = [f"{by_kind[kind]:.3g}" for kind in ("processes", "ray")]
        rows.append([f"trials a second without work, arrays of {size}", *rates, ""])
    return table(["", "processes", "Ray", "Ray takes longer by"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks executors", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="what a segment takes without overhead")
    parser.add_argument("--compute", action="store_true", help="segments compute in place of waiting")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="sizes of a state")
    parser.add_argument("--calls", type=int, default=2, help="segments of each worker in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=0, help="trials of a search in which training takes no time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    about = _code.stamp()
    print("{cpu}, {cores} cores, torch {torch}, {date}".format(**about), flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measured(args, lambda what: print(what, flush=True))
    print(f"\n{show(found, args.seconds)}", flush=True)
    if args.json:
        settings = {"workers": args.workers, "seconds": args.seconds, "calls": args.calls, "compute": args.compute}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "settings": settings, **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
