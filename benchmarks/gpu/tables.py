"""The rows of GPUs as tables: whole steps in the shape of a sweep's results, and what is measured one by one."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks._tables import TIMES, markdown
from benchmarks.gpu import cells
from benchmarks.gpu.ledger import card, newest
from benchmarks.workloads import WORKLOADS

SIZES = {"small": "small versions", "paper": "published sizes"}
NOTHING = (
    "No whole step has been compared with a loop on a GPU yet. CUDA runs the same code, its tests have run on an H100, and\n"
    "kernels for convolutions were chosen by measurement there; `python -m benchmarks gpu` measures the rest."
)
"""What pages say until there are rows."""


def key(row: dict[str, Any]) -> str:
    """The name of the results that a cell's row belongs to: card, size and precision."""
    slug = re.sub(r"[^a-z0-9]+", "-", card(row["machine"]).lower()).strip("-")
    return f"{slug}-{row['size']}{'-bf16' if row['amp'] else ''}"


def sweeps(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Whole steps as a sweep writes them: by :func:`key`, workload and number of models."""
    order = [(size, amp) for size in SIZES for amp in (False, True)]
    own = [row for row in newest(rows) if row["stage"] == cells.STAGE and "mode" in row]
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(own, key=lambda row: (card(row["machine"]), order.index((row["size"], row["amp"])))):
        sizes = found.setdefault(key(row), {}).setdefault(row["workload"], {})
        part = sizes.setdefault(
            f"{row['models']}", {name: row[name] for name in ("batch_size", "device", "amp", "loop")}
        )
        part.setdefault("rows", {})[row["mode"]] = row
    # What was measured beside no loop stands beside none.
    return {name: kept for name, one in found.items() if (kept := _with_ratios(one))}


def _with_ratios(found: dict[str, Any]) -> dict[str, Any]:
    some = lambda part: any("ratio" in row for mode, row in part["rows"].items() if mode != "serial")  # noqa: E731
    kept = {name: {count: part for count, part in sizes.items() if some(part)} for name, sizes in found.items()}
    return {name: sizes for name, sizes in kept.items() if sizes}


def title(found: dict[str, Any]) -> str:
    """The heading of such results."""
    row = next(row for sizes in found.values() for part in sizes.values() for row in part["rows"].values())
    return f"On one {card(row['machine'])}, {SIZES[row['size']]}{', bfloat16' if row['amp'] else ''}"


def singles(rows: Iterable[dict[str, Any]]) -> str:
    """The tables of each card's lowerings, largest arrays and idle time; empty without rows."""
    by_card: dict[str, list[dict[str, Any]]] = {}
    for row in newest(rows):
        if "error" not in row:
            by_card.setdefault(card(row["machine"]), []).append(row)
    parts = []
    for name, own in by_card.items():
        stages = {stage: [row for row in own if row["stage"] == stage] for stage in HEADS}
        for stage, make in {"busy": _busy, "rl": _agents, "largest": _largest, "lowerings": _lowerings}.items():
            if stages[stage]:
                parts.append(f"### {HEADS[stage]}, {name}\n\n{make(stages[stage])}")
    return "\n\n".join(parts)


HEADS = {
    "busy": "How much of a step kernels run",
    "rl": "Seeds of PPO on CartPole",
    "largest": "How many models fit",
    "lowerings": "Lowerings that are not the fastest",
}


def _busy(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            *(WORKLOADS[row["workload"]].title, f"{row['num_models']}", row["mode"]),
            *(f"{1e3 * row['wall']:.2f}", f"{1e3 * row['kernels']:.2f}", f"{row['busy']:.0%}"),
        ]
        for row in rows
    ]
    return markdown(["workload", "M", "mode", "step, ms", "kernels, ms", "share"], lines)


def _agents(rows: list[dict[str, Any]]) -> str:
    lines = [
        [f"{row['models']}", row["mode"], f"{row['rate']:,.0f}", f"{row['first']:.0f}", f"{row['seconds']:,.0f}"]
        for row in rows
    ]
    return markdown(["agents", "way", "steps a second", "first turn, s", "500,000 steps each, s"], lines)


def _largest(rows: list[dict[str, Any]]) -> str:
    columns = [(size, amp) for size in SIZES for amp in (False, True)]
    lines = []
    for name in cells.NAMES:
        own = {(row["size"], row["amp"]): f"{row['largest']:,}" for row in rows if row["workload"] == name}
        if own:
            lines.append([WORKLOADS[name].title, *(own.get(column, "") for column in columns)])
    return markdown(["workload", *(f"{SIZES[size]}{', bfloat16' if amp else ''}" for size, amp in columns)], lines)


SLOW = 1.1
"""From which ratio to the fastest lowering one is shown."""


def _lowerings(rows: list[dict[str, Any]]) -> str:
    lines, ratios = [], []
    for row in rows:
        for name, one in row["found"].items():
            own = {way: value for way, value in one["times"].items() if way != "serial"}
            best = min(own, key=own.__getitem__)
            ratios.append(own[one["chosen"]] / own[best])
            if ratios[-1] >= SLOW:
                times = [f"{1e3 * own[way]:.3f}" for way in (one["chosen"], best)]
                lines.append([name, f"{one['chosen']} {times[0]}", f"{best} {times[1]}", f"{ratios[-1]:.2f}{TIMES}"])
    if not ratios:
        return "No operator was measured that has several."
    mean = statistics.geometric_mean(ratios)
    said = f"The table's choice takes {mean:.2f}{TIMES} as long as the fastest, over {len(ratios)} operators."
    head = ["operator", "chosen, ms", "fastest, ms", "chosen / fastest"]
    return f"{said}\n\n{markdown(head, lines)}" if lines else said


def updates(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By card, the updates as ``python -m benchmarks optim`` writes them."""
    found: dict[str, dict[str, Any]] = {}
    for row in newest(rows):
        if row["stage"] == "updates" and "error" not in row:
            found.setdefault(card(row["machine"]), {})[row["key"]] = row["found"]
    return found
