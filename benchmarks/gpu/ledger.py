"""Rows of measurements in a file, one JSON object a line: written at once, read back by the next budget.

A row names its stage, its key within the stage, the machine with card and driver, the commit, and the digest of the code that
was measured. Of rows with the same card, stage and key the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks import _code
from benchmarks._measure import RESULTS, machine

COMMITTED = RESULTS / "gpu.jsonl"
FILE = "gpu.jsonl"
"""The name of the file of rows in a folder of results."""
T = TypeVar("T")
State = Literal["missing", "failed", "late", "older", "done"]
ORDER: tuple[State, ...] = ("failed", "missing", "late", "older")
"""What is measured first."""


def card(where: dict[str, Any]) -> str:
    """What rows of a machine stand under: its GPU, or its processor where there is none."""
    return where.get("gpu") or where["cpu"]


def read(*paths: Path) -> list[dict[str, Any]]:
    """The rows of some files, in order; a last line that was cut off is none.

    Raises:
        SystemExit: if a file holds anything else.
    """
    rows = []
    for path in paths:
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                if number < len(lines):
                    raise SystemExit(f"{path}:{number} is no row of results; take the line out") from None
    return rows


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each card, stage and key."""
    return [*{(card(row["machine"]), row["stage"], row["key"]): row for row in rows}.values()]


class Ledger:
    """The rows of this machine's card, of files that are read only and of one that new rows are added to."""

    def __init__(self, folder: Path, committed: Sequence[Path] = (COMMITTED,)):
        self.path, self._committed = folder / FILE, committed
        self.about = {"machine": machine(), **_code.commit()}
        self.load()

    def load(self) -> None:
        """Read the files again."""
        rows = newest(read(*self._committed, self.path))
        own = card(self.about["machine"])
        self.rows = {(row["stage"], row["key"]): row for row in rows if card(row["machine"]) == own}
        self.others = sorted({card(row["machine"]) for row in rows} - {own})

    def add(self, stage: str, key: str, code: str | None, row: dict[str, Any]) -> None:
        """Write a row, so that it is on the disk when this returns."""
        row = {"stage": stage, "key": key, **self.about, "code": code, **row}
        self.rows[stage, key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def state(self, stage: str, key: str, code: str | None) -> State:
        """Whether a key was measured with this code, and how that ended."""
        row = self.rows.get((stage, key))
        if row is None:
            return "missing"
        if row.get("late"):
            return "late"
        if row["code"] != code:
            return "older"
        return "failed" if row.get("outcome") == "failed" else "done"

    def left(self, stage: str, items: Iterable[T], name: Callable[[T], tuple[str, str | None]]) -> list[T]:
        """The items that are not done, the most pressing first; ``name`` gives an item's key and code."""
        states = [(self.state(stage, *name(item)), item) for item in items]
        return [item for state in ORDER for own, item in states if own == state]

    def of(self, stage: str) -> Iterator[dict[str, Any]]:
        """The rows of a stage."""
        return (row for (own, _), row in self.rows.items() if own == stage)
