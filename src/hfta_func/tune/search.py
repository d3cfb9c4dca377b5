"""Who is asked for, who trains, and who goes on: the course of a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import hfta_func as hfta
from hfta_func.tune.cohorts import Cohort, Copy, Scheduler, Verdict
from hfta_func.tune.study import Study, Trial


class Search:
    """Asks, trains and decides, until all trials have ended."""

    def __init__(
        self,
        study: Study,
        scheduler: Scheduler,
        cohorts: list[Cohort],
        seeds: Sequence[int],
        batch: int | None,
        max_models: int | Literal["auto"],
    ):
        self.study, self.scheduler, self.cohorts, self.seeds = study, scheduler, cohorts, seeds
        size = max_models if isinstance(max_models, int) else 16
        learns = study.asking.learns
        self._verdicts: dict[int, Verdict] = {}
        executor = study.population.jobs.executor
        room = sum(executor.limits) or executor.count * size
        self.batch = batch or (max(1, room // len(seeds)) if learns else sum(cohort.trials for cohort in cohorts))
        self.learns = learns

    @property
    def planned(self) -> int:
        """About how many epochs all members train in all: those of the trials that go on, where their share is known."""
        eta, total = getattr(self.scheduler, "eta", 1), 0
        for cohort in self.cohorts:
            before = 0
            for place, rung in enumerate(cohort.rungs):
                total += (rung - before) * max(min(1, cohort.trials), int(cohort.trials / eta**place + 1e-9))
                before = rung
        return total * len(self.seeds)

    def rungs_of(self, trial: Trial) -> tuple[int, ...]:
        """The epochs in which a trial is compared."""
        return self.cohorts[trial.cohort].rungs

    def reports_of(self, trial: Trial) -> dict[int, float]:
        """A single objective at the rungs that a trial has reached, and at epochs between them, some ten in all."""
        study, rungs = self.study, self.rungs_of(trial)
        if len(study.metrics) > 1:
            return {}
        epochs = min(len(study.population.members[member].metrics) for member in trial.members)
        # A report is a transaction of the storage, of which one per epoch may take longer than small models train.
        stride = math.ceil(rungs[-1] / 10)
        shown = {*rungs[: len(trial.values)], *range(stride, epochs + 1, stride)}
        return {epoch: study.value(trial, epoch)[0] for epoch in sorted(shown)}

    def rounds(self) -> Iterator[bool]:
        """One array's segment after another; False before a segment for which trials were asked, True after each."""
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
                # Nobody is left whom they could be compared with.
                self._end(waiting, "stopped")
                continue
            self._judge()
            yield True

    def _goes(self, trial: Trial) -> bool:
        return not trial.values or self._verdicts.get(trial.number, "stop") != "stop"

    def _next_cohort(self) -> int | None:
        counts = [0] * len(self.cohorts)
        for trial in self.study.trials:
            counts[trial.cohort] += 1
        return next((place for place, one in enumerate(self.cohorts) if counts[place] < one.trials), None)

    def _ask(self) -> bool:
        """New trials, as many as may train now; whether there are any."""
        study, new = self.study, []
        while (place := self._next_cohort()) is not None:
            running = [trial for trial in study.trials if trial.status == "running"]
            started = any(trial.cohort == place for trial in study.trials)
            going = [trial for trial in running if self._goes(trial)]
            if self.scheduler.waits:
                # A cohort whole, after those before it if the sampler learns from them.
                if self.learns and not started and running:
                    break
            elif len(going) >= self.batch:
                break
            number = len(study.trials)
            params = study.asking.ask()
            trial = Trial(number, params, place, [])
            study.trials.append(trial)
            new.append(trial)
        self._make(new)
        return bool(new)

    def _make(self, new: Sequence[Trial]) -> None:
        if not new:
            return
        rows = [{**trial.params, "seed": seed} for trial in new for seed in self.seeds]
        try:
            numbers = self.study.population.extend(rows)
        except BaseException:
            # Ctrl-C, or what build must not return: a trial is one only once it has members.
            del self.study.trials[new[0].number :]
            raise
        for place, trial in enumerate(new):
            trial.members = numbers[place * len(self.seeds) : (place + 1) * len(self.seeds)]
        if self.scheduler.copies:
            self._check_names()
        self._fail()

    def _check_names(self) -> None:
        """Refuse names that :meth:`_copy` could not change, before anything has trained."""
        population = self.study.population
        for number in population.alive[:1]:
            config = population.members[number].config
            for name in sorted(set(config) - {"seed", *population.nonfusible}):
                try:
                    hfta.with_hyperparams(population.state(number), **{name: [config[name]]})
                except hfta.HyperparameterError as error:
                    raise ValueError(
                        f"the scheduler changes hyperparameters by name, and '{name}' is none of the state's; "
                        f"name it in the space as the optimizer or hparams do, or pass it as nonfusible ({error})"
                    ) from None

    def _fail(self) -> None:
        for trial in self.study.trials:
            if trial.status == "running":
                errors = [self.study.population.members[member].error for member in trial.members]
                if any(errors):
                    trial.error = next(error for error in errors if error)
                    self._end([trial], "failed")

    def _end(self, trials: Sequence[Trial], status: Literal["complete", "stopped", "failed"]) -> None:
        for trial in trials:
            trial.status = status
            self.study.asking.tell(trial.number, status, trial.values[-1] if trial.values else None)
        if trials and status != "complete":
            gone = {member for trial in trials for member in trial.members}
            self.study.population.keep([member for member in self.study.population.alive if member not in gone])

    def _judge(self) -> None:
        """Record values at rungs, and decide who goes on."""
        study = self.study
        self._fail()
        for trial in study.trials:
            rungs = self.rungs_of(trial)
            if trial.status != "running" or len(trial.values) == len(rungs):
                continue
            epoch = rungs[len(trial.values)]
            if all(study.population.members[member].epoch >= epoch for member in trial.members):
                trial.values.append(study.value(trial, epoch))
                study.asking.report(trial.number, epoch, trial.values[-1])
                study.note(trial)
                if len(trial.values) == len(rungs):
                    if all(math.isfinite(value) for value in trial.values[-1]):
                        self._end([trial], "complete")
                    else:
                        found = zip(study.metrics, trial.values[-1], strict=True)
                        trial.error = ", ".join(f"{name} is {value} after epoch {epoch}" for name, value in found)
                        self._end([trial], "failed")
        self._decide()

    def _decide(self) -> None:
        study = self.study
        self._verdicts = {}
        for place, cohort in enumerate(self.cohorts):
            those = [trial for trial in study.trials if trial.cohort == place]
            values = {trial.number: [study.score(value[0]) for value in trial.values] for trial in those}
            if study.rank == "paired":
                values = self._paired(those, cohort)
            now = cohort._replace(
                values=values,
                ended=frozenset(trial.number for trial in those if trial.status in ("stopped", "failed")),
                params={trial.number: trial.params for trial in those},
                space=study.asking.space,
                nonfusible=study.population.nonfusible,
                seed=self.seeds[0],
            )
            found = self.scheduler.decide(now)
            try:
                now.check(found, self.scheduler.copies)
            except ValueError as error:
                raise ValueError(f"{type(self.scheduler).__qualname__}: {error}") from None
            self._verdicts |= found
            self._copy(found)
            by_number = {trial.number: trial for trial in those}
            self._end(
                [
                    by_number[n]
                    for n, verdict in found.items()
                    if verdict == "stop" and by_number[n].status == "running"
                ],
                "stopped",
            )

    def _paired(self, those: Sequence[Trial], cohort: Cohort) -> dict[int, list[float]]:
        """Of every trial at each rung, the t statistic of its differences from the one with the best mean; 0 for that one."""
        study, found = self.study, {trial.number: [] for trial in those}
        for rung, epoch in enumerate(cohort.rungs):
            here = [trial for trial in those if len(trial.values) > rung]
            best = max(here, key=lambda trial: study.score(trial.values[rung][0]), default=None)
            for trial in here:
                found[trial.number].append(-math.inf if best is None else study.lead(trial, best, epoch))
        return found

    def replay(self) -> None:
        """What was decided before a study was broken off follows from the values that it has kept."""
        self._decide()

    def _copy(self, verdicts: Mapping[int, Verdict]) -> None:
        """Have trials go on from others; a verdict that is given again was carried out before."""
        study = self.study
        by_names: dict[tuple[str, ...], dict[int, Copy]] = {}
        for number, verdict in verdicts.items():
            trial = study.trials[number]
            member = study.population.members[trial.members[0]]
            stands = member.epoch == self.rungs_of(trial)[len(trial.values) - 1]
            if isinstance(verdict, Copy) and stands and (not member.parents or member.parents[-1][0] != member.epoch):
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
                study.asking.change(number, trial.params)
