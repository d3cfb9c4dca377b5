"""The options of a study, checked in one place."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from hfta_func._types import Direction, check_counts, require
from hfta_func.tune.cohorts import Cohort, Scheduler
from hfta_func.tune.sampling import Space

Rank = Literal["mean", "lower", "paired"]
"""How trials of several seeds are compared, see :func:`~hfta_func.tune.run`."""


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
    rank: Rank
    seed: int
    enqueue: Sequence[Mapping[str, Any]]
    keep: int | Literal["best", "all"]
    retry: int
    timeout: float | None

    def __post_init__(self) -> None:
        self._check_space()
        metrics, directions, scheduler = self.metrics, self.directions, self.scheduler
        if len(directions) != len(metrics) or set(directions) - {"minimize", "maximize"}:
            raise ValueError(f"direction is {list(directions)}; pass 'minimize' or 'maximize' for each metric")
        if len({*metrics}) < len(metrics):
            raise ValueError(f"metric is {list(metrics)}; name each one once")
        if not isinstance(scheduler, Scheduler):
            raise ValueError(f"scheduler is {scheduler!r}; pass one of hfta_func.tune, such as tune.halving(3)")
        if len(metrics) > 1 and type(scheduler) is not Scheduler:
            raise ValueError("a scheduler compares one metric; pass a single one, or no scheduler")
        check_counts(epochs=self.epochs, seeds=self.seeds, batch=1 if self.batch is None else self.batch)
        for label, value in (("trials", self.trials), ("retry", self.retry)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{label} is {value!r}; pass an integer, at least 0")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; pass an integer")
        if scheduler.copies and self.seeds > 1:
            raise ValueError("a scheduler that copies trials has one seed per trial; leave seeds out")
        if self.rank == "paired" and self.seeds < 2:
            raise ValueError(f"rank is 'paired' and seeds is {self.seeds}; pass at least 2, which are compared")
        if self.keep not in ("best", "all") and not (isinstance(self.keep, int) and self.keep > 0):
            raise ValueError(f"keep is {self.keep!r}; pass 'best', 'all' or how many of the best, at least 1")

    def _check_space(self) -> None:
        space, nonfusible = self.space, self.nonfusible
        if callable(space):
            return
        for label, names in (("nonfusible", nonfusible), *(("enqueue", params) for params in self.enqueue)):
            if unknown := [name for name in names if name not in space]:
                raise ValueError(f"{label} names '{unknown[0]}', but the space has {', '.join(space) or 'no names'}")
        if not set(space) - set(nonfusible):
            raise ValueError("the space has no fusible name, so no two trials could share an array; use Optuna itself")
        self.check_names(space)

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
        if not any(cohort.trials for cohort in cohorts):
            raise ValueError("trials is 0, the scheduler's own number, and this one has none; pass how many to try")
        for cohort in cohorts:
            if not cohort.rungs or any(later <= first for first, later in itertools.pairwise((0, *cohort.rungs))):
                kind = type(scheduler).__qualname__
                raise ValueError(f"{kind}: a cohort has the rungs {cohort.rungs}; give it epochs that ascend")
        return parts, cohorts

    def about(self) -> dict[str, Any]:
        """What identifies a study in its storage."""
        space, describe = self.space, require("optuna", "tune").distributions.distribution_to_json
        name = getattr(space, "__qualname__", type(space).__qualname__)
        described = f"the function {name}" if callable(space) else {key: describe(kind) for key, kind in space.items()}
        values = {name: getattr(self, name) for name in ("nonfusible", "epochs", "seeds", "seed", "rank")}
        names = {"metric": self.metrics, "direction": self.directions, "scheduler": repr(self.scheduler)}
        return {"space": described, **names, **values}
