"""How long training takes from its start to some number of steps, compiling included: ``python -m benchmarks reach``.

From the rows of a sweep: the seconds of the first step, which makes the models and compiles, and of a step after that. The
start of Python and imports are in no row.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[plot]'") from None

from benchmarks._measure import RESULTS, ROOT
from benchmarks._tables import ARRAY, STYLES, TIMES, counts, markdown
from benchmarks.modes import IN_FIT, PER_CORE, PROCESSES, SERIAL
from benchmarks.workloads import WORKLOADS

KEY = "cpu-small"
STEPS = (50, 500, 5000)
SHOWN = (
    SERIAL,
    "serial compiled",
    PROCESSES,
    PER_CORE,
    "stock vmap compiled",
    "JAX",
    *ARRAY,
)
HEADS = {
    SERIAL: "loop",
    "serial compiled": "loop, compiled",
    "stock vmap compiled": "stock `vmap`, compiled",
    "array compiled": "compiled",
}


def seconds(row: dict[str, Any], steps: float) -> float:
    """From the start to the end of a step; where a loop's first one was not recorded, it was like all others."""
    _, each, _ = row["seconds"]
    return row.get("first step", each) + (steps - 1) * each


def pays(rows: dict[str, Any], mode: str, other: str) -> int | None:
    """The first step at whose end a mode is ahead of another and stays there, if there is one."""
    (_, each, _), (_, others, _) = rows[mode]["seconds"], rows[other]["seconds"]
    lost = seconds(rows[mode], 1) - seconds(rows[other], 1)
    if each >= others:
        return None
    return max(1, math.floor(lost / (others - each)) + 2)


def chosen(sizes: dict[str, Any]) -> str:
    """The number of models at which steps as in ``fit`` and most of the modes were measured; the largest of several."""
    return max(sizes, key=lambda count: (IN_FIT in _rows(sizes[count]), len(_rows(sizes[count])), int(count)))


def _rows(part: dict[str, Any]) -> dict[str, Any]:
    """The modes that were measured on the processor of the loop, as seconds of others cannot stand beside it."""
    rows = {mode: part["rows"][mode] for mode in SHOWN if counts(mode, part["rows"].get(mode, {}))}
    cpus = {mode: row.get("machine", {}).get("cpu") for mode, row in rows.items()}
    return {mode: row for mode, row in rows.items() if cpus[mode] == cpus.get(SERIAL)}


def reached(found: dict[str, Any]) -> str:
    """The table, with the shortest time of each row in bold."""
    lines = []
    for name in WORKLOADS:
        if name in found:
            count = chosen(found[name])
            rows = _rows(found[name][count])
            title = WORKLOADS[name].title, f"{count} {TIMES} {found[name][count]['batch_size']}"
            both = "array" in rows and "array compiled" in rows
            ahead = [_number(pays(rows, "array compiled", other)) for other in ("array", SERIAL)] if both else []
            for steps in STEPS:
                best = min(rows, key=lambda mode: seconds(rows[mode], steps))
                cells = [_duration(seconds(rows[mode], steps), mode == best) if mode in rows else "" for mode in SHOWN]
                lines.append([*title, f"{steps:,}", *cells, " / ".join(ahead)])
                title, ahead = ("", ""), []
    head = ["workload", f"M {TIMES} N", "steps", *(HEADS.get(mode, mode) for mode in SHOWN), "compiling pays"]
    return markdown(head, lines)


def _number(step: int | None) -> str:
    return "never" if step is None else f"{step:,}"


def _duration(value: float, best: bool) -> str:
    text = f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"
    return f"**{text}**" if best else text


def picture(found: dict[str, Any]) -> Figure:
    """Seconds over steps, a panel for each workload; a dotted line where the compiled array overtakes the eager one."""
    names = [name for name in WORKLOADS if name in found]
    columns = min(4, len(names))
    height = -(-len(names) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.5 * height + 0.5), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flat
    steps, shown = [10 ** (power / 10) for power in range(51)], {}
    for name, ax in zip(names, axes, strict=False):
        count = chosen(found[name])
        rows = _rows(found[name][count])
        for mode, row in rows.items():
            color, line = STYLES[mode]
            (shown[mode],) = ax.plot(steps, [seconds(row, step) for step in steps], color=color, ls=line, lw=1.4)
        both = "array" in rows and "array compiled" in rows
        if both and (step := pays(rows, "array compiled", "array")) is not None:
            ax.axvline(step, color="0.5", linestyle=":", linewidth=0.9)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("steps", fontsize=8)
        ax.set_title(f"{WORKLOADS[name].title}, M = {count}", fontsize=9)
        ax.grid(color="0.92", linewidth=0.7)
        ax.tick_params(labelsize=8, color="0.4")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes):
        ax.set_visible(False)
    figure.supylabel("seconds from the start", fontsize=9)
    handles = [shown[mode] for mode in SHOWN if mode in shown]
    labels = [mode for mode in SHOWN if mode in shown]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, columns + 1), frameon=False, fontsize=8)
    return figure


def main(argv: Sequence[str] = ()) -> int:
    """Print the table and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reach", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / f"{KEY}.json", metavar="FILE", help="of a sweep")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="docs/reach-<name of the results>.png by default")
    args = parser.parse_args(argv)
    found = json.loads(args.results.read_text())
    print(reached(found))
    path = args.picture or ROOT / "docs" / f"reach-{args.results.stem}.png"
    picture(found).savefig(path, dpi=110)
    print(f"\n{path}")
    return 0
