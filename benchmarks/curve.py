"""From one model to a thousand: time and memory of a member, and seconds to the first and the hundredth step, over M.

Every cell, a way to train M models, runs in a process of its own and is written to the file of results at once: a run that
was interrupted goes on with the cells that have no row of this commit. ``python -m benchmarks curve``.

Each way takes turns with a loop, and a time is that of all loops at this M, divided by how many times as fast the way was in
its turns: other programs on the machine slow down both. The loop trains at most 64 models. Where there are more, its time and
memory are those of 64, scaled up. This favours the loop, as the tensors of a thousand models would not stay in the caches.
Agents are trained by PPO, where a step is an iteration: a rollout of 128 steps in 4 environments and 16 updates; their loop
is a plain script in a process per core, and ways take no turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[plot]'") from None

from benchmarks import _code, rl
from benchmarks._child import Late
from benchmarks._measure import RESULTS, budget_seconds, machine, table
from benchmarks._processes import Measured
from benchmarks._tables import STYLES, TIMES, markdown, where
from benchmarks.modes import IN_FIT, NOT_FOR, SERIAL
from benchmarks.sweep import ALIKE, difference
from benchmarks.workloads import Spec, batch_size

KEY, PICTURE = "curve-cpu", "curve.png"
AGENTS = "agents"
TITLES = {"mlp": "MLP", "lenet": "LeNet-5", "transformer": "Transformer", AGENTS: "Agents (PPO)"}
MODELS = (1, 4, 16, 64, 256, 1024)
WAYS = {
    SERIAL: "processes",
    "stock vmap": None,
    "stock vmap compiled": None,
    IN_FIT: "replayed",
    "array compiled": "compiled",
    "JAX": "JAX",
}
"""The ways by their modes, with the names that they have for agents."""
HEADS = {
    SERIAL: "loop",
    "stock vmap": "stock `vmap`",
    "stock vmap compiled": "stock, compiled",
    IN_FIT: "array in `fit`",
    "array compiled": "array, compiled",
    "JAX": "JAX",
}
MOST, COMPARED = 64, 64
"""Models that the loop trains at most, and whose first losses are compared."""
STEPS, PATIENCE, LIMIT = 100, 30.0, 600.0
"""Steps whose end is timed, seconds after which the rest count like the last ones, and seconds that an answer may take."""
ROUNDS = 9


TIME = "Milliseconds of a step for a member:"
CONTENTS = {
    TIME: lambda rows, way, models: _number(1e3 * seconds(rows, way) / models),
    "MiB of tensors for a member, at the peak of a step:": lambda rows, way, models: _number(
        (rows[way]["bytes"] or 0) / models / 2**20
    ),
    "Seconds to the first / the hundredth step:": lambda rows, way, _: (
        f"{_number(rows[way]['first'])} / {_number(rows[way]['hundredth'])}"
    ),
}
"""The tables by their titles: what a cell says of a way and the rows of an M."""


class Cell(NamedTuple):
    """A way to train M models of a workload."""

    workload: str
    num_models: int
    way: str


def cells(workloads: Sequence[str], models: Sequence[int], ways: Sequence[str]) -> Iterator[Cell]:
    """All that there are."""
    for name in workloads:
        for count in models:
            for way in ways:
                exists = WAYS[way] is not None if name == AGENTS else name not in NOT_FOR.get(way, ())
                if exists:
                    yield Cell(name, count, way)


def measured(cell: Cell, rounds: int) -> dict[str, Any]:
    """The row of a cell: seconds of a step by quartiles, the loop's in the same turns, bytes, and seconds to some steps."""
    return (_agents if cell.workload == AGENTS else _models)(cell, rounds)


def _models(cell: Cell, rounds: int) -> dict[str, Any]:
    count = min(cell.num_models, MOST) if cell.way == SERIAL else cell.num_models
    spec = Spec(cell.workload, "small", count, batch_size(cell.workload, "small", "cpu"))
    scale, other = cell.num_models / count, Measured(cell.way, spec, patience=LIMIT, grace=5.0)
    rivals = (
        [] if cell.way == SERIAL else [Measured(SERIAL, spec._replace(num_models=min(count, MOST)), patience=LIMIT)]
    )
    try:
        ((first, last, losses, each),) = other.ask("reach", STEPS, PATIENCE)
        for rival in rivals:
            ((*_, alone),) = rival.ask("reach", 5, PATIENCE)
            rival.calls = max(1, round(0.3 / alone))
        other.calls = max(1, round(0.3 / each))
        # Where a step takes long, fewer are enough.
        rounds = max(2, min(rounds, round(PATIENCE / max(0.3, each))))
        turns = [[one.time(one.calls) for one in (other, *rivals)] for _ in range(rounds)]
        (memory,) = other.ask("memory")
        (least,) = other.ask("roofline") if cell.way == SERIAL else [None]
    finally:
        for one in (other, *rivals):
            one.close()
    times, taken = zip(*(turn[0] for turn in turns), strict=True)
    # What a process does once, such as imports of an optimizer, takes as long for any number of models.
    begun = first + (scale - 1) * each
    row = {"seconds": [scale * value for value in _quartiles(times)], "processors": scale * statistics.median(taken)}
    if rivals:
        loops = [turn[1][0] * count / min(count, MOST) for turn in turns]
        row |= {"loop": statistics.median(loops)}
        row |= {"ratios": _quartiles([one / took for one, took in zip(loops, times, strict=True)])}
    row |= {"first": begun, "hundredth": begun + scale * (last - first), "bytes": memory and scale * memory}
    return row | {"trained": count, "loss": statistics.fmean(losses[:COMPARED]), "rounds": rounds, "roofline": least}


def seconds(rows: dict[str, Any], way: str) -> float:
    """Of a step of all models: those of the loop in all turns at this M, over the ratio of a way in its own."""
    loops = [row["loop"] for row in rows.values() if "loop" in row]
    if not loops or not (way == SERIAL or "ratios" in rows[way]):
        return rows[way]["seconds"][1]
    return statistics.median(loops) / (1 if way == SERIAL else rows[way]["ratios"][1])


def _agents(cell: Cell, rounds: int) -> dict[str, Any]:
    way = str(WAYS[cell.way])
    iterations = rl.length(way, cell.num_models, 64, 0, quick=False)
    timed = rl.Timed(way, cell.num_models, 64, "cpu", iterations)
    # A graph is compiled for a number of iterations.
    is_graph = way not in (*rl.PLAIN, "replayed")
    try:
        timed.ready()
        for turn in range(2 + min(rounds, 3)):
            timed.turn(None if turn or is_graph else 1, LIMIT)
    finally:
        timed.close()
    # In the first turn but one steps are still recorded. A script trains other agents at every turn, one on each core.
    begun, *rates = [cell.num_models * rl.PER_ITERATION / rate for rate in timed.rates]
    seconds = _quartiles(rates)
    first = max(timed.first - is_graph * (iterations - 1) * seconds[1], seconds[1])
    first = seconds[1] if way in rl.PLAIN else first
    recorded = iterations * max(0.0, begun - seconds[1]) if way == "replayed" else 0.0
    row = {"seconds": seconds, "first": first, "bytes": None}
    row |= {"hundredth": first + recorded + (STEPS - 1) * seconds[1]}
    return row | {"trained": timed.agents, "rounds": len(timed.rates)}


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]


def row_of(cell: Cell, rounds: int, loop: dict[str, Any] | None) -> dict[str, Any]:
    """A row with all that it rests on, or with what went wrong."""
    code = _code.code(cell.way) if cell.workload != AGENTS else _code.code_of("rl/__init__", *_code.STEP)
    row = {"machine": machine(), **_code.commit(), "code": code}
    begin = time.perf_counter()
    try:
        row |= measured(cell, rounds)
    except (RuntimeError, Late) as error:
        row["error"] = str(error)
    if loop and "loss" in row and "loss" in loop:
        row["alike"] = difference([row["loss"]], [loop["loss"]])
        if not row["alike"] < ALIKE:
            row["error"] = f"first losses differ from the loop's by {row['alike']:.0%}"
    return row | {"took": time.perf_counter() - begin}


def is_done(row: dict[str, Any], today: dict[str, Any]) -> bool:
    """Whether a row was measured with today's commit, on this machine."""
    same_code = all(row.get(key) == today.get(key) for key in ("commit", "dirty"))
    return same_code and row.get("machine", row).get("cpu") == today["cpu"]


def rows_of(found: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """Where a cell's row stands."""
    return found.setdefault(cell.workload, {}).setdefault(str(cell.num_models), {}).setdefault("rows", {})


def measure(args: argparse.Namespace) -> list[Cell]:
    """Measure cells that have no row of today, as long as the budget lasts; returns those that are left."""
    today, end = _code.stamp(), time.monotonic() + args.budget
    left: list[Cell] = []
    for cell in cells(args.workloads, args.models, args.ways):
        found = json.loads(args.json.read_text()) if args.json.exists() else {}
        rows = rows_of(found, cell)
        if not args.again and is_done(rows.get(cell.way, {}), today):
            continue
        if time.monotonic() >= end:
            left.append(cell)
            continue
        rows[cell.way] = row = row_of(cell, args.rounds, rows.get(SERIAL))
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(
            "  ".join([f"{TITLES[cell.workload]:12} M = {cell.num_models:<5} {cell.way:20}", *_said(cell, row)]),
            flush=True,
        )
    return left


def _said(cell: Cell, row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["error"][:80]]
    return [
        f"{1e3 * row['seconds'][1] / cell.num_models:9.3f} ms a member",
        f"{row['ratios'][1]:6.2f}{TIMES}" if "ratios" in row else "",
        "" if row["bytes"] is None else f"{row['bytes'] / cell.num_models / 2**20:8.2f} MiB a member",
        f"first step {row['first']:6.1f} s, hundredth {row['hundredth']:6.1f} s, took {row['took']:.0f} s",
    ]


def tables(found: dict[str, Any]) -> str:
    """The tables of the benchmarks page: a row for each workload and M."""
    parts = []
    for title, cell in CONTENTS.items():
        lines = []
        for name in TITLES:
            for count in sorted(found.get(name, {}), key=int):
                rows = found[name][count]["rows"]
                texts = [cell(rows, way, int(count)) if _counts(rows.get(way, {})) else "" for way in WAYS]
                least = roofline(found[name]) if title == TIME else None
                lines.append([TITLES[name], f"{int(count):,}", *texts, _number(1e3 * least) if least else ""])
        shown = [line for line in lines if any(line[2:])]
        parts.append(f"{title}\n\n{markdown(['', 'M', *(HEADS[way] for way in WAYS), 'roofline'], shown)}")
    return "\n\n".join(
        [*parts, _rests(found), f"[![Milliseconds of a step for a member, over M]({PICTURE})]({PICTURE})"]
    )


def _counts(row: dict[str, Any]) -> bool:
    return "seconds" in row and "error" not in row


def _number(value: float) -> str:
    return "" if not value else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _rests(found: dict[str, Any]) -> str:
    rows = [row for sizes in found.values() for part in sizes.values() for row in part["rows"].values()]
    return where([{**row["machine"], **row} for row in rows if _counts(row)])


def roofline(sizes: dict[str, Any]) -> float | None:
    """The least seconds of a member's step, if it was measured."""
    found = [part["rows"].get(SERIAL, {}).get("roofline") for part in sizes.values()]
    return min((one["seconds"] for one in found if one), default=None)


def picture(found: dict[str, Any]) -> Figure:
    """Milliseconds of a step for a member over M, a panel for each workload; the dotted line is the roofline."""
    names = [name for name in TITLES if name in found]
    figure = Figure(figsize=(2.9 * len(names), 3.1), layout="constrained")
    drawn: dict[str, Any] = {}
    for name, ax in zip(names, figure.subplots(1, len(names), squeeze=False).flat, strict=True):
        counts = sorted(map(int, found[name]))
        for way in WAYS:
            rows = {m: found[name][str(m)]["rows"] for m in counts}
            points = [(m, 1e3 * seconds(row, way) / m) for m, row in rows.items() if _counts(row.get(way, {}))]
            if points:
                color, line = STYLES[way]
                marker = {"marker": "o"} if line == "-" else {"marker": "D", "markerfacecolor": "white"}
                (drawn[HEADS[way].replace("`", "")],) = ax.plot(
                    *zip(*points, strict=True), color=color, linestyle=line, linewidth=1.4, markersize=4, **marker
                )
        if (least := roofline(found[name])) is not None:
            drawn["roofline"] = ax.axhline(1e3 * least, color="0.4", linestyle=":", linewidth=1.0)
        ax.set_xscale("log", base=4)
        ax.set_yscale("log")
        ax.set_xticks(counts, [f"{count:,}" for count in counts])
        ax.minorticks_off()
        ax.set_xlabel("models M", fontsize=8)
        ax.set_title(TITLES[name], fontsize=9)
        ax.grid(color="0.92", linewidth=0.7)
        ax.tick_params(labelsize=8, color="0.4")
        ax.spines[["top", "right"]].set_visible(False)
    figure.supylabel("ms of a step for a member", fontsize=9)
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=len(drawn), frameon=False, fontsize=8)
    return figure


def show(found: dict[str, Any]) -> str:
    """Time of a member at the largest M over that at a quarter of it, which tells of a cliff, and over the roofline."""
    lines = []
    for name, sizes in found.items():
        for way in WAYS:
            each = {
                int(m): seconds(part["rows"], way) / int(m)
                for m, part in sizes.items()
                if _counts(part["rows"].get(way, {}))
            }
            most = max(each, default=0)
            if most // 4 in each:
                least = roofline(sizes)
                over = f"{each[most] / least:.2f}{TIMES}" if least else ""
                lines.append([TITLES[name], way, f"{most:,}", f"{each[most] / each[most // 4]:.2f}{TIMES}", over])
    return table(["", "way", "M", "a member's time over M / 4", "over roofline"], lines)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and say whether all could be measured; the status is 2 if the budget ended before."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks curve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*TITLES], default=[*TITLES])
    parser.add_argument("--models", nargs="+", type=int, default=[*MODELS], help="numbers of models")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument(
        "--budget", type=budget_seconds, default=math.inf, help="no cell begins after it, such as 90m or 2h"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of a step, of which the median counts")
    parser.add_argument("--again", action="store_true", help="measure cells that have a row of today's commit, too")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=RESULTS / f"{KEY}.json", help="add the numbers to FILE"
    )
    args = parser.parse_args(argv)
    left = measure(args)
    found = json.loads(args.json.read_text()) if args.json.exists() else {}
    print(f"\n{show(found)}", flush=True)
    if left:
        print(f"{len(left)} cells are left; the same command goes on")
        return 2
    # A peer may come to no end.
    own = (cell for cell in cells(args.workloads, args.models, args.ways) if cell.way != "JAX")
    return int(any("error" in rows_of(found, cell).get(cell.way, {}) for cell in own))
