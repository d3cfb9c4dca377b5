"""Tables and figures of committed results: the documentation's page on speed with its pictures, and README's table."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[plot]'") from None

from benchmarks import _code, curve, reach, readme
from benchmarks._measure import RESULTS, ROOT
from benchmarks._tables import (
    ARRAY,
    LOOPS,
    NAMES,
    STOCK,
    STYLES,
    TIMES,
    about,
    counts,
    mark,
    markdown,
    measured,
    ratio,
    shown,
    times,
    unmarked,
    where,
)
from benchmarks.adapters import BASES
from benchmarks.gpu import ledger
from benchmarks.gpu import tables as gpu
from benchmarks.modes import IN_FIT, MANY, PER_CORE, PROCESSES, REPLAYED, SERIAL, WORKERS
from benchmarks.ops import ratio as op_ratio
from benchmarks.optim import M_SOLO
from benchmarks.workloads import WORKLOADS

DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks.md"
BEGIN = "<!-- sweeps, made by python -m benchmarks report -->"
UPDATES = "<!-- updates, made by python -m benchmarks report -->"
PREDICTIONS = "<!-- predictions, made by python -m benchmarks report -->"
OPERATORS = "<!-- operators, made by python -m benchmarks report -->"
STUDIES = "<!-- studies, made by python -m benchmarks report -->"
FAMILIES = "<!-- short runs, made by python -m benchmarks report -->"
RECURRENT = "<!-- recurrent, made by python -m benchmarks report -->"
ENSEMBLES = "<!-- ensembles, made by python -m benchmarks report -->"
ADAPTERS = "<!-- adapters, made by python -m benchmarks report -->"
AGENTS = "<!-- agents, made by python -m benchmarks report -->"
MEMORY = "<!-- memory, made by python -m benchmarks report -->"
BEST = "<!-- the best of each, made by python -m benchmarks report -->"
GPUS = "<!-- GPUs, made by python -m benchmarks report -->"
TO_STEPS = "<!-- time to some steps, made by python -m benchmarks report -->"
CURVE = "<!-- one to a thousand, made by python -m benchmarks report -->"
UNCOMPILED = "<!-- without a compiler, made by python -m benchmarks report -->"
NOTHING = "Not measured yet."
TITLES = {
    "cpu-small": "On a CPU, small versions",
    "cpu-paper": "On a CPU, published sizes",
}
UNCOMPILED_OTHERS = SERIAL, "stock vmap", "HFTA", PROCESSES, PER_CORE
FINE = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)


def tables(results: dict[str, dict[str, Any]]) -> str:
    """The tables of the sweeps, by the names of their files."""
    return "\n\n".join(_section(key, found) for key, found in results.items())


COLUMNS = {
    "array": ["array"],
    "array, auto": ["array auto"],
    "array in `fit`": [IN_FIT],
    "array per core": [WORKERS[0]],
    "compiled": ["array compiled"],
    "compiled, CUDA graph": [REPLAYED[1]],
    "compiled, 8 steps a call": [MANY],
    "compiled, per core": [WORKERS[1]],
    "stock `vmap`": STOCK,
    "other loops": LOOPS,
    "loop, compiled": ["serial compiled"],
    "loop, CUDA graphs": [REPLAYED[0]],
    "processes": [PROCESSES, PER_CORE],
    "HFTA": ["HFTA"],
    "JAX": ["JAX"],
    "dense": ["dense"],
}


def _section(key: str, found: dict[str, Any]) -> str:
    every = [own for sizes in found.values() for own in sizes.values()]
    pairs = [(name, count) for name in WORKLOADS if name in found for count in shown(found[name])]
    largest = [(name, count) for name, count in pairs if count == max(found[name], key=int)]
    # Where the largest array was measured against all of them, one table says everything.
    others = [pair for pair in pairs if pair not in largest]
    parts = [
        f"### {TITLES.get(key) or gpu.title(found)}",
        about(every, f"{_machines(found)}; "),
        _table(found, largest),
    ]
    if others:
        parts += ["Smaller arrays that were compared with at least as many alternatives:", _table(found, others)]
    parts += ["Eager / compiled, over the number of models:", _growth(found)]
    return "\n\n".join([*parts, f"[![Speed-up over the number of models, {key}](speed-{key}.png)](speed-{key}.png)"])


def _table(found: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> str:
    head = ["workload", f"M {TIMES} N", *COLUMNS, "memory", "compiling", "SMs", "fit"]
    lines, every = [], [own for sizes in found.values() for own in sizes.values()]
    for name, count in pairs:
        own = found[name][count]
        rows = own["rows"]
        lines.append(
            [WORKLOADS[name].title + mark(own, every), f"{count} {TIMES} {own['batch_size']}"]
            + [times(ratio(rows, modes)) for modes in COLUMNS.values()]
            + [_memory(rows), _compiling(rows), _busy(rows), f"{own['largest']}" if own.get("largest") else ""]
        )
    return markdown(head, lines)


def _growth(found: dict[str, Any]) -> str:
    counts = sorted({int(count) for sizes in found.values() for count in sizes})
    lines = []
    for name in WORKLOADS:
        if name in found:
            own = [found[name].get(str(count), {"rows": {}})["rows"] for count in counts]
            cells = [[times(ratio(rows, [mode])) for mode in ("array", "array compiled")] for rows in own]
            lines.append([WORKLOADS[name].title, *(" / ".join(filter(None, pair)) for pair in cells)])
    return markdown(["workload", *(f"M = {count}" for count in counts)], lines)


def updates(found: dict[str, Any]) -> str:
    """The table of optimizer updates, against one PyTorch optimizer per model."""
    rows = {name.removeprefix("mlp, "): name for name in found["optim"] if name.startswith("mlp, ")}
    lines = []
    for name, mlp in rows.items():
        both = [found["optim"][title] for title in (mlp, f"resnet18, {name}") if title in found["optim"]]
        if len(both) == 2 and all(one["agrees"] and one["ratios"]["array"] for one in both):
            modes = ("array, donated", "array, compiled")
            cells = [one["ratios"].get(mode, {}).get(M_SOLO) for one in both for mode in modes]
            lines.append([name, *map(times, cells)])
    head = ["update", *(f"{m} {mode}" for m in ("32 MLPs,", "4 ResNet-18,") for mode in ("eager", "compiled"))]
    return "\n\n".join([markdown(head, lines), *([_where(found)] if "machine" in found else [])])


def studies(found: dict[str, Any]) -> str:
    """The table of a study in every way to run it."""
    ways, added = found["tune"], statistics.median(found["overhead"])
    lines = [
        [
            *(name, f"{statistics.median(way['seconds']):.1f}"),
            *(times(way["ratio"]) if way["ratio"] != 1 else "", f"{way['best']:.3f}"),
        ]
        for name, way in ways.items()
    ]
    rests = (
        f"{_where(found)[:-1]}, "
        f"{len(ways['arrays']['seconds'])} rounds. A study adds {added:.1%} to its steps (median of "
        f"{len(found['overhead'])} pairs of runs)."
    )
    return f"{markdown(['way', 'seconds', 'arrays are faster by', 'best accuracy'], lines)}\n\n{rests}"


def ensembles(found: dict[str, Any]) -> str:
    """The table of ensembles and critics: how many times as fast as the loop each way is."""
    ways = list(dict.fromkeys(way for row in found["ensembles"].values() for way in row))[1:]
    lines = []
    for name, row in found["ensembles"].items():
        cells = [times(row[way]["ratio"]) if way in row and row[way]["agrees"] else "" for way in ways]
        lines.append([name, f"{row['loop']['rate']:.0f}", *cells])
    return f"{markdown(['', 'loop, calls a second', *ways], lines)}\n\n{_where(found)}"


def families(found: dict[str, Any]) -> str:
    """The table of short runs: the loop's time over that of ``fit``, of later runs, and of the first one if that is short."""
    cells: dict[str, dict[str, str]] = {}
    for key, row in found["families"].items():
        name, _, case = key.rpartition(": ")
        first = f" ({row['first']:.2f})" if case.endswith(" 40 steps") else ""
        cells.setdefault(name, {})[case] = f"{row['ratio']:.2f}{first}"
    every = {case for row in cells.values() for case in row}
    cases = sorted(every, key=lambda case: ("threads" in case, *map(int, re.findall(r"\d+", case))))
    lines = [[name, *(row.get(case, "") for case in cases)] for name, row in cells.items()]
    return f"{markdown(['network', *cases], lines)}\n\n{_where(found)}"


def recurrent(found: dict[str, Any]) -> str:
    """The table of recurrent networks: how many times as fast as the loop a step is eagerly, replayed, and in ``fit``."""
    cells: dict[str, dict[str, str]] = {}
    for key, row in found["recurrent"].items():
        name, _, case = key.rpartition(": ")
        ratios = (f"{row[way]:.1f}" if row[way] >= 2 else f"{row[way]:.2f}" for way in ("eager", "replayed", "fit"))
        cells.setdefault(name, {})[case] = " / ".join(ratios)
    cases = list(dict.fromkeys(case for row in cells.values() for case in row))
    lines = [[name, *(row.get(case, "") for case in cases)] for name, row in cells.items()]
    return f"{markdown(['eager / replayed / fit', *cases], lines)}\n\n{_where(found)}"


def adapters(found: dict[str, Any]) -> str:
    """The table of adapters over one base: speed and memory of each way, against a loop over models that share the base."""
    lines = []
    for name, one in found["adapters"].items():
        base, count, batch, length = name.split()
        layers, width, _ = BASES[base]
        job = f"{layers} layers {TIMES} {width}, {count} adapters, {batch} {TIMES} {length} tokens each"
        for way, row in one["ways"].items():
            if way != "loop" and row["agrees"]:
                lines.append(
                    [
                        *(job, way, times(row["ratio"])),
                        *(f"{row['held'] / 2**20:.0f} MiB", f"{(row['held'] + row['peak']) / row['allowed']:.2f}"),
                    ]
                )
    head = ["base and batches", "way", "over the loop", "held", "memory / (base + M adapters alone)"]
    return f"{markdown(head, lines)}\n\n{_where(found)}"


def memory(found: dict[str, Any]) -> str:
    """The table of steps that keep less for the backward pass: time and memory over those of one that keeps everything."""
    ways = list(dict.fromkeys(way for row in found["memory"].values() for way in row))[1:]
    lines = []
    for name, row in found["memory"].items():
        workload, size, count, batch = name.split()
        kind = "small" if size == "small" else "published"
        own = [row[way] if way in row and row[way]["agrees"] else None for way in ways]
        cells = [f"{times(one['time'])} / {times(one['memory'])}" if one else "" for one in own]
        lines.append([f"{WORKLOADS[workload].title}, {kind}", f"{count} {TIMES} {batch}", *cells])
    heads = [f"`{way}`" if "=" in way else way for way in ways]
    return f"{markdown(['workload', f'M {TIMES} N', *heads], lines)}\n\n{_where(found)}"


def agents(found: dict[str, Any]) -> str:
    """The table of seeds of PPO in every way to train them."""
    lines = []
    for name, rows in found["rl"].items():
        models, width = name.split(" x ")
        for way, row in rows.items():
            if "error" not in row:
                over = [
                    row.get(base, {}).get(key) for base in ("over processes", "over JAX") for key in ("rate", "seconds")
                ]
                cells = (
                    f"{row['rate']:,.0f}",
                    f"{row['first']:.0f} s" if row["first"] else "",
                    f"{row['seconds']:,.0f} s",
                )
                lines.append([models, width, way, *cells, *(times(one) if one else "" for one in over)])
    heads = [head for base in ("processes", "JAX") for head in (f"over {base}", f"to the end, over {base}")]
    head = ["agents", "width", "way", "steps a second", "first turn", "to the end", *heads]
    return f"{markdown(head, lines)}\n\n{_where(found)}"


def _where(found: dict[str, Any]) -> str:
    return where([*found.get("stamps", {}).values()] or [found["machine"]])


def operators(found: dict[str, Any]) -> str:
    """The table of single operators: geometric means by family."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for name, one in found["ops"].items():
        if one["agrees"]:
            for key in ((one["family"], "small" in name), ("all", "small" in name)):
                groups.setdefault(key, []).append(one)
    lines = []
    for family in dict.fromkeys(family for family, _ in groups if family != "all"):
        lines.append([family, *_means(groups, family)])
    lines.append(["all", *_means(groups, "all")])
    head = [f"{size}, over {base}" for size in ("small", "published") for base in ("the loop", "stock `vmap`")]
    return f"{markdown(['family', *head], lines)}\n\n{_where(found)}"


def uncompiled(found: dict[str, Any]) -> str:
    """The table of what needs no compiler: arrays, and the fastest alternative."""
    lines = []
    for name in (name for name in WORKLOADS if name in found):
        for count in sorted(found[name], key=int):
            # A process for one model is the loop.
            rows = {
                mode: row for mode, row in found[name][count]["rows"].items() if count != "1" or "process" not in mode
            }
            others = {mode: value for mode in UNCOMPILED_OTHERS if (value := ratio(rows, [mode])) is not None}
            best = max(others, key=others.__getitem__, default=None)
            cells = [times(ratio(rows, [mode])) for mode in ("array", IN_FIT)]
            if all(cells) and best:
                lines.append(
                    [
                        WORKLOADS[name].title.removesuffix(" 64-64-64-10"),
                        count,
                        *cells,
                        f"{times(others[best])} {NAMES[best]}",
                    ]
                )
    head = ["workload", "M", "array, one step after another", "array in `fit`", "best other without a compiler"]
    return f"{markdown(head, lines)}\n\n{about([part for sizes in found.values() for part in sizes.values()])}"


def predictions(found: dict[str, dict[str, Any]]) -> str:
    """The table of what ``plan`` predicts, by size, and how far off its memory is at most."""
    counts = list(dict.fromkeys(count for size in found.values() for one in size.values() for count in one["rows"]))
    lines = []
    for name in WORKLOADS:
        rows = [size[name]["rows"] if name in size else {} for size in found.values()]
        cells = [f"{own[count]['off'][0]:+.0%}" if count in own else "" for own in rows for count in counts]
        if any(cells):
            lines.append([WORKLOADS[name].title, *cells])
    worst = max(abs(row["off"][1]) for size in found.values() for one in size.values() for row in one["rows"].values())
    head = ["workload", *(f"{size}, M = {count}" for size in found for count in counts)]
    stamps = [one["machine"] for size in found.values() for one in size.values()]
    return f"{markdown(head, lines)}\n\nMemory was predicted to within {worst:.1%}. {where(stamps)}"


def _means(groups: dict[tuple[str, bool], list[dict[str, Any]]], family: str) -> list[str]:
    """The cells of one family."""
    cells = []
    for small in (True, False):
        group = groups.get((family, small), [])
        for base in ("serial", "stock vmap"):
            ratios = [op_ratio(one, base) for one in group]
            cells.append(f"{times(statistics.geometric_mean(ratios))} ({len(ratios)})" if ratios else "")
    return cells


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
    both = ("array", "array compiled")
    known = [mode for mode in both if base and counts(mode, rows.get(mode, {})) and rows[mode]["bytes"] is not None]
    own = [rows[mode]["bytes"] / base for mode in known]
    return " / ".join(f"{value:.2f}" for value in own)


def _compiling(rows: dict[str, Any]) -> str:
    row = rows.get("array compiled", {})
    return f"{row['first step']:.0f} s" if counts("array compiled", row) else ""


def picture(found: dict[str, Any]) -> Figure:
    """Speed relative to the loop over M, a panel for each workload."""
    names = [name for name in WORKLOADS if name in found]
    columns = min(4, len(names))
    height = -(-len(names) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.5 * height + 0.5), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flat
    drawn = {}
    for name, ax in zip(names, axes, strict=False):
        counts = sorted(map(int, found[name]))
        for mode, (color, line) in ((mode, style) for mode, style in STYLES.items() if mode != SERIAL):
            points = [(m, ratio(found[name][str(m)]["rows"], [mode])) for m in counts]
            points = [point for point in points if point[1] is not None]
            if points:
                style = {"color": color, "linestyle": line, "linewidth": 1.4, "markersize": 4}
                # Told apart without lines too.
                style |= {"marker": "o"} if line == "-" else {"marker": "D", "markerfacecolor": "white"}
                (drawn[mode],) = ax.plot(*zip(*points, strict=True), **style)
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
        drawn.values(), drawn, loc="outside lower center", ncols=min(5, columns + 1), frameon=False, fontsize=8
    )
    return figure


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The sweeps of all files of results there are, a GPU's by card, size and precision."""
    paths = {key: folder / f"{key}.json" for key in TITLES}
    found = {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}
    return found | gpu.sweeps(ledger.read(folder / ledger.FILE))


def gpus(folder: Path = RESULTS) -> str:
    """What was measured on GPUs."""
    rows = ledger.read(folder / ledger.FILE)
    steps = tables(gpu.sweeps(rows))
    own = [
        f"### The update alone, {name}\n\n{table}"
        for name, found in gpu.updates(rows).items()
        if (table := updates({"optim": found})).count("\n") > 1
    ]
    return "\n\n".join(filter(None, [steps or gpu.NOTHING, *own, gpu.singles(rows)]))


def written(page: str, folder: Path = RESULTS) -> str:
    """The page with all tables of the results in a folder."""
    sweeps = results(folder)
    page = readme.replaced(page, tables({key: sweeps[key] for key in TITLES if key in sweeps}), BEGIN)
    page = readme.replaced(page, readme.speed(sweeps, every=True), BEST)
    page = readme.replaced(page, gpus(folder), GPUS)
    page = readme.replaced(page, reach.reached(sweeps[reach.KEY]), TO_STEPS)
    single = (
        *((UPDATES, updates, "optim-cpu"), (OPERATORS, operators, "ops-cpu"), (STUDIES, studies, "tune-cpu")),
        *(
            (FAMILIES, families, "families-cpu"),
            (RECURRENT, recurrent, "recurrent-cpu"),
            (ENSEMBLES, ensembles, "ensembles-cpu"),
            (ADAPTERS, adapters, "adapters-cpu"),
        ),
        *((MEMORY, memory, "memory-cpu"), (AGENTS, agents, "rl-cpu"), (CURVE, curve.tables, curve.KEY)),
        (UNCOMPILED, uncompiled, reach.KEY),
    )
    for begin, make, name in single:
        path = folder / f"{name}.json"
        page = readme.replaced(page, make(json.loads(path.read_text())) if path.exists() else NOTHING, begin)
    sizes = {"small": "plan-cpu-small", "published": "plan-cpu-paper"}
    found = {size: json.loads((folder / f"{name}.json").read_text()) for size, name in sizes.items()}
    return readme.replaced(page, predictions(found), PREDICTIONS)


def pages(folder: Path = RESULTS) -> dict[Path, str]:
    """Every page that shows results, as it should be."""
    return {
        PAGE: written(PAGE.read_text(), folder),
        readme.README: readme.written(readme.README.read_text(), results(folder), folder),
    }


def older(sweeps: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each workload and M with rows that other code was measured for than there is now."""
    lines = []
    for key, found in sweeps.items():
        for name, sizes in found.items():
            for count in sorted(sizes, key=int):
                rows = measured([sizes[count]]).items()
                modes = [mode for mode, (row,) in rows if _code.is_older(mode, row)]
                if modes:
                    lines.append(f"{key}: {name}, M = {count}: {', '.join(modes)}")
    return lines


def check() -> int:
    """Say which rows are older than the code, and whether the pages show the results, remarks on age apart."""
    wrong = [path for path, text in pages().items() if unmarked(path.read_text()) != unmarked(text)]
    for line in older(results()):
        print(f"older than the code: {line}")
    for path in wrong:
        print(f"{path.relative_to(ROOT)} does not show the results as they are; run python -m benchmarks report")
    return int(bool(wrong))


def main(argv: Sequence[str] = ()) -> int:
    """Write the tables of the pages and the pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say which rows are older than the code")
    if parser.parse_args(argv).check:
        return check()
    for path, text in pages().items():
        path.write_text(text)
    found = results()
    pictures = {f"speed-{key}.png": picture(own) for key, own in found.items()}
    pictures[f"reach-{reach.KEY}.png"] = reach.picture(found[reach.KEY])
    if (path := RESULTS / f"{curve.KEY}.json").exists():
        pictures[curve.PICTURE] = curve.picture(json.loads(path.read_text()))
    for name, figure in pictures.items():
        figure.savefig(DOCS / name, dpi=110)
        print(f"docs/{name}")
    return 0
