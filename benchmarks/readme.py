"""The table in README: arrays against the best of their opponents at the same M."""

from __future__ import annotations

from typing import Any

from benchmarks._measure import ROOT
from benchmarks._tables import NAMES, about, counts, mark, markdown, ratio, times, with_peers
from benchmarks.workloads import WORKLOADS

README = ROOT / "README.md"
BEGIN = "<!-- speed, made by python -m benchmarks report -->"
SIZES = {"small": "cpu-small", "published size": "cpu-paper"}


def speed(results: dict[str, dict[str, Any]]) -> str:
    """The table, and what its figures rest on.

    A workload has a row for its largest M, and one more for the M at which opponents were measured that were not at that.
    """
    found = {size: results[key] for size, key in SIZES.items() if key in results}
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for size, own in found.items():
        for name in WORKLOADS:
            for count in _counts(own.get(name, {})):
                shown.setdefault((name, count), {})[size] = own[name][count]
    parts = [part for both in shown.values() for part in both.values()]
    lines = []
    for (name, count), both in sorted(
        shown.items(), key=lambda item: ([*WORKLOADS].index(item[0][0]), -int(item[0][1]))
    ):
        marked = "".join({mark(part, parts) for part in both.values()})
        cells = [cell for size in found for cell in (_cells(both[size]["rows"]) if size in both else [""] * 3)]
        lines.append([WORKLOADS[name].title.removesuffix(" 64-64-64-10") + marked, count, *cells])
    head = [
        f"{size}: {one}" if i == 0 else one
        for size in found
        for i, one in enumerate(("eager", "compiled", "best other"))
    ]
    return f"{markdown(['workload', 'M', *head], lines)}\n\n{about(parts)}"


def _counts(sizes: dict[str, Any]) -> list[str]:
    """The numbers of models that are shown."""
    most, peers = max(sizes, key=int, default=None), with_peers(sizes)
    return [count for count in dict.fromkeys((most, peers)) if count is not None]


def _cells(rows: dict[str, Any]) -> list[str]:
    """Of an array, eager and compiled, and of the best of its opponents, the loop itself among them."""
    others = [mode for mode in NAMES if counts(mode, rows.get(mode, {}))]
    best = max(others, key=lambda mode: rows[mode]["ratio"])
    ours = [times(ratio(rows, [mode])) for mode in ("array", "array compiled")]
    return [*ours, f"{times(rows[best]['ratio'])} {NAMES[best]}"]
