"""Tables and figures of committed results: the README's section on speed, and one picture for each device and size."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[plot]'") from None

from benchmarks._measure import ROOT
from benchmarks.modes import MODES, SERIAL
from benchmarks.sweep import UNLIKE
from benchmarks.workloads import WORKLOADS
from hfta_func.plot import COLORS

RESULTS, DOCS, README = ROOT / "benchmarks" / "results", ROOT / "docs", ROOT / "README.md"
TIMES = "\N{MULTIPLICATION SIGN}"
BEGIN, END = "<!-- made by python -m benchmarks report -->", "<!-- end -->"
ARRAY = [mode for mode in MODES if mode.startswith("array")]
STOCK = [mode for mode in MODES if mode.startswith("stock")]
TITLES = {
    "cpu-small": "On a CPU, small versions",
    "cpu-paper": "On a CPU, published sizes",
    "cuda-small": "On a GPU, small versions",
    "cuda-paper": "On a GPU, published sizes",
    "cuda-paper-bf16": "On a GPU, published sizes in bfloat16",
}
FINE = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)
STYLES = {
    "array": (COLORS[0], "-"),
    "array compiled": (COLORS[0], "--"),
    "array CUDA graph": (COLORS[0], ":"),
    "stock vmap": (COLORS[1], "-"),
    "stock vmap compiled": (COLORS[1], "--"),
    "processes": (COLORS[2], "-"),
    "serial compiled": (COLORS[3], "--"),
    "serial, default allocator": (COLORS[4], "-"),
    "dense": ("0.6", "-"),
    "JAX": (COLORS[5], "-"),
    "HFTA": (COLORS[6], "-"),
}


def ratio(rows: dict[str, Any], modes: Sequence[str]) -> float | None:
    """The best of these modes that was measured and agreed with the loop."""
    return max((rows[mode]["ratio"] for mode in modes if _counts(mode, rows.get(mode, {}))), default=None)


def _counts(mode: str, row: dict[str, Any]) -> bool:
    return "ratio" in row and (mode in (SERIAL, *UNLIKE) or "alike" in row)


def tables(results: dict[str, dict[str, Any]]) -> str:
    """The section: a table for each file of results, by its name."""
    return "\n\n".join(_section(key, results[key]) for key in TITLES if key in results)


COLUMNS = {
    "array": ["array"],
    "compiled": ["array compiled"],
    "CUDA graph": ["array CUDA graph"],
    "stock `vmap`": STOCK,
    "processes": ["processes"],
    "HFTA": ["HFTA"],
    "JAX": ["JAX"],
    "dense": ["dense"],
}


def _section(key: str, found: dict[str, Any]) -> str:
    head = ["workload", f"M {TIMES} N", *COLUMNS, "memory", "compiling", "SMs", "fit"]
    lines = []
    for name in WORKLOADS:
        if name not in found:
            continue
        count = max(found[name], key=int)
        own = found[name][count]
        rows = own["rows"]
        cells = [ratio(rows, modes) for modes in COLUMNS.values()]
        lines.append(
            [WORKLOADS[name].title, f"{count} {TIMES} {own['batch_size']}"]
            + ["" if cell is None else f"{cell:.1f}{TIMES}" if cell >= 1.95 else f"{cell:.2f}{TIMES}" for cell in cells]
            + [_memory(rows), _compiling(rows), _busy(rows), f"{own['largest']}" if own.get("largest") else ""]
        )
    shown = [i for i in range(len(head)) if any(line[i] for line in lines)]
    rows = ["| " + " | ".join(line[i] for i in shown) + " |" for line in (head, ["---"] * len(head), *lines)]
    figure = f"![Speed-up over the number of models](docs/speed-{key}.png)"
    return f"**{TITLES[key]}** ({_machines(found)})\n\n" + "\n".join(rows) + f"\n\n{figure}"


def _machines(found: dict[str, Any]) -> str:
    every = [row["machine"] for counts in found.values() for own in counts.values() for row in own["rows"].values()]
    names = {}
    for one in every:
        where = one.get("gpu") or f"{one['cpu']}, {one['threads']} cores"
        names[f"{where}, PyTorch {one['torch'].split('+')[0]}"] = None
    return "; ".join(names)


def _busy(rows: dict[str, Any]) -> str:
    shares = [rows[mode]["gpu"]["sm"] for mode in (SERIAL, *ARRAY) if "sm" in rows.get(mode, {}).get("gpu", {})]
    return " / ".join(f"{share:.0%}" for share in shares)


def _memory(rows: dict[str, Any]) -> str:
    base = rows.get(SERIAL, {}).get("bytes")
    own = [rows[mode]["bytes"] / base for mode in ARRAY if base and _counts(mode, rows.get(mode, {}))]
    return " / ".join(f"{value:.2f}" for value in own)


def _compiling(rows: dict[str, Any]) -> str:
    row = rows.get("array compiled", {})
    return f"{row['first step']:.0f} s" if _counts("array compiled", row) else ""


def picture(found: dict[str, Any]) -> Figure:
    """Speed relative to the loop over M, a panel for each workload."""
    names = [name for name in WORKLOADS if name in found]
    columns = min(4, len(names))
    height = -(-len(names) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.5 * height + 0.5), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flat
    shown = {}
    for name, ax in zip(names, axes, strict=False):
        counts = sorted(map(int, found[name]))
        for mode, (color, line) in STYLES.items():
            points = [(m, ratio(found[name][str(m)]["rows"], [mode])) for m in counts]
            points = [point for point in points if point[1] is not None]
            if points:
                style = {"color": color, "linestyle": line, "linewidth": 1.4, "markersize": 4}
                # Told apart without lines too.
                style |= {"marker": "o"} if line == "-" else {"marker": "D", "markerfacecolor": "white"}
                (shown[mode],) = ax.plot(*zip(*points, strict=True), **style)
        ax.axhline(1, color="0.3", linewidth=0.7)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(counts, map(str, counts))
        low, high = ax.get_ylim()
        ticks = [2.0**power for power in range(-4, 8) if low <= 2.0**power <= high]
        if len(ticks) < 3:
            ticks = [tick for tick in FINE if low <= tick <= high]
        ax.set_yticks(ticks, [f"{tick:g}{TIMES}" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("models M", fontsize=8)
        ax.set_title(f"{WORKLOADS[name].title}, N = {found[name][str(counts[0])]['batch_size']}", fontsize=9)
        ax.grid(color="0.92", linewidth=0.7)
        ax.tick_params(labelsize=8, color="0.4")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes):
        ax.set_visible(False)
    figure.supylabel("speed relative to the serial loop", fontsize=9)
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=min(5, columns + 1), frameon=False, fontsize=8
    )
    return figure


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All files of results there are."""
    paths = {key: folder / f"{key}.json" for key in TITLES}
    return {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}


def replaced(readme: str, section: str) -> str:
    """The text with another section in the place of the old one."""
    return re.sub(f"(?s){re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n\n{section}\n\n{END}", readme)


def main(argv: Sequence[str] = ()) -> int:
    """Write the README's section and the pictures."""
    argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__).parse_args(argv)
    found = results()
    README.write_text(replaced(README.read_text(), tables(found)))
    for key, own in found.items():
        picture(own).savefig(DOCS / f"speed-{key}.png", dpi=110)
        print(f"docs/speed-{key}.png")
    return 0
