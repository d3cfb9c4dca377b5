"""Multilayer perceptrons of different width and depth: padded arrays, an array for each size, and a loop.

Each draws its depth, width, dropout rate, learning rate and weight decay, as configurations of a search for tables do, and
trains on a table of scikit-learn. Seconds of an epoch of all, side by side in one run once steps are replayed, and until the
first epoch is done, compiling included. Before anything is shown, the losses of the first steps are compared. The loop has
PyTorch's fused AdamW.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks._measure import add_to, interleaved, machine, seconds, table

DEPTHS = 1, 2, 3, 4
TOLERANCE = 1e-3
WARMUP = 16
"""Epochs of eager arrays before those that are timed, in which steps are recorded."""


class Config(NamedTuple):
    """One model and its optimizer."""

    depth: int
    width: int
    rate: float
    lr: float
    weight_decay: float


def configs(count: int, widths: list[int], dropout: bool) -> list[Config]:
    """Configurations drawn at random."""
    draws = random.Random(0)
    return [
        Config(
            *(draws.choice(DEPTHS), draws.choice(widths), draws.choice([0.0, 0.1, 0.2, 0.3]) * dropout),
            *(10 ** draws.uniform(-4, -2), 10 ** draws.uniform(-4, -1)),
        )
        for _ in range(count)
    ]


def data() -> tuple[Tensor, Tensor]:
    """The table: handwritten digits, 64 columns and ten classes."""
    from sklearn.datasets import load_digits

    inputs, classes = load_digits(return_X_y=True)
    return torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(classes)


def make_model(config: Config) -> nn.Module:
    """One model."""
    widths = [64] + [config.width] * config.depth
    layers = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Linear(before, after), nn.ReLU(), nn.Dropout(config.rate))
    ]
    return nn.Sequential(*layers, nn.Linear(config.width, 10))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def models_of(chosen: list[Config]) -> list[nn.Module]:
    """The models, each by the seed of its number."""
    made = []
    for seed, config in enumerate(chosen):
        torch.manual_seed(seed)
        made.append(make_model(config))
    return made


class Arrays:
    """All models as arrays of those that ``kind`` makes the same of, padded unless that is their size."""

    def __init__(self, chosen: list[Config], kind: Callable[[Config], Any], compile: bool, replay: bool):
        models, self.parts, padded = models_of(chosen), [], kind is not _size
        groups: dict[Any, list[int]] = {}
        for member, config in enumerate(chosen):
            groups.setdefault(kind(config), []).append(member)
        for members in groups.values():
            own = [models[member] for member in members]
            model = hfta.padded(own) if padded else own[0]
            optimizer = hfta.adamw(
                lr=[chosen[m].lr for m in members], weight_decay=[chosen[m].weight_decay for m in members]
            )
            step = hfta.make_train_step(model, loss_fn, optimizer, batch_dims=None, donate=True, replay=replay)
            state = step.init(*hfta.stack_params(own, pad=model if padded else False), seeds=members)
            run: Any = torch.compile(step, fullgraph=True) if compile else step
            self.parts.append([members, run, state])
        self.count = len(chosen)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Train all models on a batch; returns their losses."""
        losses = torch.empty(self.count)
        for part in self.parts:
            members, run, state = part
            part[2], metrics = run(state, batch)
            losses[members] = metrics["loss"]
        return losses


def _size(config: Config) -> Any:
    return config.depth, config.width


KINDS: dict[str, Callable[[Config], Any]] = {
    "arrays by size": _size,
    "padded array": lambda config: None,
    "padded arrays, widths within 2x": lambda config: math.ceil(math.log2(config.width)),
}
"""Which models are an array."""


class Loop:
    """The models one after another."""

    def __init__(self, chosen: list[Config]):
        self.models = models_of(chosen)
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
            for model, config in zip(self.models, chosen, strict=True)
        ]

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Train all models on a batch; returns their losses."""
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


def measure(chosen: list[Config], ways: dict[str, Callable[[], Any]], batch: int, rounds: int) -> dict[str, Any]:
    """Seconds and agreement of every way to train the models."""
    hfta.step.keep_memory()
    inputs, classes = data()
    batches = [*zip(inputs.split(batch), classes.split(batch), strict=True)][: len(inputs) // batch]
    # Noise is the members' own, not PyTorch's, so losses are compared without it.
    quiet = [config._replace(rate=0.0) for config in chosen]
    expected, padded = Loop(quiet), Arrays(quiet, KINDS["padded array"], False, False)
    agrees = all(bool((expected.step(b) - padded.step(b)).abs().max() <= TOLERANCE) for b in batches[:3])
    runs, first = {}, {}
    for name, make in ways.items():
        start = time.perf_counter()
        runs[name] = make()
        for each in batches:
            runs[name].step(each)
        first[name] = time.perf_counter() - start

    def epoch(run: Any) -> None:
        for each in batches:
            run.step(each)

    timers = {name: functools.partial(seconds, functools.partial(epoch, run), 1) for name, run in runs.items()}
    for name in timers:
        for _ in range(WARMUP if name in KINDS else 0):
            timers[name]()
    times = interleaved(timers, rounds, warmup=1)
    return {name: {"first": first[name], "seconds": times[name], "agrees": agrees} for name in runs}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sizes", description=__doc__)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--widths", nargs="+", type=int, default=[8, 16, 24, 32, 48, 64])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--no-dropout", dest="dropout", action="store_false", help="all rates are 0")
    parser.add_argument("--no-replay", dest="replay", action="store_false", help="eager steps are not replayed")
    parser.add_argument("--compile", action="store_true", help="also compiled arrays")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    about, chosen = machine(), configs(args.models, args.widths, args.dropout)
    sizes = len({(config.depth, config.width) for config in chosen})
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    print(f"{args.models} models of {sizes} sizes")
    ways: dict[str, Callable[[], Any]] = {"loop": lambda: Loop(chosen)}
    for compiled in (False, True) if args.compile else (False,):
        suffix = ", compiled" if compiled else ""
        for name, kind in KINDS.items():
            ways[name + suffix] = functools.partial(Arrays, chosen, kind, compiled, args.replay and not compiled)
    found = measure(chosen, ways, args.batch, args.rounds)
    rows = []
    for name, one in found.items():
        peer = found["arrays by size, compiled" if name.endswith("compiled") else "arrays by size"]
        ratios = [
            f"{statistics.median(a / b for a, b in zip(other['seconds'], one['seconds'], strict=True)):.2f}x"
            for other in (found["loop"], peer)
        ]
        ratios = ratios if one["agrees"] else ["differs"] * 2
        rows.append([name, f"{1e3 * statistics.median(one['seconds']):.1f}", *ratios, f"{one['first']:.1f}"])
    head = ["way", "ms of an epoch", "loop / way", "arrays by size / way", "s to the first epoch"]
    print(f"\n{table(head, rows)}")
    if args.json:
        add_to(args.json, "sizes", about, {f"{args.models} of {sizes} sizes, batch {args.batch}": found})
    return 0 if all(one["agrees"] for one in found.values()) else 1
