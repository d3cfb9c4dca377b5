"""Every workload in every mode, over the number of models M: time, memory and processors of a step, relative to the loop.

The loop and all modes that memory holds together take turns; the ratio of a mode is the median over rounds of the loop's
time by its own in the same round. Before that both train without anything random, and a mode whose losses are not those of
the loop gets no ratio. A compiled array, whose noise is that of the eager one, has to give the losses of that. PyTorch's own
ways to compile, which draw other noise, and everything in lower precision have to start alike.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import hfta_func as hfta
from benchmarks._gpu import watched
from benchmarks._measure import machine, table
from benchmarks.modes import MODES, PROCESSES, SERIAL
from benchmarks.worker import Worker
from benchmarks.workloads import WORKLOADS, Spec, batch_size
from hfta_func.run.memory import free_bytes

T = TypeVar("T")
TOLERANCE = 1e-6
"""By how much the losses of a mode may differ from those of the loop, in float64."""
ROUNDING, COARSE, MOVED = 1e-4, 3e-2, 0.1
"""By how much the first loss of a compiled array may differ from that of the eager one, on a CPU and in the lower precision
of a GPU, and the second one, before which Adam makes full steps of rounding noise. Tests hold the two together in float64."""
ALIKE = 0.3
"""By how much the mean of all members' first losses may differ from the loop's, whatever they draw."""
CHECKED = (PROCESSES, "stock vmap", "array", "JAX", "HFTA")
COMPILED = ("array compiled", "array CUDA graph")
CUDA_ONLY = ("array CUDA graph",)
UNLIKE = ("dense",)
"""Trains one model on the samples of all."""
CPU_ONLY = ("serial, default allocator",)
ROUNDS, WARMUP = 9, 4
SPARE = 2
"""How often the memory of the largest mode so far has to be free for one more to start beside it."""
TURN, WATCH = 0.3, 3.0
"""Seconds that a turn of the loop takes at least, in steps in a row, and that a GPU is watched."""


class Measured:
    """A mode's process or, for processes, one for each model; ``row`` is what is found, or why it has no numbers."""

    def __init__(self, mode: str, spec: Spec, row: dict[str, Any] | None = None):
        self.mode, self.device, self.row = mode, spec.device, {} if row is None else row
        threads = torch.get_num_threads()
        if mode == PROCESSES:
            # As many threads as there are processors, shared out.
            share = max(1, threads // spec.num_models)
            specs = [spec._replace(num_models=1, first=spec.first + i) for i in range(spec.num_models)]
            self._workers = [Worker(mode, one, share) for one in specs]
        else:
            self._workers = [Worker(mode, spec, threads)]

    def ask(self, order: str, *args: Any) -> list[Any]:
        """Every process, at once."""
        for worker in self._workers:
            worker.begin(order, *args)
        return [worker.end() for worker in self._workers]

    def losses(self) -> list[list[float]]:
        """Of all models in three steps without anything random."""
        return joined(self.ask("losses"))

    def start(self) -> tuple[float, list[list[float]]]:
        """Seconds of the first step, and the losses of the first two."""
        took, losses = zip(*self.ask("start"), strict=True)
        return max(took), joined(losses)

    def time(self, calls: int) -> tuple[float, float]:
        """Seconds of a step of all models, and of the processors meanwhile."""
        start = time.perf_counter()
        answers = self.ask("time", calls)
        took = (time.perf_counter() - start) / calls if len(answers) > 1 else answers[0][0]
        return took, sum(busy for _, busy in answers)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside is the row's error, and ends the processes."""
        try:
            yield
        except RuntimeError as error:
            self.row["error"] = str(error)
            self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()


def joined(parts: Iterable[list[list[float]]]) -> list[list[float]]:
    """Steps of some models each to steps of all of them."""
    return [[*itertools.chain.from_iterable(step)] for step in zip(*parts, strict=True)]


def difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative one of all losses; NaN counts as infinite."""
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return ((a - b).abs() / b.abs().clamp(min=1e-12)).nan_to_num(nan=float("inf")).max().item()


def compare(spec: Spec, modes: list[str], rounds: int, verbose: bool) -> dict[str, Any]:
    """One workload at one M: a row for each mode."""
    rows, most = {mode: dict[str, Any]() for mode in modes}, 0
    loop, beside = Measured(SERIAL, spec, rows.get(SERIAL)), list[Measured]()
    try:
        check(rows, spec)
        eager = alone("array", spec, Measured.start)[1] if any(mode in COMPILED for mode in modes) else []
        reference = Reference(loop.start()[1], eager)
        took, _ = loop.time(1)
        calls = max(1, round(TURN / loop.time(1)[0])) if took < TURN else 1
        for mode in modes:
            if mode == SERIAL or "error" in rows[mode]:
                continue
            if verbose:
                print(f"{spec.workload} {spec.size} M = {spec.num_models}: {mode}", flush=True)
            if beside and room(spec.device) < SPARE * most:
                take_turns(loop, beside, rounds, calls)
                beside = []
            free = room(spec.device)
            beside.append(other := Measured(mode, spec, rows[mode]))
            with other.failing():
                begin(other, spec, reference)
            most = max(most, free - room(spec.device))
        take_turns(loop, beside, rounds, calls)
    except RuntimeError as error:
        # Without a loop or an eager array there is nothing to compare with.
        for row in rows.values():
            if "ratio" not in row:
                row.setdefault("error", str(error))
    finally:
        for other in (loop, *beside):
            other.close()
    about = {"rounds": rounds, "machine": machine()}
    return {**settings(spec), "rows": {mode: row | about for mode, row in rows.items()}}


class Reference(NamedTuple):
    """Losses that others are held to.

    Args:
        noisy: Of the loop's first steps.
        eager: Of the eager array's.
    """

    noisy: list[list[float]]
    eager: list[list[float]]


def check(rows: dict[str, dict[str, Any]], spec: Spec) -> None:
    """Hold modes to the loop where both train without anything random; fills rows.

    In processes of their own, one at a time: float64 takes twice the memory, and allocators keep it.
    """
    expected = alone(SERIAL, spec, Measured.losses)
    for mode, row in rows.items():
        if mode in CHECKED:
            other = Measured(mode, spec, row)
            with other.failing():
                row["difference"] = difference(other.losses(), expected)
                if not row["difference"] < TOLERANCE:
                    raise RuntimeError(f"losses differ from the loop's by more than {TOLERANCE:.0e}")
            other.close()


def alone(mode: str, spec: Spec, work: Callable[[Measured], T]) -> T:
    """What a process of its own answers."""
    other = Measured(mode, spec)
    try:
        return work(other)
    finally:
        other.close()


def room(device: str) -> int:
    """Free bytes; less than nothing, so that one mode starts at a time, where they cannot be read."""
    with contextlib.suppress(hfta.StateError):
        return free_bytes(torch.device(device))
    return -1


def settings(spec: Spec) -> dict[str, Any]:
    """What rows that stand together have in common."""
    return {"batch_size": spec.batch_size, "device": spec.device, "amp": spec.amp}


def begin(other: Measured, spec: Spec, reference: Reference) -> None:
    """Take a mode's first steps.

    Raises:
        RuntimeError: if it cannot, or its losses are not those of what it is held to.
    """
    mode, found = other.mode, other.row
    found["first step"], own = other.start()
    if mode in COMPILED:
        allowed = COARSE if spec.amp or spec.device == "cuda" else ROUNDING
        found["difference"], after = map(difference, own, reference.eager)
        if not (found["difference"] < allowed and after < MOVED):
            raise RuntimeError(f"losses differ from the eager array's by {found['difference']:.0e} and {after:.0e}")
    if mode not in UNLIKE:
        found["alike"] = difference([statistics.mean(own[0])], [statistics.mean(reference.noisy[0])])
        if not found["alike"] < ALIKE:
            raise RuntimeError(f"first losses differ from the loop's by {found['alike']:.0%}")


def take_turns(loop: Measured, beside: list[Measured], rounds: int, calls: int) -> None:
    """Fill rows: the loop and all others that have not failed, round by round, so that all see the same machine."""
    times: dict[str, list[tuple[float, float, float]]] = {other.mode: [] for other in (loop, *beside)}
    for _ in range(WARMUP + rounds):
        base, work = loop.time(calls)
        times[SERIAL].append((base, base, work))
        for other in beside:
            if "error" not in other.row:
                with other.failing():
                    own, work = other.time(calls)
                    times[other.mode].append((own, base, work))
    # Without the loop nothing goes on: its failure is not its row's alone.
    loop.row |= numbers(loop, times[SERIAL][WARMUP:]) | {"calls": calls}
    for other in beside:
        if "error" not in other.row:
            with other.failing():
                other.row |= numbers(other, times[other.mode][WARMUP:]) | {"calls": calls}
    for other in beside:
        other.close()


def numbers(other: Measured, times: list[tuple[float, float, float]]) -> dict[str, Any]:
    """What a row tells, from seconds of a step of the mode and of the loop, and of the processors meanwhile, by rounds."""
    own, base, work = zip(*times, strict=True)
    low, median, high = statistics.quantiles(own, n=4, method="inclusive")
    with watched(other.device) as used:
        if other.device == "cuda":
            other.time(max(1, round(WATCH / median)))
    taken = other.ask("memory")
    return {
        "seconds": [low, median, high],
        "ratio": statistics.median(map(operator.truediv, base, own)),
        "busy": statistics.median(map(operator.truediv, work, own)) / (os.cpu_count() or 1),
        "gpu": used,
        "bytes": None if None in taken else sum(taken),
    }


def largest(spec: Spec) -> int | None:
    """The most models that fit as an array, if that can be found out."""
    worker = Worker("array", spec, torch.get_num_threads())
    try:
        return worker.ask("largest")
    except RuntimeError as error:
        print(f"the largest array is not known: {error}", flush=True)
        return None
    finally:
        worker.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All that the arguments name; results are added to the file as they come."""
    wrong = CPU_ONLY if args.device == "cuda" else CUDA_ONLY
    modes = [mode for mode in MODES if mode not in wrong and (not args.modes or mode in args.modes)]
    results: dict[str, Any] = {}
    for name in args.workloads or WORKLOADS:
        for count in args.models:
            size = args.batch_size or batch_size(name, args.size, args.device)
            spec = Spec(name, args.size, count, size, args.device, args.amp)
            found = compare(spec, modes, args.rounds, args.verbose)
            if args.largest:
                found["largest"] = largest(spec._replace(num_models=1))
            results.setdefault(name, {})[str(count)] = found
            print(f"{show(name, args.size, count, found)}\n", flush=True)
            if args.json:
                save(args.json, name, str(count), found)
    return results


def save(path: Path, name: str, count: str, found: dict[str, Any]) -> None:
    """Put rows into a file of results in the place of those they measure again; of other settings, of all that are there."""
    held = json.loads(path.read_text()) if path.exists() else {}
    old = held.setdefault(name, {}).get(count, {})
    if any(found[key] != old.get(key) for key in ("batch_size", "device", "amp")):
        old = {}
    held[name][count] = {**old, **found, "rows": {**old.get("rows", {}), **found["rows"]}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=1) + "\n")


def show(name: str, size: str, count: int, found: dict[str, Any]) -> str:
    """The table of one workload at one M."""
    lines = []
    for mode, one in found["rows"].items():
        if "error" in one:
            lines.append([mode, one["error"][:60], "", "", "", "", ""])
            continue
        low, median, high = (1e3 * value for value in one["seconds"])
        first = f"{one['first step']:.1f}" if "first step" in one else ""
        memory = "" if one["bytes"] is None else f"{one['bytes'] / 2**20:.1f}"
        lines.append(
            [
                mode,
                f"{median:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{one['ratio']:.2f}x",
                first,
                memory,
                f"{one['busy']:.0%}",
            ]
        )
    head = ["", "ms", "quartiles", "ratio", "first step s", "MiB"]
    title = f"{WORKLOADS[name].title} ({size}), M = {count}, N = {found['batch_size']}"
    fits = f"\n{found['largest']} models fit" if "largest" in found else ""
    return f"{title}\n{table([*head, 'processors'], lines)}{fits}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], help="which; all by default")
    parser.add_argument("--size", choices=["paper", "small"], default="paper", help="published sizes, or a laptop's")
    parser.add_argument("--models", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="numbers of models")
    parser.add_argument("--modes", nargs="+", choices=[*MODES], help="ways to train; all by default")
    parser.add_argument("--batch-size", type=int, help="samples of each model's step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--amp", action="store_true", help="in bfloat16")
    parser.add_argument("--largest", action="store_true", help="how many models fit, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--verbose", action="store_true", help="print each mode as it is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.rounds < 2 or min(args.models) < 1 or (args.batch_size or 1) < 1:
        parser.error("at least 1 model, 1 sample and 2 rounds are needed")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print, and say whether every mode could be measured."""
    results = measure(parse(argv))
    rows = [row for counts in results.values() for found in counts.values() for row in found["rows"].values()]
    return int(any("error" in row for row in rows))
