"""Tables of configurations as rows; rows as pandas frames and CSV files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hfta_func.files import atomic
from hfta_func.files.atomic import PathLike


def rows_of(table: Any) -> list[Mapping[str, Any]]:
    """The rows of a table: a list of dicts, a dict of lists, or a pandas frame."""
    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        return rows_of(table.to_dict("records"))
    if isinstance(table, Mapping):
        columns = {name: list(values) for name, values in table.items()}
        if len({len(values) for values in columns.values()}) > 1:
            counts = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise ValueError(f"the columns of the table have different lengths: {counts}")
        return rows_of([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    # Numbers of NumPy become those of Python, which JSON can hold.
    return [{name: value.item() if hasattr(value, "item") else value for name, value in row.items()} for row in table]


def write_tables(
    folder: PathLike, rows: Sequence[Mapping[str, Any]], metric: str, trajectory: Iterable[Sequence[Any]]
) -> None:
    """Write a study to a folder: ``history.csv`` has a row per trial, ``trajectory.csv`` the best value so far.

    Args:
        folder: The folder; it is created if it does not exist.
        rows: One row per trial: values by column.
        metric: Name of the metric that the trajectory shows.
        trajectory: Seconds of training, number of the trial and its value, for each trial better than all before it.
    """
    os.makedirs(folder, exist_ok=True)
    for name, head, body in (
        ("history", list(rows[0]) if rows else [], [list(row.values()) for row in rows]),
        ("trajectory", ["seconds", "trial", metric], trajectory),
    ):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([head, *body])
        # Replaced as a whole, because others read it while the study runs.
        atomic.write(os.path.join(folder, f"{name}.csv"), text.getvalue().encode())
