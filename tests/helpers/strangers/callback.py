"""A callback: members whose metric is above twice the best member's stop; in a study it only looks on."""

from __future__ import annotations

from typing import Any

import hfta_func as hfta


def keep_up(metric: str) -> Any:
    """Made for a metric of which less is better."""

    def callback(trained: Any, history: hfta.run.History) -> Any:
        values = history[metric][-1, history.members]
        if not isinstance(trained, hfta.step.TrainState):
            return None
        return trained._replace(active=trained.active & (values <= 2 * values.min()))

    return callback
