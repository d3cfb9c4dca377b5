"""Every workload in every mode, over the number of models M: time, memory and processors of a step, relative to the loop.

The loop and all modes that memory holds together take turns; the ratio of a mode is the median over rounds of the loop's
time by its own in the same round. Every figure rests on nine rounds and two seconds of its mode or more, and its row names
them and the commit. Before that both train without anything random, and a mode whose losses are not those of
the loop gets no ratio. A compiled array, whose noise is that of the eager one, has to give the losses of that. PyTorch's own
ways to compile, which draw other noise, and everything in lower precision have to start alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import hfta_func as hfta
from benchmarks import _code
from benchmarks._gpu import watched
from benchmarks._measure import RESULTS, machine, table
from benchmarks._processes import TURN, Measured
from benchmarks.modes import IN_FIT, MANY, MODES, NOT_FOR, PER_CORE, PROCESSES, REPLAYED, SERIAL, WORKERS
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
CHECKED = (
    PROCESSES,
    PER_CORE,
    "serial foreach",
    "stock vmap",
    "array",
    "array auto",
    IN_FIT,
    WORKERS[0],
    "JAX",
    "HFTA",
)
COMPILED = ("array compiled", REPLAYED[1], MANY, WORKERS[1])
UNLIKE = ("dense",)
"""Trains one model on the samples of all."""
CPU_ONLY, CUDA_ONLY = ("serial, default allocator", *WORKERS), REPLAYED
ROUNDS, SECONDS, WARMUP = 9, 2.0, 4
"""Rounds of all modes together and seconds of each that a figure rests on at least, and rounds before them."""
QUICK = 2
"""Rounds that show whether everything runs."""
LOOP = "fused"
"""How the loop updates, as rows of other loops cannot stand beside these."""
SPARE = 2
"""How often the memory of the largest mode so far has to be free for one more to start beside it."""
WATCH = 3.0
"""Seconds that a GPU is watched."""


def difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative one of all losses; NaN counts as infinite."""
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return ((a - b).abs() / b.abs().clamp(min=1e-12)).nan_to_num(nan=float("inf")).max().item()


def compare(spec: Spec, modes: list[str], least: Least, verbose: bool, at_once: bool = False) -> dict[str, Any]:
    """One workload at one M: a row for each mode."""
    # Before anything runs, as files may change meanwhile.
    about = {"machine": machine(), **_code.commit()}
    rows, most = {mode: {**about, "code": _code.code(mode)} for mode in modes}, 0
    loop, beside = Measured(SERIAL, spec, rows.get(SERIAL)), list[Measured]()
    try:
        check(rows, spec, at_once)
        eager = alone("array", spec, Measured.start)[1] if any(mode in COMPILED for mode in modes) else []
        loop.row["first step"], noisy = loop.start()
        reference = Reference(noisy, eager)
        left = [mode for mode in modes if mode != SERIAL and "error" not in rows[mode]]
        if at_once:
            beside, left = [Measured(mode, spec, rows[mode]) for mode in left], []
            together(lambda other: begin(other, spec, reference), beside)
        for mode in left:
            if verbose:
                print(f"{spec.workload} {spec.size} M = {spec.num_models}: {mode}", flush=True)
            if beside and room(spec.device) < SPARE * most:
                take_turns(loop, beside, least)
                beside = []
            free = room(spec.device)
            beside.append(other := Measured(mode, spec, rows[mode]))
            with other.failing():
                begin(other, spec, reference)
            most = max(most, free - room(spec.device))
        take_turns(loop, beside, least)
    except RuntimeError as error:
        # Without a loop or an eager array there is nothing to compare with.
        for row in rows.values():
            if "ratio" not in row:
                row.setdefault("error", str(error))
    finally:
        for other in (loop, *beside):
            other.close()
    return {**settings(spec), "rows": rows}


class Least(NamedTuple):
    """What a figure rests on at least.

    Args:
        rounds: Of all modes together.
        seconds: Of each mode, in all its rounds.
        warmup: Rounds before them.
        turn: Seconds that a turn takes at least, in steps in a row.
        watch: Seconds that a GPU is watched afterwards.
    """

    rounds: int = ROUNDS
    seconds: float = SECONDS
    warmup: int = WARMUP
    turn: float = TURN
    watch: float = WATCH


class Reference(NamedTuple):
    """Losses that others are held to.

    Args:
        noisy: Of the loop's first steps.
        eager: Of the eager array's.
    """

    noisy: list[list[float]]
    eager: list[list[float]]


def check(rows: dict[str, dict[str, Any]], spec: Spec, at_once: bool = False) -> None:
    """Hold modes to the loop where both train without anything random; fills rows.

    In processes of their own, one at a time unless ``at_once``: float64 takes twice the memory, and allocators keep it.
    """
    expected = alone(SERIAL, spec, Measured.losses)

    def hold(other: Measured) -> None:
        held(other.row, other.losses(), expected)

    checked = [(mode, row) for mode, row in rows.items() if mode in CHECKED]
    for some in [checked] if at_once else [[one] for one in checked]:
        others = [Measured(mode, spec, row) for mode, row in some]
        together(hold, others)
        for other in others:
            other.close()


def held(row: dict[str, Any], losses: list[list[float]], expected: list[list[float]]) -> None:
    """Fill in by how much losses differ from the loop's.

    Raises:
        RuntimeError: if it is too much.
    """
    row["difference"] = difference(losses, expected)
    if not row["difference"] < TOLERANCE:
        raise RuntimeError(f"losses differ from the loop's by more than {TOLERANCE:.0e}")


def together(work: Callable[[Measured], None], others: list[Measured]) -> None:
    """The same for several modes at once; what goes wrong is in their rows."""

    def one(other: Measured) -> None:
        with other.failing():
            work(other)

    with ThreadPoolExecutor(len(others) or 1) as pool:
        list(pool.map(one, others))


def alone(mode: str, spec: Spec, work: Callable[[Measured], T]) -> T:
    """What a process of its own answers."""
    other = Measured(mode, spec)
    try:
        return work(other)
    finally:
        other.close()


def room(device: str) -> int:
    """Free bytes; less than nothing, so that one mode starts at a time, where they cannot be read."""
    with contextlib.suppress(hfta.errors.StateError):
        return free_bytes(torch.device(device))
    return -1


def settings(spec: Spec) -> dict[str, Any]:
    """What rows that stand together have in common."""
    return {"batch_size": spec.batch_size, "device": spec.device, "amp": spec.amp, "loop": LOOP}


def begin(other: Measured, spec: Spec, reference: Reference) -> None:
    """Take a mode's first steps.

    Raises:
        RuntimeError: if it cannot, or its losses are not those of what it is held to.
    """
    other.row["first step"], losses = other.start()
    agree(other.mode, other.row, losses, spec, reference)


def agree(mode: str, row: dict[str, Any], losses: list[list[float]], spec: Spec, reference: Reference) -> None:
    """Hold the losses of a mode's first two steps to those of the eager array and of the loop; fills the row.

    Raises:
        RuntimeError: if they differ by too much.
    """
    if mode in COMPILED:
        allowed = COARSE if spec.amp or spec.device == "cuda" else ROUNDING
        row["difference"], after = map(difference, losses, reference.eager)
        if not (row["difference"] < allowed and after < MOVED):
            raise RuntimeError(f"losses differ from the eager array's by {row['difference']:.0e} and {after:.0e}")
    if mode not in UNLIKE:
        row["alike"] = difference([statistics.mean(losses[0])], [statistics.mean(reference.noisy[0])])
        if not row["alike"] < ALIKE:
            raise RuntimeError(f"first losses differ from the loop's by {row['alike']:.0%}")


def take_turns(loop: Measured, beside: list[Measured], least: Least, before: Callable[[], None] = lambda: None) -> None:
    """Fill rows: the loop and all others that have not failed, round by round, so that all see the same machine.

    ``before`` is called before each round; what it raises ends all of them, and no row has numbers.
    """
    times: dict[str, list[tuple[float, float, float]]] = {other.mode: [] for other in (loop, *beside)}
    spent = dict.fromkeys(times, 0.0)

    def turn(other: Measured, base: float | None, warm: bool) -> float:
        own, work = other.turn(warm, least.turn)
        if warm:
            times[other.mode].append((own, base or own, work))
            spent[other.mode] += own * other.calls
        return own

    done = 0
    while done < least.warmup + least.rounds or _short(spent, (loop, *beside), least.seconds):
        before()
        base = turn(loop, None, done >= least.warmup)
        for other in beside:
            if "error" not in other.row:
                with other.failing():
                    turn(other, base, done >= least.warmup)
        done += 1
    # Without the loop nothing goes on: its failure is not its row's alone.
    loop.row |= numbers(loop, times[SERIAL], spent[SERIAL], least.watch)
    for other in beside:
        if "error" not in other.row:
            with other.failing():
                other.row |= numbers(other, times[other.mode], spent[other.mode], least.watch)
    for other in beside:
        other.close()


def _short(spent: dict[str, float], modes: Iterable[Measured], seconds: float) -> bool:
    return any(spent[other.mode] < seconds for other in modes if "error" not in other.row)


def numbers(
    other: Measured, times: list[tuple[float, float, float]], spent: float, watch: float = WATCH
) -> dict[str, Any]:
    """What a row tells, from seconds of a step of the mode and of the loop, and of the processors meanwhile, by rounds."""
    own, base, work = zip(*times, strict=True)
    low, median, high = statistics.quantiles(own, n=4, method="inclusive")
    with watched(other.device) if watch else contextlib.nullcontext({}) as used:
        if other.device == "cuda" and watch:
            other.time(max(1, round(watch / median)))
    taken = other.ask("memory")
    return {
        "seconds": [low, median, high],
        "ratio": statistics.median(map(operator.truediv, base, own)),
        "busy": statistics.median(map(operator.truediv, work, own)) / (os.cpu_count() or 1),
        "gpu": used,
        "bytes": None if None in taken else sum(taken),
        "calls": other.calls,
        "rounds": len(own),
        "measured": spent,
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
    if args.hfta_source:
        # Every process finds the package there.
        path = str(args.hfta_source.resolve()), os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    wanted = args.modes or [mode for mode in MODES if mode != "HFTA" or args.hfta_source]
    least = Least(QUICK, 0.0) if args.quick else Least(args.rounds)
    results: dict[str, Any] = {}
    for name in args.workloads or WORKLOADS:
        modes = [mode for mode in MODES if mode in wanted and mode not in wrong and name not in NOT_FOR.get(mode, ())]
        for count in args.models:
            size = args.batch_size or batch_size(name, args.size, args.device)
            spec = Spec(name, args.size, count, size, args.device, args.amp)
            found = compare(spec, modes, least, args.verbose, args.at_once)
            if args.hfta_source and "HFTA" in found["rows"]:
                found["rows"]["HFTA"]["source"] = _code.commit(args.hfta_source, ("hfta",))
            if args.largest:
                found["largest"] = largest(spec._replace(num_models=1))
            results.setdefault(name, {})[str(count)] = found
            print(f"{show(name, args.size, count, found)}\n", flush=True)
            if args.json:
                save(args.json, name, str(count), found, args.replace)
    return results


def save(path: Path, name: str, count: str, found: dict[str, Any], replace: bool = False) -> None:
    """Put rows into a file of results in the place of those they measure again; of other settings, of all that are there.

    Where they ``replace`` those of other modes, these go too.
    """
    held = json.loads(path.read_text()) if path.exists() else {}
    old = held.setdefault(name, {}).get(count, {})
    if replace or any(found.get(key) != old.get(key) for key in ("batch_size", "device", "amp", "loop")):
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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"{ROUNDS} or more")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="all modes begin at the same time, where there are processors and memory for that; first steps take longer",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds of a step, to see that everything runs")
    parser.add_argument(
        "--hfta-source", type=Path, metavar="DIR", help="a checkout of the original HFTA, for that mode"
    )
    parser.add_argument("--verbose", action="store_true", help="print each mode as it is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to FILE")
    parser.add_argument("--replace", action="store_true", help="drop rows of modes that are not measured from FILE")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.rounds < ROUNDS or min(args.models) < 1 or (args.batch_size or 1) < 1:
        parser.error(f"at least 1 model, 1 sample and {ROUNDS} rounds are needed; --quick shows that everything runs")
    if args.quick and args.json and args.json.resolve().is_relative_to(RESULTS):
        parser.error("--quick: its figures rest on too little for the committed results; leave out --json")
    if args.hfta_source and not (args.hfta_source / "hfta" / "ops").is_dir():
        parser.error(f"--hfta-source: {args.hfta_source} has no folder hfta/ops")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print, and say whether every mode could be measured."""
    results = measure(parse(argv))
    rows = [row for counts in results.values() for found in counts.values() for row in found["rows"].values()]
    return int(any("error" in row for row in rows))
