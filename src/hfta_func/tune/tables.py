"""Tables of a study as CSV files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hfta_func.files import atomic
from hfta_func.files.atomic import PathLike


def write_tables(
    folder: PathLike, rows: Sequence[Mapping[str, Any]], metric: str, trajectory: Iterable[Sequence[Any]]
) -> None:
    """Write a study to a folder: ``history.csv`` has a row per trial, ``trajectory.csv`` each new best value of a metric."""
    os.makedirs(folder, exist_ok=True)
    for name, head, body in (
        ("history", list(rows[0]) if rows else [], [list(row.values()) for row in rows]),
        ("trajectory", ["seconds", "trial", metric], trajectory),
    ):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([head, *body])
        # Replaced as a whole, because others read it while the study runs.
        atomic.write(os.path.join(folder, f"{name}.csv"), text.getvalue().encode())
