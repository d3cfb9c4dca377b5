"""A member of a population, tables of configurations as rows, and checks of members."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass
class Member:
    """One member of a population.

    Args:
        number: Its number in the population.
        config: Its configuration, with its seed.
        epoch: Number of epochs that it has trained.
        metrics: The metrics of each epoch.
        seconds: Its share of the time of the arrays that it trained in.
        status: ``"alive"``, ``"dropped"`` or ``"failed"``.
        error: Why it failed.
        parents: The members that it copied, as pairs of epoch and number.
    """

    number: int
    config: dict[str, Any]
    epoch: int = 0
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    status: Literal["alive", "dropped", "failed"] = "alive"
    error: str | None = None
    parents: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def value(self, metric: str, epoch: int = -1) -> float:
        """A metric of an epoch, by default the last one; NaN without any epoch."""
        if self.metrics and metric not in self.metrics[epoch]:
            raise KeyError(f"member {self.number} has no metric '{metric}'; it has {', '.join(self.metrics[epoch])}")
        return self.metrics[epoch][metric] if self.metrics else math.nan


def rows_of(table: Any) -> list[Mapping[str, Any]]:
    """The rows of a table: a list of dicts, a dict of lists, or a pandas frame."""
    table = table.to_dict("records") if hasattr(table, "to_dict") else table
    if isinstance(table, Mapping):
        table = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    # Numbers of NumPy become those of Python, which JSON can hold.
    return [{name: value.item() if hasattr(value, "item") else value for name, value in row.items()} for row in table]


def check_alive(members: Sequence[Member], numbers: Iterable[int]) -> None:
    """Raise a ValueError unless all numbers are those of members that are alive."""
    for number in numbers:
        if (status := members[number].status) != "alive":
            raise ValueError(
                f"member {number} is {status}, and its state is gone; population.alive are those that train"
            )


def tuples(value: Any) -> Any:
    """A value that was written as JSON, which has lists for tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
