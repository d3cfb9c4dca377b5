"""Which lowering an operator gets: a table, searched from top to bottom, whose first matching row decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """One call of an operator on M members at once, as the table sees it; ``shared``: all members read one input."""

    op: str
    shared: bool


class Row(NamedTuple):
    """A row of the table: for calls of ``op`` where ``when`` holds use ``lowering``, for the ``reason`` given."""

    op: str
    when: Callable[[Case], bool]
    lowering: str
    reason: str


TABLE: tuple[Row, ...] = (
    Row("convolution", lambda case: case.shared, "wide", "one shared input: all members' filters in one convolution"),
    Row("convolution", lambda case: True, "grouped", "one group per member"),
)


def choose(case: Case) -> str:
    """The name of the lowering for a call."""
    return next(row.lowering for row in TABLE if row.op == case.op and row.when(case))
