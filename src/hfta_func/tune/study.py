"""What a search has found: trials, their values, and their models."""

from __future__ import annotations

import dataclasses
import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

import hfta_func as hfta
from hfta_func.tune.member import counted
from hfta_func.tune.population import Population
from hfta_func.tune.sampling import SamplerSession, named
from hfta_func.tune.tables import PathLike, frame_of, write_tables

if TYPE_CHECKING:
    import optuna
    import pandas

Direction = Literal["minimize", "maximize"]
Rank = Literal["mean", "lower", "paired"]


@dataclasses.dataclass
class Trial:
    """One configuration.

    Args:
        number: Its number in the order of asking.
        params: Its values, by name.
        cohort: The number of the cohort that it is compared in.
        members: The numbers of its members in the population, one per seed.
        status: ``"running"`` until it is ``"complete"``, ``"stopped"`` by the scheduler, or ``"failed"``.
        values: Its objectives at each rung that it has reached, over all seeds.
        error: Why it failed.
    """

    number: int
    params: dict[str, Any]
    cohort: int
    members: list[int]
    status: Literal["running", "complete", "stopped", "failed"] = "running"
    values: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    error: str | None = None


class Study:
    """What a search has found; made by :func:`run`.

    Attributes:
        trials: All trials, in the order of asking.
        population: Their members; those of stopped trials have no state any more.
        optuna: The study as Optuna has it, for its plots, importances and fronts.
        trajectory: The best value so far, at any rung: seconds of training until then, the trial's number, and the value.
        interrupted: Whether Ctrl-C ended it.
    """

    def __init__(
        self,
        population: Population,
        asking: SamplerSession,
        metrics: tuple[str, ...],
        directions: tuple[Direction, ...],
        rank: Rank,
    ):
        self.trials: list[Trial] = []
        self.population = population
        self.optuna: optuna.Study = asking.study
        named(self.optuna, metrics)
        self.metrics, self.directions, self.rank = metrics, directions, rank
        self.asking = asking
        self.trajectory: list[tuple[float, int, float]] = []

    def __repr__(self) -> str:
        return f"<Study of {counted('trials', [trial.status for trial in self.trials])}>"

    @property
    def history(self) -> hfta.History:
        """The metrics of all members by epoch, as callbacks of :func:`hfta_func.fit` get them.

        A column is a member of :attr:`population`, with NaN after the epochs that it has trained; ``history.members`` are
        those that have trained last.
        """
        members = self.population.members
        history = hfta.History(torch.tensor([member.config["seed"] for member in members]))
        history.members = torch.tensor(self.population.last, dtype=torch.int64)
        for epoch in range(max((member.epoch for member in members), default=0)):
            rows = [member.metrics[epoch] if epoch < len(member.metrics) else {} for member in members]
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
            history.epochs.append({name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()})
        return history

    def note(self, trial: Trial) -> None:
        """Note a trial that is better than all before it."""
        value = trial.values[-1][0]
        if len(self.metrics) == 1 and self.score(value) > (
            self.score(self.trajectory[-1][2]) if self.trajectory else -math.inf
        ):
            self.trajectory.append((sum(member.seconds for member in self.population.members), trial.number, value))

    def restore(self, trials: Sequence[Mapping[str, Any]], trajectory: Sequence[Sequence[Any]]) -> None:
        """Take over trials that were kept."""
        self.trajectory = [(seconds, number, value) for seconds, number, value in trajectory]
        self.trials = [Trial(**{**trial, "values": [tuple(found) for found in trial["values"]]}) for trial in trials]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return self.population.interrupted

    @property
    def best(self) -> Trial:
        """The best of the trials that are complete; of equal ones, the first.

        Raises:
            ValueError: if no trial is complete, or there are several objectives; ``optuna.best_trials`` has their front.
        """
        if len(self.metrics) > 1:
            raise ValueError("there are several objectives; study.optuna.best_trials has their front")
        complete = [trial for trial in self.trials if trial.status == "complete"]
        if not complete:
            raise ValueError("no trial is complete; train for more epochs, or look at study.frame()")
        return max(complete, key=lambda trial: self.score(trial.values[-1][0]))

    def score(self, value: float) -> float:
        """A value of the first objective, larger if better, and minus infinity if it is not finite."""
        if not math.isfinite(value):
            return -math.inf
        return value if self.directions[0] == "maximize" else -value

    def state(self, trial: int) -> Any:
        """The state of a trial that was not stopped, one member per seed."""
        found = self.trials[trial]
        if found.status in ("stopped", "failed"):
            raise ValueError(
                f"trial {trial} is {found.status}, and its state is gone; only complete trials keep theirs"
            )
        group = [self.population.state(member) for member in found.members]
        return hfta.concat(group) if len(group) > 1 else group[0]

    def export(self, trial: int, seed: int = 0) -> nn.Module:
        """A member of a trial as an ordinary module.

        Args:
            trial: The trial's number.
            seed: Which of its members, counted from 0.
        """
        self.state(trial)
        if not 0 <= seed < len(self.trials[trial].members):
            raise ValueError(f"seed is {seed}, but trial {trial} has {len(self.trials[trial].members)} members, from 0")
        return self.population.export(self.trials[trial].members[seed])

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per trial.

        Returns:
            Columns ``trial``; the parameters, as they are now; ``status``; ``epochs``; ``seconds``, the trial's share of
            the time of the arrays that it trained in; and the objectives at its last rung.

        Raises:
            ImportError: if pandas is not installed.
        """
        return frame_of(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for trial in self.trials:
            members = [self.population.members[member] for member in trial.members]
            values = trial.values[-1] if trial.values else (math.nan,) * len(self.metrics)
            rows.append(
                {"trial": trial.number, **{name: members[0].config[name] for name in trial.params}}
                | {"status": trial.status, "epochs": max(member.epoch for member in members)}
                | {"seconds": sum(member.seconds for member in members)}
                | dict(zip(self.metrics, values, strict=True))
            )
        return rows

    def write(self, folder: PathLike) -> None:
        """Write the rows of :meth:`frame` to ``history.csv``, and :attr:`trajectory` to ``trajectory.csv``, in a folder."""
        write_tables(folder, self._rows(), self.metrics[0], self.trajectory)

    def by_seed(self) -> dict[int, dict[int, float]]:
        """The first objective of every complete trial by its number and seed, for :func:`hfta_func.compare`, best first."""
        complete = [trial for trial in self.trials if trial.status == "complete"]
        complete.sort(key=lambda trial: -self.score(trial.values[-1][0]))
        members = self.population.members
        return {
            trial.number: {members[m].config["seed"]: members[m].value(self.metrics[0]) for m in trial.members}
            for trial in complete
        }

    def lead(self, trial: Trial, other: Trial, epoch: int) -> float:
        """The t statistic of two trials' differences after an epoch, over pairs of seeds; larger if the first is better."""
        pairs = zip(trial.members, other.members, strict=True)
        members = self.population.members
        differences = [
            self.score(members[own].value(self.metrics[0], epoch - 1))
            - self.score(members[its].value(self.metrics[0], epoch - 1))
            for own, its in pairs
        ]
        if trial is other:
            return 0.0
        if not all(map(math.isfinite, differences)):
            return -math.inf
        mean = statistics.fmean(differences)
        deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
        return mean / (deviation / math.sqrt(len(differences)) + 1e-12)

    def value(self, trial: Trial, epoch: int) -> tuple[float, ...]:
        """The objectives of a trial after an epoch, over its members."""
        found = []
        for metric, direction in zip(self.metrics, self.directions, strict=True):
            values = [self.population.members[member].value(metric, epoch - 1) for member in trial.members]
            # Of infinities of both signs there is none.
            mean = statistics.fmean(values) if len({*values} & {math.inf, -math.inf}) < 2 else math.nan
            if self.rank == "lower" and len(values) > 1 and math.isfinite(mean):
                margin = statistics.NormalDist().inv_cdf(0.95) * statistics.stdev(values) / math.sqrt(len(values))
                mean += margin if direction == "minimize" else -margin
            found.append(mean)
        return tuple(found)


def notify(callback: Callable[..., Any], study: Study) -> None:
    """Call a callback with study and history, or with the study alone if it takes one argument."""
    try:
        inspect.signature(callback).bind(study)
    except TypeError:
        callback(study, study.history)
    else:
        callback(study)
