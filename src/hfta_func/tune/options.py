"""The options of a study, checked in one place."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from hfta_func._types import Direction
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
    scheduler: Scheduler | None
    batch: int | None
    max_models: int | Literal["auto"]
    seeds: int
    rank: Rank
    seed: int
    enqueue: Sequence[Mapping[str, Any]] = ()
    most: int | None = None
    """Number of configurations that the sampler has; None for any number."""

    def __post_init__(self) -> None:
        self._check_space()
        metrics, directions = self.metrics, self.directions
        if len(directions) != len(metrics) or set(directions) - {"minimize", "maximize"}:
            raise ValueError(f"direction is {list(directions)}; pass 'minimize' or 'maximize' for each metric")
        for name, value in zip(metrics, directions, strict=True):
            if (first := directions[metrics.index(name)]) != value:
                raise ValueError(
                    f"the directions of metric '{name}' contradict each other: {first} and {value}; pass one"
                )
        if self.scheduler is not None and not isinstance(self.scheduler, Scheduler):
            raise ValueError(f"scheduler is {self.scheduler!r}; pass one of hfta_func.tune, such as tune.halving(3)")
        if len(metrics) > 1 and self.scheduler is not None:
            raise ValueError("a scheduler compares one metric; pass a single one, or no scheduler")
        for label, least in (("trials", 0), ("epochs", 1), ("seeds", 1)):
            value = getattr(self, label)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{label} is {value!r}; pass an integer, at least {least}")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}; pass an integer")
        if self.scheduler is not None and self.scheduler.copies and self.seeds > 1:
            raise ValueError("a scheduler that copies trials has one seed per trial; leave seeds out")
        if self.batch is not None and (not isinstance(self.batch, int) or self.batch < 1):
            raise ValueError(f"batch is {self.batch!r}; pass a number of trials, at least 1, or None")
        if self.rank == "paired" and self.seeds < 2:
            raise ValueError(
                f"rank is 'paired' and seeds is {self.seeds}; pass at least 2, whose differences are compared"
            )
        if not any(cohort.trials for cohort in self.cohorts):
            raise ValueError(
                "trials is 0, the scheduler's own number, and this scheduler has none; pass how many to try"
            )

    def _check_space(self) -> None:
        space, nonfusible = self.space, self.nonfusible
        if isinstance(nonfusible, str):
            raise ValueError(f"nonfusible is '{nonfusible}'; pass a list of names, ['{nonfusible}']")
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
        taken = [name for name in names if name in ("trial", "status", "epochs", "seconds", *self.metrics)]
        if taken:
            raise ValueError(
                f"the space has '{taken[0]}', which is a column of study.frame() besides; give it another name"
            )
        if "seed" in names:
            raise ValueError(
                "the space has 'seed', which members have besides; pass seeds= for several seeds per trial"
            )

    @functools.cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of what is compared."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @functools.cached_property
    def directions(self) -> tuple[Direction, ...]:
        """Whether large or small values are better, for each metric."""
        return (self.direction,) * len(self.metrics) if isinstance(self.direction, str) else tuple(self.direction)

    @functools.cached_property
    def cohorts(self) -> list[Cohort]:
        """The scheduler's cohorts, of no more trials than the sampler has configurations."""
        scheduler = self.scheduler or Scheduler()
        cohorts = scheduler.cohorts(self.trials, self.epochs)
        if self.most is not None and sum(cohort.trials for cohort in cohorts) > self.most:
            cohorts = scheduler.cohorts(self.most, self.epochs)
        for cohort in cohorts:
            if not cohort.rungs or any(later <= first for first, later in itertools.pairwise((0, *cohort.rungs))):
                raise ValueError(
                    f"{type(scheduler).__qualname__}: a cohort has the rungs {cohort.rungs}; give it epochs that ascend"
                )
        return cohorts

    def about(self, json_of: Callable[[str], str]) -> dict[str, Any]:
        """What identifies a study in a folder or storage; ``json_of(name)`` is a name's distribution as JSON."""
        space = self.space
        name = getattr(space, "__qualname__", type(space).__qualname__)
        described: Any = f"the function {name}" if callable(space) else {name: json_of(name) for name in space}
        enqueued = {"enqueue": [dict(params) for params in self.enqueue]} if self.enqueue else {}
        return enqueued | {
            **{"space": described, "metric": self.metrics},
            **{"direction": self.directions, "nonfusible": list(self.nonfusible)},
            **{"trials": self.trials, "epochs": self.epochs, "scheduler": repr(self.scheduler or Scheduler())},
            **{"seeds": self.seeds, "seed": self.seed, "rank": self.rank},
        }
