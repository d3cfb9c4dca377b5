"""What is known of one member of a population."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal


@dataclasses.dataclass
class Member:
    """One member of a population.

    Args:
        number: Its number, which it keeps.
        config: Its configuration, with its seed.
        epoch: Epochs it has trained.
        metrics: The metrics of each epoch.
        seconds: Its share of the time of the arrays that it trained in.
        status: ``"alive"``, ``"dropped"`` or ``"failed"``.
        error: Why it failed.
        parents: Whom it copied, as pairs of epoch and number.
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
        """A metric of an epoch, the last one by default; NaN if the member failed before."""
        if not self.metrics:
            return math.nan
        found = self.metrics[epoch]
        if metric not in found:
            raise KeyError(f"member {self.number} has no metric '{metric}'; it has {', '.join(found)}")
        return found[metric]
