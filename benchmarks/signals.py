"""Signals of several persons to windows, by hfta_func.signals, NumPy by hand and pandas: ``python -m benchmarks signals``.

LifeStream's pipeline (Jayarajan et al., ASPLOS 2021): samples with times at 500 and 125 Hz become grids, gaps up to a second
are filled by means of a minute, both are resampled to 125 Hz, normalised over a minute, joined, and cut into windows without
gaps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pandas
import torch
from torch import nn

import hfta_func as hfta
from benchmarks._measure import interleaved, machine, seconds, table
from hfta_func import signals

RATES, TARGET = (500, 125), 125
WITHIN, MINUTE, LENGTH, HOP = 1.0, 60, 8, 2

Person = tuple[tuple[numpy.ndarray, numpy.ndarray], ...]
"""Times and samples of each rate."""


def persons(count: int, length: float) -> list[Person]:
    """Simulated pressures, ``length`` seconds and less, in which about one sample in thirty is missing."""
    made = []
    for person in range(count):
        noise, parts = numpy.random.default_rng(person), []
        for rate in RATES:
            size = int(length * rate * (1 - 0.02 * person)) // (MINUTE * rate // 10) * (MINUTE * rate // 10)
            at = numpy.arange(size) / rate
            values = 80 + 15 * numpy.sin(2 * numpy.pi * (1 + 0.05 * person) * at) + 3 * noise.standard_normal(size)
            known = numpy.ones(size, dtype=bool)
            for begin in noise.integers(rate, size - rate, max(2, size // (rate * 30))):
                known[begin : begin + int(rate * noise.choice([0.05, 0.4, 0.9, 3.0]))] = False
            parts.append((at[known], values[known].astype(numpy.float32)))
        made.append(tuple(parts))
    return made


def by_signals(data: Sequence[Person]) -> signals.Windows:
    """The pipeline by functions of the package."""

    def prepared(person: Person) -> signals.Signal:
        channels = []
        for part, rate in zip(person, RATES, strict=True):
            filled = signals.fill(signals.from_timestamps(*part, rate), window=MINUTE, within=WITHIN)
            channels.append(signals.normalise(signals.resample(filled, TARGET), MINUTE))
        return signals.join(*channels)

    # Person by person, so that what a function makes is still in the processor's cache for the next.
    return signals.windows([prepared(person) for person in data], LENGTH, HOP)


def _blocks(values: Any, size: int) -> Any:
    return numpy.pad(values, (0, -len(values) % size)).reshape(-1, size)


def _numpy_channel(times: Any, samples: Any, rate: int) -> tuple[Any, Any]:
    """A channel at the target rate, normalised, and which of its samples are known."""
    at = numpy.rint((times - times[0]) * rate).astype(numpy.int64)
    values, known = numpy.zeros(at[-1] + 1, numpy.float32), numpy.zeros(at[-1] + 1, bool)
    values[at], known[at] = samples, True
    ends = numpy.flatnonzero(numpy.diff(at) > 1)
    window = MINUTE * rate
    means = _blocks(values, window).sum(1) / numpy.maximum(_blocks(known, window).sum(1), 1)
    for begin, end in zip(at[ends] + 1, at[ends + 1], strict=True):
        if end - begin <= WITHIN * rate:
            values[begin:end] = means[numpy.arange(begin, end) // window]
            known[begin:end] = True
    if rate > TARGET:
        # Sums over a few columns are slow in NumPy, products are not.
        ones = numpy.ones(rate // TARGET, numpy.float32)
        counts = _blocks(known, len(ones)).astype(numpy.float32) @ ones
        values, known = _blocks(values, len(ones)) @ ones / numpy.maximum(counts, 1), counts > 0
    blocks, mask = _blocks(values, MINUTE * TARGET), _blocks(known, MINUTE * TARGET)
    counts = numpy.maximum(mask.sum(1, keepdims=True), 1)
    centred = (blocks - blocks.sum(1, keepdims=True) / counts) * mask
    scores = centred / numpy.sqrt((centred**2).sum(1, keepdims=True) / counts)
    return scores.ravel()[: len(values)].astype(numpy.float32), known


def by_numpy(data: Sequence[Person]) -> list[Any]:
    """The pipeline by hand: the windows of each person, views and the numbers of those without a gap."""
    found = []
    for person in data:
        (fast, first), (slow, second) = (_numpy_channel(*part, rate) for part, rate in zip(person, RATES, strict=True))
        size = min(len(fast), len(slow))
        known = first[:size] & second[:size]
        both = numpy.stack([fast[:size], slow[:size]]) * known
        views = numpy.lib.stride_tricks.sliding_window_view(both, LENGTH * TARGET, 1)[:, :: HOP * TARGET].swapaxes(0, 1)
        counts = numpy.concatenate([[0], numpy.cumsum(known)])
        begins = numpy.arange(len(views)) * HOP * TARGET
        found.append((views, numpy.flatnonzero(counts[begins + LENGTH * TARGET] - counts[begins] == LENGTH * TARGET)))
    return found


def by_pandas(data: Sequence[Person]) -> list[Any]:
    """The pipeline as tables."""
    found = []
    for person in data:
        columns = []
        for (times, samples), rate in zip(person, RATES, strict=True):
            period = pandas.Timedelta(seconds=1 / rate)
            column = pandas.Series(samples, index=pandas.to_timedelta(times, unit="s").round(period))
            column = column.reindex(pandas.timedelta_range(column.index[0], column.index[-1], freq=period))
            gaps = column.isna()
            lengths = gaps.groupby((gaps != gaps.shift()).cumsum()).transform("sum")
            means = column.groupby(column.index.floor(f"{MINUTE}s")).transform("mean")
            column = column.where(~(gaps & (lengths <= WITHIN * rate)), means)
            column = column.resample(pandas.Timedelta(seconds=1 / TARGET)).mean()
            minutes = column.groupby(column.index.floor(f"{MINUTE}s"))
            columns.append((column - minutes.transform("mean")) / minutes.transform("std", ddof=0))
        both = pandas.concat(columns, axis=1, join="inner").to_numpy(numpy.float32).T
        views = numpy.lib.stride_tricks.sliding_window_view(both, LENGTH * TARGET, 1)[:, :: HOP * TARGET].swapaxes(0, 1)
        found.append((views, numpy.flatnonzero(~numpy.isnan(views).any((1, 2)))))
    return found


def difference(found: signals.Windows, others: Sequence[Any]) -> float:
    """The largest difference of a sample from those of another way; infinite if other windows have gaps."""
    largest = 0.0
    for rows, (views, without_gaps) in zip(found.rows, others, strict=True):
        if len(rows) != len(without_gaps) or not (rows - rows[0] == torch.tensor(without_gaps - without_gaps[0])).all():
            return float("inf")
        for row, number in zip(rows.tolist(), without_gaps.tolist(), strict=True):
            largest = max(largest, float(numpy.abs(found.values[row].numpy() - views[number]).max()))
    return largest


def drawing(found: signals.Windows, batch: int, rounds: int) -> dict[str, float]:
    """Seconds to draw a batch of windows for all persons, and of a training step of a small CNN a person with it."""
    count = len(found.rows)

    def make_model() -> nn.Module:
        layers = [nn.Conv1d(2, 16, 7, 4), nn.ReLU(), nn.Conv1d(16, 32, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    step = hfta.make_train_step(make_model(), loss_fn, hfta.adam())
    state = step.init(*hfta.init_params(make_model, range(count)), seeds=range(count))
    loader = hfta.ArrayLoader(
        found.values, batch, seeds=range(count), rows=found.rows, batches_per_epoch=3 * rounds + 9
    )
    batches, times = iter(loader), {"draw": [], "step": []}
    for _ in range(rounds + 2):
        start = time.perf_counter()
        drawn = next(batches)
        middle = time.perf_counter()
        state, _ = step(state, drawn)
        times["draw"].append(middle - start)
        times["step"].append(time.perf_counter() - middle)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether all ways agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks signals", description=__doc__)
    parser.add_argument("--persons", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3600, help="length of the longest person's signals")
    parser.add_argument("--batch", type=int, default=32, help="windows of a person in a batch")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way, of which the median counts")
    parser.add_argument("--no-pandas", dest="pandas", action="store_false", help="leave the slowest way out")
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    about = machine()
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    data = persons(args.persons, args.seconds)
    ways: dict[str, Callable[[], Any]] = {
        "signals": lambda: by_signals(data),
        "NumPy by hand": lambda: by_numpy(data),
        **({"pandas": lambda: by_pandas(data)} if args.pandas else {}),
    }
    results = {name: way() for name, way in ways.items()}
    found = results.pop("signals")
    far = {name: difference(found, other) for name, other in results.items()}
    times = interleaved({name: lambda way=way: seconds(way, 1) for name, way in ways.items()}, args.rounds, warmup=1)
    rows = {
        name: {
            "seconds": statistics.median(values),
            "ratio": statistics.median(other / own for own, other in zip(times["signals"], values, strict=True)),
            "difference": far.get(name, 0.0),
        }
        for name, values in times.items()
    }
    shown = [[name, f"{r['seconds']:.3f}", f"{r['ratio']:.1f}", f"{r['difference']:.1e}"] for name, r in rows.items()]
    print(f"\n{table(['way', 'seconds', 'of signals', 'largest difference'], shown)}")
    drawn = drawing(found, args.batch, args.rounds)
    print(f"\na batch: {drawn['draw'] * 1e3:.2f} ms to draw, {drawn['draw'] / drawn['step']:.1%} of a step")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "signals": rows, "batch": drawn}, indent=2) + "\n")
    wrong = [name for name, value in far.items() if not value <= 1e-5]
    print("\n".join(f"results differ: {name}" for name in wrong))
    return 1 if wrong else 0
