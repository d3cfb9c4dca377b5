"""Recurrent networks over an ordinary loop: whole sequences, layers called step by step, and cells.

The loop trains ordinary modules one after another with PyTorch's fused Adam; the array trains them eagerly, replayed, and by
``fit``. Ways take turns; processor time on one thread, wall clock on several; the median of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks._measure import add_to, interleaved, machine, table

KINDS: dict[str, Any] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell": nn.RNNCell,
}
FEATURES, CLASSES = 12, 5


class Sequences(nn.Module):
    """A recurrent layer and a linear one on its last step; ``by_step`` calls the layer once for every step."""

    def __init__(self, kind: str, width: int, by_step: bool):
        super().__init__()
        self.layer, self.head = KINDS[kind](FEATURES, width), nn.Linear(width, CLASSES)
        self.by_step, self.is_cell = by_step, kind.endswith("Cell")

    def forward(self, x: Tensor) -> Tensor:
        """``[T, N, 12] -> [N, 5]``."""
        if not self.by_step:
            return self.head(self.layer(x)[0][-1])
        state, output = None, x
        for step in x.unbind(0) if self.is_cell else x.split(1):
            result = self.layer(step, state)
            output, state = (result[0] if isinstance(result, tuple) else result, result) if self.is_cell else result
        return self.head(output if self.is_cell else output[0])


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _made(case: tuple[Any, ...], members: int) -> tuple[list[nn.Module], tuple[Tensor, Tensor]]:
    kind, by_step, width, batch, length = case
    models = []
    for member in range(members):
        torch.manual_seed(member)
        models.append(Sequences(kind, width, by_step))
    return models, (torch.randn(members, length, batch, FEATURES), torch.randint(CLASSES, (members, batch)))


def measured(case: tuple[Any, ...], members: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """How many times as fast as the loop each way is, and the loop's milliseconds a step."""
    models, batch = _made(case, members)
    alone = [(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)) for model in models]
    parts = list(zip(*batch, strict=True))

    def loop() -> None:
        for (model, optimizer), part in zip(alone, parts, strict=True):
            optimizer.zero_grad()
            _loss(model, part).backward()
            optimizer.step()

    def of_step(**options: Any) -> Callable[[], None]:
        models = _made(case, members)[0]
        step = hfta.make_train_step(models[0], _loss, hfta.adam(lr=1e-3), donate=True, verify=False, **options)
        states = [step.init(*hfta.stack_params(models), seeds=range(members))]

        def run() -> None:
            states[0] = step(states[0], batch)[0]

        for _ in range(4):
            run()
        return run

    models = _made(case, members)[0]
    fitted = hfta.make_train_step(models[0], _loss, hfta.adam(lr=1e-3))
    loop()
    begun = clock()
    loop()
    calls = max(2, min(100, int(0.1 / (clock() - begun))))
    long = 10 * calls

    def fit() -> None:
        state = fitted.init(*hfta.stack_params(models), seeds=range(members))
        hfta.fit(fitted, state, [batch] * long, epochs=1, progress=False)

    ways = {"loop": loop, "eager": of_step(replay=False), "replayed": of_step(replay=True)}

    def timer(work: Callable[[], None], repeats: int, steps: int) -> float:
        begun = clock()
        for _ in range(repeats):
            work()
        return (clock() - begun) / (repeats * steps)

    timers: dict[str, Callable[[], float]] = {
        name: lambda work=work: timer(work, calls, 1) for name, work in ways.items()
    }
    timers["fit"] = lambda: timer(fit, 1, long)
    times = interleaved(timers, rounds, 1)
    found = {
        name: statistics.median(a / b for a, b in zip(times["loop"], values, strict=True))
        for name, values in times.items()
        if name != "loop"
    }
    return {**found, "loop_ms": 1e3 * statistics.median(times["loop"])}


def show(found: dict[str, Any]) -> str:
    """A table."""
    lines = [
        [name, *(f"{row[way]:.2f}" for way in ("eager", "replayed", "fit")), f"{row['loop_ms']:.2f}"]
        for name, row in found.items()
    ]
    return table(["network", "eager", "replayed", "fit", "loop, ms a step"], lines)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recurrent", description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["LSTM", "LSTM by step", "LSTMCell", "GRU", "GRUCell"])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add all numbers to FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    found = {}
    sizes = itertools.product(args.kinds, args.widths, args.batches, args.lengths, args.models)
    for kind, width, batch, length, members in sizes:
        name, by_step = kind.split()[0], not kind.isupper()
        title = f"{kind}, H {width}, N {batch}, T {length}: M {members}"
        found[title] = measured((name, by_step, width, batch, length), members, args.rounds, clock)
        print(f"{title}: {found[title]}", file=sys.stderr, flush=True)
        if args.json:
            threads = ", two threads" if args.threads == 2 else ""
            add_to(args.json, "recurrent", machine(), {f"{title}{threads}": found[title]})
    print(show(found), flush=True)
    return 0
