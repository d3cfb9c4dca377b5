"""The loop of a study: ask for trials, train them, and decide which go on."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import hfta_func as hfta
from hfta_func.tune.cohorts import Cohort, Copy, Scheduler, Verdict
from hfta_func.tune.options import StudyOptions
from hfta_func.tune.study import Study, Trial


class Search:
    """Asks for trials of a study, trains them and decides, until all have ended."""

    def __init__(self, study: Study, options: StudyOptions):
        self.study, self.scheduler, self.cohorts = study, options.scheduler or Scheduler(), options.cohorts
        self._options = options
        self.seeds = range(options.seed, options.seed + options.seeds)
        """Those of every trial's members."""
        self.learns = study.session.learns
        self._verdicts: dict[int, Verdict] = {}
        executor = study.population.jobs.executor
        room = sum(executor.limits) or executor.count * (16 if options.max_models == "auto" else options.max_models)
        at_once = max(1, room // options.seeds) if self.learns else sum(cohort.trials for cohort in self.cohorts)
        self.batch = options.batch or at_once

    @property
    def planned(self) -> int:
        """About the number of epochs that all members train in all, by the share of trials that go on, if it is known."""
        eta, total = getattr(self.scheduler, "eta", 1), 0
        for cohort in self.cohorts:
            for number, (start, end) in enumerate(itertools.pairwise((0, *cohort.rungs))):
                total += (end - start) * max(min(1, cohort.trials), int(cohort.trials / eta**number + 1e-9))
        return total * len(self.seeds)

    def rungs_of(self, trial: Trial) -> tuple[int, ...]:
        """The epochs in which a trial is compared."""
        return self.cohorts[trial.cohort].rungs

    def reports_of(self, trial: Trial) -> dict[int, float]:
        """A single objective at the rungs that a trial has reached, and at about ten epochs in all; by epoch."""
        study, rungs = self.study, self.rungs_of(trial)
        if len(study.metrics) > 1:
            return {}
        epochs = min(len(study.population.members[member].metrics) for member in trial.members)
        # Each report is a transaction of the storage; one per epoch may take longer than small models train.
        stride = math.ceil(rungs[-1] / 10)
        shown = {*rungs[: len(trial.values)], *range(stride, epochs + 1, stride)}
        return {epoch: study.value(trial, epoch)[0] for epoch in sorted(shown)}

    def rounds(self) -> Iterator[bool]:
        """Train one segment of an array after another; yields True after each, and False when there are new trials."""
        while not self.study.interrupted:
            if self._ask():
                yield False
            targets = {
                member: self.rungs_of(trial)[len(trial.values)]
                for trial in self.study.trials
                if trial.status == "running" and self._goes(trial)
                for member in trial.members
            }
            trained = self.study.population.advance(targets)
            if not trained:
                waiting = [trial for trial in self.study.trials if trial.status == "running"]
                if not waiting and self._next_cohort() is None:
                    return
                # No trial is left that they could be compared with.
                self._end(waiting, "stopped")
                continue
            self._judge()
            yield True

    def _goes(self, trial: Trial) -> bool:
        return not trial.values or self._verdicts.get(trial.number, "stop") != "stop"

    def _next_cohort(self) -> int | None:
        """The number of the first cohort that lacks trials."""
        counts = collections.Counter(trial.cohort for trial in self.study.trials)
        return next((number for number, cohort in enumerate(self.cohorts) if counts[number] < cohort.trials), None)

    def _ask(self) -> bool:
        """Ask for as many new trials as may train now; returns whether there are any."""
        study, new = self.study, []
        while (cohort := self._next_cohort()) is not None:
            running = [trial for trial in study.trials if trial.status == "running"]
            started = any(trial.cohort == cohort for trial in study.trials)
            going = [trial for trial in running if self._goes(trial)]
            if self.scheduler.waits:
                # A cohort as a whole; if the sampler learns from results, after the cohorts before it.
                if self.learns and not started and running:
                    break
            elif len(going) >= self.batch:
                break
            params = study.session.ask()
            self._options.check_names(params)
            new.append(Trial(len(study.trials), params, cohort, []))
            study.trials.append(new[-1])
        if not new:
            return False
        try:
            numbers = iter(
                study.population.extend([{**each.params, "seed": seed} for each in new for seed in self.seeds])
            )
        except BaseException:
            # After Ctrl-C or an error of build, trials without members are removed.
            del study.trials[new[0].number :]
            raise
        for trial in new:
            trial.members = [*itertools.islice(numbers, len(self.seeds))]
        if self.scheduler.copies:
            self._check_names()
        self._fail()
        return True

    def _check_names(self) -> None:
        """Refuse names that :meth:`_copy` could not change, before training begins."""
        population = self.study.population
        firsts = {population.group_of(population.members[number]): number for number in reversed(population.alive)}
        for number in firsts.values():
            config = population.members[number].config
            for name in sorted(set(config) - {"seed", *population.nonfusible}):
                try:
                    hfta.with_hyperparams(population.state(number), **{name: [config[name]]})
                except hfta.errors.HyperparameterError as error:
                    raise ValueError(
                        f"the scheduler changes hyperparameters by name, and '{name}' is none of the state's; "
                        f"name it in the space as the optimizer or hparams do, or pass it as nonfusible ({error})"
                    ) from None

    def _fail(self) -> None:
        for trial in self.study.trials:
            if trial.status == "running":
                errors = (self.study.population.members[member].error for member in trial.members)
                trial.error = next(filter(None, errors), None)
                if trial.error:
                    self._end([trial], "failed")

    def _end(self, trials: Sequence[Trial], status: Literal["complete", "stopped", "failed"]) -> None:
        for trial in trials:
            trial.status = status
            self.study.session.tell(trial.number, status, trial.values[-1] if trial.values else None)
        if trials and status != "complete":
            dropped = {member for trial in trials for member in trial.members}
            self.study.population.keep([member for member in self.study.population.alive if member not in dropped])

    def _judge(self) -> None:
        """Record values at rungs, and decide which trials go on."""
        study = self.study
        self._fail()
        for trial in study.trials:
            rungs = self.rungs_of(trial)
            if trial.status != "running" or len(trial.values) == len(rungs):
                continue
            epoch = rungs[len(trial.values)]
            if all(study.population.members[member].epoch >= epoch for member in trial.members):
                trial.values.append(study.value(trial, epoch))
                study.session.report(trial.number, epoch, trial.values[-1])
                study.note(trial)
                if len(trial.values) == len(rungs):
                    if all(math.isfinite(value) for value in trial.values[-1]):
                        self._end([trial], "complete")
                    else:
                        named = zip(study.metrics, trial.values[-1], strict=True)
                        trial.error = ", ".join(f"{name} is {value} after epoch {epoch}" for name, value in named)
                        self._end([trial], "failed")
        self.decide()

    def decide(self) -> None:
        """Have the scheduler decide about every cohort; also replays its decisions when a study is resumed."""
        study = self.study
        self._verdicts = {}
        for number, cohort in enumerate(self.cohorts):
            trials = [trial for trial in study.trials if trial.cohort == number]
            values = {trial.number: [study.score(value[0]) for value in trial.values] for trial in trials}
            if study.rank == "paired":
                values = self._paired(trials, cohort)
            cohort = cohort._replace(
                values=values,
                ended=frozenset(trial.number for trial in trials if trial.status in ("stopped", "failed")),
                params={trial.number: trial.params for trial in trials},
                space=study.session.space,
                nonfusible=study.population.nonfusible,
                seed=self.seeds[0],
            )
            verdicts = self.scheduler.decide(cohort)
            try:
                cohort.check(verdicts, self.scheduler.copies)
            except ValueError as error:
                raise ValueError(f"{type(self.scheduler).__qualname__}: {error}") from None
            self._verdicts |= verdicts
            self._copy(verdicts)
            stopped = [study.trials[number] for number, verdict in verdicts.items() if verdict == "stop"]
            self._end([trial for trial in stopped if trial.status == "running"], "stopped")

    def _paired(self, trials: Sequence[Trial], cohort: Cohort) -> dict[int, list[float]]:
        """For every trial at each rung, the t statistic of its differences from the trial with the best mean, itself 0."""
        study, leads = self.study, {trial.number: [] for trial in trials}
        for rung, epoch in enumerate(cohort.rungs):
            reached = [trial for trial in trials if len(trial.values) > rung]
            if not reached:
                break
            best = max(reached, key=lambda trial: study.score(trial.values[rung][0]))
            for trial in reached:
                leads[trial.number].append(study.lead(trial, best, epoch))
        return leads

    def _copy(self, verdicts: Mapping[int, Verdict]) -> None:
        """Have trials copy others, unless an earlier call has carried out the same verdict."""
        study = self.study
        by_names: dict[tuple[str, ...], dict[int, Copy]] = {}
        for number, verdict in verdicts.items():
            trial = study.trials[number]
            member = study.population.members[trial.members[0]]
            is_at_rung = member.epoch == self.rungs_of(trial)[len(trial.values) - 1]
            has_copied = bool(member.parents) and member.parents[-1][0] == member.epoch
            if isinstance(verdict, Copy) and is_at_rung and not has_copied:
                by_names.setdefault(tuple(sorted(verdict.changes)), {})[number] = verdict
        for names, copies in by_names.items():
            pairs = [
                (study.trials[number].members[0], study.trials[copy.source].members[0])
                for number, copy in copies.items()
            ]
            columns = {name: [copy.changes[name] for copy in copies.values()] for name in names}
            study.population.copy(pairs, **columns)
            for number, copy in copies.items():
                trial = study.trials[number]
                trial.params = {**trial.params, **copy.changes}
                study.session.change(number, trial.params)
