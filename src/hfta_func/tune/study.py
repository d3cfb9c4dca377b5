"""The result of a search: trials, their values, and their models."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

import hfta_func as hfta
from hfta_func._types import SIGNS, require
from hfta_func.files.atomic import PathLike
from hfta_func.tune.groups import Member
from hfta_func.tune.options import StudyOptions
from hfta_func.tune.population import Population
from hfta_func.tune.sampling import SamplerSession

if TYPE_CHECKING:
    import optuna
    import pandas


@dataclasses.dataclass
class Trial:
    """One configuration.

    Args:
        number: Its number, in the order in which trials begin.
        params: Its values, by name.
        cohort: The number of its cohort, the trials that it is compared with.
        members: The numbers of its members in the population, one per seed.
        status: ``"running"`` until it is ``"complete"``, ``"stopped"`` by the scheduler, or ``"failed"``.
        values: Its objectives at each rung that it has reached, means over its seeds.
        std: Of several seeds, the standard deviation of each objective at the last of these rungs.
        error: Why it failed.
    """

    number: int
    params: dict[str, Any]
    cohort: int
    members: list[int]
    status: Literal["running", "complete", "stopped", "failed"] = "running"
    values: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    std: tuple[float, ...] = ()
    error: str | None = None


class Study:
    """The result of a search; made by :func:`run`.

    Attributes:
        trials: All trials, by number.
        population: Their members; only those that train, or that ``keep`` names, have a state.
        optuna: The same study as one of Optuna's, for its plots, importances and fronts; a callback ends the study by its
            ``stop()``.
        trajectory: For each new best value, at any rung: seconds of training until then, the trial's number, and the value.
        interrupted: Whether Ctrl-C, ``timeout`` or ``optuna.stop()`` ended it.
    """

    def __init__(self, population: Population, session: SamplerSession, options: StudyOptions):
        self.trials: list[Trial] = []
        self.population, self.session = population, session
        self.optuna: optuna.Study = session.study
        self.metrics, self.directions = options.metrics, options.directions
        self.trajectory: list[tuple[float, int, float]] = []

    def __repr__(self) -> str:
        best = self.ranked()[:1] if len(self.metrics) == 1 else []
        shown = [f"; best is trial {trial.number}, {self.metrics[0]} {trial.values[-1][0]:.4g}" for trial in best]
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        return f"<Study of {len(self.trials)} trials ({counts}){''.join(shown)}>"

    @property
    def counts(self) -> dict[str, int]:
        """The number of trials of each status."""
        statuses = [trial.status for trial in [*self.trials]]
        return {status: statuses.count(status) for status in ("running", "complete", "stopped", "failed")}

    def members_of(self, trial: Trial) -> list[Member]:
        """The members of a trial, one per seed."""
        return [self.population.members[number] for number in trial.members]

    def note(self, trial: Trial, epoch: int, rungs: int = 1) -> None:
        """Add what a trial has after an epoch to its rungs, and to :attr:`trajectory` if it is better than all before it."""
        trial.values += [self.value(trial, epoch)] * rungs
        trial.std, value = self.std(trial, epoch), trial.values[-1][0]
        best = self.score(self.trajectory[-1][2]) if self.trajectory else -math.inf
        if len(self.metrics) == 1 and self.score(value) > best:
            self.trajectory.append((sum(member.seconds for member in self.population.members), trial.number, value))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C, ``timeout`` or ``optuna.stop()`` ended the search."""
        return self.population.interrupted

    @property
    def best(self) -> Trial:
        """The best of the trials that are complete and fulfil the sampler's constraints; of equal ones, the first.

        Raises:
            ValueError: if there is no such trial, or there are several objectives; ``optuna.best_trials`` has their front.
        """
        if len(self.metrics) > 1:
            raise ValueError("there are several objectives; study.optuna.best_trials has their front")
        if not (ranked := self.ranked()):
            raise ValueError("no trial is complete and fulfils the sampler's constraints; look at study.frame()")
        return ranked[0]

    def ranked(self, feasible: bool = True) -> list[Trial]:
        """The complete trials, best first, or those that fulfil the sampler's constraints; equal ones keep their order.

        Of several objectives those of the front.
        """
        if len(self.metrics) > 1:
            return [self.trials[trial.number] for trial in self.optuna.best_trials]
        complete = [trial for trial in self.trials if trial.status == "complete"]
        if feasible:
            known = self.optuna.get_trials(deepcopy=False)
            complete = [one for one in complete if all(value <= 0 for value in known[one.number].constraints.values())]
        return sorted(complete, key=lambda trial: -self.score(trial.values[-1][0]))

    def score(self, value: float) -> float:
        """A value of the first objective, negated if small values are better; minus infinity if it is not finite."""
        return -SIGNS[self.directions[0]] * value if math.isfinite(value) else -math.inf

    def state(self, trial: int) -> Any:
        """The state of a trial, one member per seed; of complete trials, ``keep`` of :func:`run` says which have one."""
        members = self.trials[trial].members
        if not {*members} <= {*self.population.alive}:
            text = f"trial {trial} is {self.trials[trial].status}, and its state is gone"
            raise ValueError(f"{text}; train with keep='all', or a larger number, which keeps those of complete trials")
        return hfta.concat([self.population.state(member) for member in members])

    def export(self, trial: int, seed: int = 0) -> nn.Module:
        """A member of a trial as an ordinary module.

        Args:
            trial: The trial's number.
            seed: The index of its seed, from 0.
        """
        self.state(trial)
        return self.population.export(self.trials[trial].members[seed])

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per trial.

        Returns:
            Columns ``trial``; the parameters, as they are now; ``status``; ``epochs``; ``seconds``, the trial's share of
            the time of the arrays that it trained in; and the objectives at its last rung, of several seeds the mean,
            and with ``_std`` behind the name the standard deviation.
        """
        return require("pandas", "plot").DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """The rows of :meth:`frame`."""
        rows: list[dict[str, Any]] = []
        names = dict.fromkeys(name for trial in self.trials for name in trial.params)
        for trial in self.trials:
            members = self.members_of(trial)
            values = trial.values[-1] if trial.values else (math.nan,) * len(self.metrics)
            row: dict[str, Any] = {"trial": trial.number, **{name: members[0].config.get(name) for name in names}}
            row |= {"status": trial.status, "epochs": max(member.epoch for member in members)}
            row |= {"seconds": sum(one.seconds for one in members), **dict(zip(self.metrics, values, strict=True))}
            row |= {f"{name}_std": value for name, value in zip(self.metrics, trial.std, strict=False)}
            rows.append(row)
        return rows

    def by_seed(self) -> dict[int, dict[int, float]]:
        """The first objective of every complete trial by its number and seed, for :func:`hfta_func.compare`, best first."""
        ranked, name = self.ranked(feasible=False), self.metrics[0]
        return {each.number: {one.config["seed"]: one.value(name) for one in self.members_of(each)} for each in ranked}

    def value(self, trial: Trial, epoch: int) -> tuple[float, ...]:
        """The objectives of a trial after an epoch: means over its members."""
        # Infinities of both signs have no mean.
        both = {math.inf, -math.inf}
        return tuple(math.nan if both <= {*each} else statistics.fmean(each) for each in self._by_member(trial, epoch))

    def std(self, trial: Trial, epoch: int) -> tuple[float, ...]:
        """Their standard deviations over its members; none of a single member."""
        each = self._by_member(trial, epoch) if len(trial.members) > 1 else []
        return tuple(statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan for values in each)

    def _by_member(self, trial: Trial, epoch: int) -> list[list[float]]:
        return [[one.value(metric, epoch - 1) for one in self.members_of(trial)] for metric in self.metrics]


def tensorboard(folder: PathLike) -> Callable[..., None]:
    """Write a study to TensorBoard, a run per trial with its hyperparameters, as a callback for :func:`run`.

    Each metric is the mean over the trial's seeds after every epoch; with several seeds, ``loss/0``, ``loss/1``, ... are
    the metrics of its members. TensorBoard's page HPARAMS has a row per trial, with the values that it began with.

    Args:
        folder: The folder of the runs ``trial-0000``, ``trial-0001``, ..., each written anew when its trial has trained.

    Raises:
        ImportError: if TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> callback = tensorboard(tempfile.mkdtemp())
    """
    require("torch.utils.tensorboard", "tensorboard")
    shown: dict[int, tuple[int, str]] = {}

    def record(study: Study) -> None:
        for trial in study.trials:
            epochs = min(len(study.population.members[member].metrics) for member in trial.members)
            if epochs and shown.get(trial.number) != (epochs, trial.status):
                shown[trial.number] = epochs, trial.status
                _write(study, trial, epochs, os.path.join(folder, f"trial-{trial.number:04d}"))

    return record


def _write(study: Study, trial: Trial, epochs: int, folder: str) -> None:
    board = require("torch.utils.tensorboard", "tensorboard")
    members = [study.population.members[member].metrics for member in trial.members]
    shown = {name: each if isinstance(each, bool | int | float) else str(each) for name, each in trial.params.items()}
    shutil.rmtree(folder, ignore_errors=True)
    with board.SummaryWriter(folder) as writer:
        begun: Any = board.summary.hparams(shown, dict.fromkeys(study.metrics, 0.0))
        for summary in begun if trial.status != "running" else begun[:2]:
            writer.file_writer.add_summary(summary)
        for epoch in range(epochs):
            for name in members[0][epoch]:
                values = [metrics[epoch][name] for metrics in members]
                each = {f"{name}/{index}": value for index, value in enumerate(values)} if len(values) > 1 else {}
                for tag, value in {name: sum(values) / len(values), **each}.items():
                    writer.add_scalar(tag, value, epoch + 1)
