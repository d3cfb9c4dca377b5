"""The loop of a study: ask for trials, train them, and decide which go on."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from hfta_func.tune.cohorts import Copy, Verdict
from hfta_func.tune.options import StudyOptions
from hfta_func.tune.sampling import STATES
from hfta_func.tune.study import Study, Trial


class Search:
    """Asks for trials of a study, trains them and decides, until all have ended.

    Optuna's storage holds what is known of the trials. Before the results of an array are told to it, ``save`` writes the
    members, so that a study that is broken off at any moment lacks no state of a trial that goes on.
    """

    def __init__(self, study: Study, options: StudyOptions, most: int | None, save: Callable[[], None]):
        self.study, self.scheduler, self._options, self._save = study, options.scheduler, options, save
        parts, self.cohorts = options.cohorts(study.optuna.user_attrs.get("parts", ()), most)
        study.optuna.set_user_attr("parts", parts)
        self.total = sum(cohort.trials for cohort in self.cohorts)
        self.seeds = range(options.seed, options.seed + options.seeds)
        """Those of every trial's members."""
        self._verdicts: dict[int, Verdict] = {}
        room = study.population.jobs.executor.count * (16 if options.max_models == "auto" else options.max_models)
        self.batch = options.batch or (max(1, room // options.seeds) if study.session.learns else self.total)
        self._until = math.inf if options.timeout is None else time.monotonic() + options.timeout
        self._restore()

    def _restore(self) -> None:
        """Take over the trials of the storage; those that have not ended go on from the members of the population."""
        study, population = self.study, self.study.population
        statuses: dict[str, Any] = {state: status for status, state in STATES.items()}
        for frozen, params in study.session.begun():
            attributes, number = frozen.user_attrs, frozen.number
            trial = self._begin(number, params, attributes["cohort"])
            trial.status = statuses[frozen.state.name]
            if trial.status == "running":
                # Its values follow from its members, which may have none any more.
                continue
            reported = [frozen.intermediate_values.get(rung) for rung in self.rungs_of(trial)]
            values = [(value,) for value in reported if value is not None]
            trial.values = values if len(study.metrics) == 1 else [tuple(frozen.values)] if frozen.values else []
            trial.error, trial.std = attributes.get("error"), tuple(attributes.get("std", ()))
            for member in study.members_of(trial):
                if not member.metrics:
                    member.epoch = attributes.get("epochs", 0)
                    member.seconds = attributes.get("seconds", 0.0) / len(self.seeds)
                    population.drop([member.number] if member.status == "alive" else ())
                    if member.epoch and self.scheduler.copies:
                        text = f"trial {number} has ended, and this study needs the metrics and states of all"
                        raise ValueError(f"{text}; pass the folder that it was run with by resume=, or another name")
        if len(population.members) != len(study.trials) * len(self.seeds):
            text = f"the folder has {len(population.members)} members, but the storage {len(study.trials)} trials"
            raise ValueError(f"{text}; pass the folder and the storage of one study")
        self._release()

    def _begin(self, number: int, params: dict[str, Any], cohort: int) -> Trial:
        """Add a trial, and its members unless a folder has them."""
        members, first = self.study.population.members, number * len(self.seeds)
        trial = Trial(number, params, cohort, [*range(first, first + len(self.seeds))])
        self.study.trials.append(trial)
        if trial.members[-1] >= len(members):
            self.study.population.extend([{**params, "seed": seed} for seed in self.seeds])
        return trial

    def rungs_of(self, trial: Trial) -> tuple[int, ...]:
        """The epochs in which a trial is compared."""
        return self.cohorts[trial.cohort].rungs

    def _next_epoch(self, trial: Trial) -> int:
        """The epoch to which a trial's members train before it is looked at."""
        rung, members = self.rungs_of(trial)[len(trial.values)], self.study.members_of(trial)
        # Members may be in several arrays, and none goes ahead of the others past the target.
        return rung if self._options.target is None else min(rung, 1 + min(one.epoch for one in members))

    def rounds(self) -> Iterator[bool]:
        """Train one segment of an array after another; yields True after each, and False when there are new trials."""
        study = self.study
        self._judge()
        while not study.interrupted:
            left = 0.0 if study.session.is_stopped else self._until - time.monotonic()
            if left > 0 and self._ask():
                yield False
            going = [trial for trial in self._running() if left > 0 and self._goes(trial)]
            targets = {number: self._next_epoch(trial) for trial in going for number in trial.members}
            before = len(self._running())
            if trained := study.population.advance(targets, None if math.isinf(left) else left):
                self._save()
            self._judge()
            if trained:
                yield True
            elif left <= 0:
                return
            elif len(waiting := self._running()) == before:
                if not waiting and self._next_cohort() is None:
                    return
                # No trial is left that they could be compared with.
                self._end(waiting, "stopped")
                self._release()

    def _running(self) -> list[Trial]:
        return [trial for trial in self.study.trials if trial.status == "running"]

    def _goes(self, trial: Trial) -> bool:
        return not trial.values or self._verdicts.get(trial.number, "stop") != "stop"

    def _next_cohort(self) -> int | None:
        """The number of the first cohort that lacks trials."""
        counts = collections.Counter(trial.cohort for trial in self.study.trials)
        return next((number for number, cohort in enumerate(self.cohorts) if counts[number] < cohort.trials), None)

    def _ask(self) -> bool:
        """Ask for as many new trials as may train now; returns whether there are any."""
        study, before = self.study, len(self.study.trials)
        while (cohort := self._next_cohort()) is not None:
            running = self._running()
            if self.scheduler.waits:
                # A cohort as a whole; if the sampler learns from results, after the cohorts before it.
                if study.session.learns and running and not any(trial.cohort == cohort for trial in study.trials):
                    break
            elif sum(map(self._goes, running)) >= self.batch:
                break
            asked, params = study.session.ask()
            self._options.check_names(params)
            self._begin(asked.number, params, cohort)
            study.session.note(asked.number, cohort=cohort)
        return len(study.trials) > before

    def _end(self, trials: Sequence[Trial], status: Literal["complete", "stopped", "failed"]) -> None:
        session = self.study.session
        for trial in trials:
            trial.status = status
            members = self.study.members_of(trial)
            epochs, seconds = max(one.epoch for one in members), sum(one.seconds for one in members)
            known = {"std": [*trial.std]} if trial.std else {}
            known |= {"error": trial.error} if trial.error else {}
            session.note(trial.number, epochs=epochs, seconds=seconds, **known)
            session.tell(trial.number, status, trial.values[-1] if trial.values else None)

    def _release(self) -> None:
        """Drop the states of trials that have ended, but of those that ``keep`` names."""
        study, keep = self.study, self._options.keep
        complete = study.ranked(feasible=False)
        if keep != "all" and len(study.metrics) == 1:
            complete = study.ranked()[: 1 if keep == "best" else keep]
        kept = {number for trial in (*self._running(), *complete) for number in trial.members}
        study.population.drop({*study.population.alive} - kept)

    def _judge(self) -> None:
        """Record values at rungs, and decide which trials go on."""
        study = self.study
        for trial in self._running():
            members, rungs = study.members_of(trial), self.rungs_of(trial)
            if error := next(filter(None, (member.error for member in members)), None):
                trial.error = error
                self._end([trial], "failed")
                continue
            epochs = min(len(member.metrics) for member in members)
            while len(trial.values) < len(rungs) and epochs >= (rung := rungs[len(trial.values)]):
                study.note(trial, rung)
            if len(study.metrics) == 1:
                # Each report is a transaction of the storage; one per epoch may take longer than small models train.
                stride = math.ceil(rungs[-1] / 10)
                shown = {*rungs[: len(trial.values)], *range(stride, epochs + 1, stride)}
                study.session.report(trial.number, {epoch: study.value(trial, epoch)[0] for epoch in sorted(shown)})
            target, left = self._options.target, rungs[len(trial.values) :]
            if target is not None and epochs and left:
                last = study.value(trial, epochs)
                # Metrics in float32 may be a little off the number that is meant.
                if study.score(last[0]) >= study.score(target) - 1e-6 * abs(target):
                    study.note(trial, epochs, len(left))
                    study.session.report(trial.number, dict.fromkeys(left, last[0]))
            if len(trial.values) == len(rungs):
                named = [*zip(study.metrics, trial.values[-1], strict=True)]
                if not all(math.isfinite(value) for _, value in named):
                    trial.error = ", ".join(f"{name} is {value} after epoch {rungs[-1]}" for name, value in named)
                self._end([trial], "failed" if trial.error else "complete")
        self._decide()
        self._release()

    def _decide(self) -> None:
        """Have the scheduler decide about every cohort; what it decided before a study was broken off, it decides again."""
        study, self._verdicts = self.study, {}
        for number, cohort in enumerate(self.cohorts):
            trials = [trial for trial in study.trials if trial.cohort == number]
            values = {trial.number: [study.score(value[0]) for value in trial.values] for trial in trials}
            ended = frozenset(trial.number for trial in trials if trial.status in ("stopped", "failed"))
            params = {trial.number: trial.params for trial in trials}
            known = dict(space=study.session.space, nonfusible=study.population.nonfusible, seed=self.seeds[0])
            cohort = cohort._replace(values=values, ended=ended, params=params, **known)
            verdicts = self.scheduler.decide(cohort)
            cohort.check(verdicts, self.scheduler.copies)
            self._verdicts |= verdicts
            self._copy(verdicts)
            stopped = [study.trials[number] for number, verdict in verdicts.items() if verdict == "stop"]
            self._end([trial for trial in stopped if trial.status == "running"], "stopped")

    def _copy(self, verdicts: Mapping[int, Verdict]) -> None:
        """Have trials copy others, unless an earlier call has carried out the same verdict."""
        study, trials, by_names = self.study, self.study.trials, collections.defaultdict[Any, dict[int, Copy]](dict)
        for number, verdict in verdicts.items():
            trial = trials[number]
            member = study.members_of(trial)[0]
            is_at_rung = member.epoch == self.rungs_of(trial)[len(trial.values) - 1]
            has_copied = bool(member.parents) and member.parents[-1][0] == member.epoch
            if isinstance(verdict, Copy) and is_at_rung and not has_copied:
                by_names[tuple(sorted(verdict.changes))][number] = verdict
        for names, copies in by_names.items():
            pairs = [(trials[number].members[0], trials[copy.source].members[0]) for number, copy in copies.items()]
            study.population.copy(pairs, **{name: [copy.changes[name] for copy in copies.values()] for name in names})
            for number, copy in copies.items():
                trials[number].params |= copy.changes
                study.session.note(number, params=trials[number].params)
