"""The options of a study, checked in one place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from hfta_func._types import Direction, check_counts, require
from hfta_func.tune.cohorts import Cohort, Scheduler
from hfta_func.tune.sampling import Space


@dataclasses.dataclass(frozen=True, eq=False)
class StudyOptions:
    """What a study searches and how, as :func:`~hfta_func.tune.run` describes it, checked."""

    space: Space
    metric: str | Sequence[str]
    direction: Direction | Sequence[Direction]
    nonfusible: Sequence[str]
    trials: int
    epochs: int
    scheduler: Scheduler
    batch: int | None
    max_models: int | Literal["auto"]
    seeds: int
    seed: int
    keep: int | Literal["best", "all"]
    timeout: float | None
    target: float | None = None

    def __post_init__(self) -> None:
        scheduler, space = self.scheduler, () if callable(self.space) else self.space
        check_counts(epochs=self.epochs, seeds=self.seeds, batch=1 if self.batch is None else self.batch)
        self.check_names(space)
        if len(self.metrics) > 1 and type(scheduler) is not Scheduler:
            raise ValueError("a scheduler compares one metric; pass a single one, or no scheduler")
        if self.target is not None and (len(self.metrics) > 1 or scheduler.copies):
            raise ValueError("target is a value of one metric, and of trials that no other copies; leave it out here")
        if scheduler.copies and self.seeds > 1:
            raise ValueError("a scheduler that copies trials has one seed per trial; leave seeds out")

    def check_names(self, names: Iterable[str]) -> None:
        """Raise a ValueError if a parameter has a name that the study needs itself."""
        for name in {*names} & {"trial", "status", "epochs", "seconds", "seed", *self.metrics}:
            raise ValueError(f"the space has '{name}', which is a column of study.frame(); give it another name")

    @functools.cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of what is compared."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @functools.cached_property
    def directions(self) -> tuple[Direction, ...]:
        """Whether large or small values are better, for each metric."""
        return (self.direction,) * len(self.metrics) if isinstance(self.direction, str) else tuple(self.direction)

    def cohorts(self, parts: Sequence[int], most: int | None) -> tuple[list[int], list[Cohort]]:
        """The scheduler's cohorts of a study that was called for ``parts`` trials, and is called for all of ``trials`` now.

        Trials that are added make cohorts of their own if trials of a cohort wait for each other.

        Args:
            parts: The numbers of trials that the cohorts before were made for.
            most: The number of configurations that the sampler has; None for any number.

        Returns:
            The parts with the one that is new, and the cohorts of all of them.
        """
        scheduler = self.scheduler
        total = self.trials if most is None else min(most, self.trials or most)
        known = sum(cohort.trials for part in parts for cohort in scheduler.cohorts(part, self.epochs))
        parts = [*parts, total - known] if total > known and parts else [*parts] or [total]
        if not scheduler.waits and all(parts):
            parts = [sum(parts)]
        cohorts = [cohort for part in parts for cohort in scheduler.cohorts(part, self.epochs)]
        if not any(cohort.trials > 0 for cohort in cohorts):
            raise ValueError(f"trials is {self.trials}, and this scheduler has no number of its own; pass at least 1")
        return parts, cohorts

    def about(self) -> dict[str, Any]:
        """What identifies a study in its storage."""
        space, describe = self.space, require("optuna", "tune").distributions.distribution_to_json
        name = getattr(space, "__qualname__", type(space).__qualname__)
        described = f"the function {name}" if callable(space) else {key: describe(kind) for key, kind in space.items()}
        values = {name: getattr(self, name) for name in ("nonfusible", "epochs", "seeds", "seed")}
        # Storages of earlier versions have a rank.
        names = dict(metric=self.metrics, direction=self.directions, scheduler=repr(self.scheduler), rank="mean")
        return {"space": described, **names, **values}
