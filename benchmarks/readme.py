"""The table in README: arrays against the fastest alternative at the same M."""

from __future__ import annotations

from typing import Any

from benchmarks._measure import ROOT
from benchmarks._tables import COMPILED, EAGER, NAMES, about, counts, mark, markdown, ratio, shown, times
from benchmarks.gpu.tables import NOTHING, title
from benchmarks.workloads import WORKLOADS

README = ROOT / "README.md"
BEGIN = "<!-- speed, made by python -m benchmarks report -->"
GPUS = "<!-- speed on a GPU, made by python -m benchmarks report -->"
SIZES = {"small": "cpu-small", "published size": "cpu-paper"}
GPU_SIZES = {"small": "-small", "published size": "-paper", "published, bfloat16": "-paper-bf16"}
"""Columns, and how the names of a card's results end."""


def gpus(results: dict[str, dict[str, Any]]) -> str:
    """The same table for each GPU, or what is known without one."""
    cards = dict.fromkeys(
        key.rsplit("-paper", 1)[0].rsplit("-small", 1)[0] for key in results if key not in SIZES.values()
    )
    parts = []
    for name in cards:
        sizes = {size: f"{name}{ending}" for size, ending in GPU_SIZES.items()}
        found = next((results[key] for key in sizes.values() if key in results), None)
        if found is not None:
            parts.append(f"{title(found).split(',')[0]}:\n\n{speed(results, sizes)}")
    return "\n\n".join(parts) or NOTHING


def speed(results: dict[str, dict[str, Any]], columns: dict[str, str] = SIZES, every: bool = False) -> str:
    """The table, and how its figures were measured.

    Args:
        results: The sweeps by name.
        columns: The name of the results of each size.
        every: Whether a workload also has rows for smaller M, if more or other alternatives were measured there.
    """
    found = {size: results[key] for size, key in columns.items() if key in results}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for size, own in found.items():
        for name in WORKLOADS:
            for count in shown(own[name])[: None if every else 1] if name in own else ():
                rows.setdefault((name, count), {})[size] = own[name][count]
    parts = [part for both in rows.values() for part in both.values()]
    lines = []
    for name, count in sorted(rows, key=lambda pair: ([*WORKLOADS].index(pair[0]), -int(pair[1]))):
        both = rows[name, count]
        marked = "".join({mark(part, parts) for part in both.values()})
        cells = [cell for size in found for cell in (_cells(both[size]["rows"]) if size in both else [""] * 3)]
        lines.append([WORKLOADS[name].title.removesuffix(" 64-64-64-10") + marked, count, *cells])
    head = [cell for size in found for cell in (f"{size}: eager", "compiled", "best other")]
    return f"{markdown(['workload', 'M', *head], lines)}\n\n{about(parts)}"


def _cells(rows: dict[str, Any]) -> list[str]:
    """The cells of the eager and the compiled array, and of the fastest alternative, including the loop itself."""
    others = [mode for mode in NAMES if counts(mode, rows.get(mode, {}))]
    best = max(others, key=lambda mode: rows[mode]["ratio"], default=None)
    ours = [times(ratio(rows, mode)) for mode in (EAGER, COMPILED)]
    return [*ours, f"{times(rows[best]['ratio'])} {NAMES[best]}" if best else ""]
