"""A scheduler: at every rung, the last trial copies the best with half its learning rate, and others go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hfta_func import tune


@dataclasses.dataclass(frozen=True)
class Pull(tune.Scheduler):
    """Made with the number of epochs between rungs."""

    every: int = 1
    waits = True
    copies = True

    def cohorts(self, trials: int, epochs: int) -> list[tune.Cohort]:
        """One cohort, which waits for all at every rung."""
        return [tune.Cohort(trials, (*range(self.every, epochs, self.every), epochs))]

    def decide(self, cohort: tune.Cohort) -> Mapping[int, tune.Verdict]:
        """The last one goes on from the best."""
        alive = cohort.alive
        rung = min((len(found) for found in alive.values()), default=0)
        if rung in (0, len(cohort.rungs)) or len(cohort.values) < cohort.trials:
            return {}
        ranked = sorted(alive, key=lambda trial: -alive[trial][rung - 1])
        verdicts: dict[int, tune.Verdict] = dict.fromkeys(ranked, "go")
        if len(ranked) > 1:
            verdicts[ranked[-1]] = tune.Copy(ranked[0], {"lr": cohort.params[ranked[0]]["lr"] / 2})
        return {trial: verdict for trial, verdict in verdicts.items() if len(alive[trial]) == rung}
