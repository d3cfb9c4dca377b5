"""The schedulers of the package; except for asynchronous halving, results do not depend on how trials share arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Mapping
from typing import Any

from hfta_func._types import check_counts
from hfta_func.tune.cohorts import Cohort, Copy, Scheduler, Verdict


@dataclasses.dataclass(frozen=True)
class _Halving(Scheduler):
    eta: float
    first: int
    waits = True

    def __post_init__(self) -> None:
        check_counts(first=self.first)
        if not self.eta > 1:
            raise ValueError(f"eta is {self.eta}; it must be greater than 1")

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        rungs, rung = [], float(self.first)
        while rung < epochs:
            rungs.append(int(rung + 1e-9))
            rung *= self.eta
        return [Cohort(trials, (*dict.fromkeys(rungs), epochs))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        rung = cohort.complete_rung
        if rung == 0:
            return {}
        # Of all trials that have reached the rung, so that a later call gives the same answer.
        reached = _at(cohort, rung)
        going = set(_best(reached)[: max(1, int(len(reached) / self.eta + 1e-9))])
        at_rung = [trial for trial, values in cohort.alive.items() if len(values) == rung]
        return {trial: "go" if trial in going else "stop" for trial in at_rung}


@dataclasses.dataclass(frozen=True)
class _Hyperband(_Halving):
    skip_last: int

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        brackets, most = [], int(math.log(epochs) / math.log(self.eta) + 1e-9)
        for bracket in range(most, -1, -1):
            each = (int(epochs * self.eta ** (rung - bracket) + 1e-9) for rung in range(bracket + 1))
            # Of a small eta, several rungs are in one epoch.
            rungs = tuple(dict.fromkeys(each))
            if rungs := rungs[: max(0, len(rungs) - self.skip_last)]:
                brackets.append((math.ceil((most + 1) / (bracket + 1) * self.eta**bracket - 1e-9), rungs))
        if not brackets:
            raise ValueError(f"skip_last={self.skip_last} leaves out all rungs of {epochs} epochs; pass a smaller one")
        if trials:
            # For another number in all, in the same proportions.
            sums = [0, *itertools.accumulate(count for count, _ in brackets)]
            edges = itertools.pairwise(round(trials * count / sums[-1]) for count in sums)
            brackets = [(high - low, rungs) for (low, high), (_, rungs) in zip(edges, brackets, strict=True)]
        return [Cohort(count, rungs) for count, rungs in brackets if count]


def _at(cohort: Cohort, rung: int) -> dict[int, float]:
    """The values at a rung, counted from 1, of all trials that have reached it."""
    return {trial: values[rung - 1] for trial, values in cohort.values.items() if len(values) >= rung}


def _best(values: Mapping[int, float]) -> list[int]:
    """The trials whose value is finite, best first; equal ones keep their order."""
    return sorted((trial for trial in values if values[trial] > -math.inf), key=lambda trial: -values[trial])


@dataclasses.dataclass(frozen=True)
class _Asynchronous(_Halving):
    waits = False

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        verdicts: dict[int, Verdict] = {}
        alive = cohort.alive
        for rung in range(1, len(cohort.rungs)):
            reached = _at(cohort, rung)
            best = _best(reached)[: int(len(reached) / self.eta + 1e-9)]
            verdicts |= {trial: "go" for trial in best if len(alive.get(trial, ())) == rung}
        return verdicts


@dataclasses.dataclass(frozen=True)
class _Every(Scheduler):
    every: int

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        return [Cohort(trials, (*range(self.every, epochs, self.every), epochs))]


@dataclasses.dataclass(frozen=True)
class _Median(_Every):
    warmup: int
    startup: int

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        verdicts: dict[int, Verdict] = {}
        values, ended = cohort.values, cohort.ended
        for trial, reached in values.items():
            rung = len(reached)
            behind = [n for n, other in values.items() if n < trial and len(other) < rung and n not in ended]
            if not rung or trial in ended or behind:
                continue
            # Of earlier trials, so that the result does not depend on how trials share arrays.
            earlier = (other for number, other in values.items() if number < trial and len(other) >= rung)
            averages = [statistics.fmean(other[:rung]) for other in earlier]
            late = cohort.rungs[rung - 1] > self.warmup and len(averages) >= self.startup
            verdicts[trial] = "stop" if late and max(reached) < statistics.median(averages) else "go"
        return verdicts


@dataclasses.dataclass(frozen=True)
class PopulationBased(_Every):
    """Made by :func:`population_based`; one cohort that never shrinks."""

    share: float
    factors: tuple[float, float]
    resample: float
    waits = True
    copies = True

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        """Once all have reached a rung, the worst copy the best with similar hyperparameters, and the others go on."""
        alive, rung = cohort.alive, cohort.complete_rung
        if rung == 0:
            return {}
        at_rung = [trial for trial, values in alive.items() if len(values) == rung]
        verdicts: dict[int, Verdict] = {trial: "go" for trial in at_rung}
        for group in cohort.groups(alive):
            for copy, source in self.pairs({trial: alive[trial][rung - 1] for trial in group}):
                if copy not in at_rung:
                    continue
                # From seed, rung and trial alone, so that a resumed study draws the same again.
                draws, params = random.Random(f"{cohort.seed} {rung} {copy}"), cohort.params[source]
                fusible = {name: value for name, value in params.items() if name not in cohort.nonfusible}
                changes = {name: self.explored(cohort.space[name], value, draws) for name, value in fusible.items()}
                verdicts[copy] = Copy(source, changes)
        return verdicts

    def pairs(self, values: Mapping[int, float]) -> list[tuple[int, int]]:
        """Pairs of a trial and the one that it copies: the worst and the best; of two or more trials, at least one pair."""
        ranked = sorted(values, key=lambda trial: -values[trial])
        count = min(max(1, int(len(ranked) * self.share + 1e-9)), len(ranked) // 2)
        return list(zip(ranked[::-1][:count], ranked[:count], strict=True))

    def explored(self, distribution: Any, value: Any, draws: random.Random) -> Any:
        """A value of a hyperparameter near ``value``, or a new draw from its distribution."""
        if hasattr(distribution, "choices"):
            return draws.choice(distribution.choices) if draws.random() < self.resample else value
        low, high = distribution.low, distribution.high
        if draws.random() < self.resample:
            share = draws.random()
            new = low * (high / low) ** share if distribution.log else low + (high - low) * share
        else:
            new = value * draws.choice(self.factors)
        if distribution.step is not None:
            new = low + round((new - low) / distribution.step) * distribution.step
        return type(value)(min(max(new, low), high))


def halving(eta: float = 3, first: int = 1) -> Scheduler:
    """Successive halving: at every rung the best 1 in ``eta`` go on (Jamieson and Talwalkar, 2016).

    Args:
        eta: Number of trials for each that goes on, and the ratio of the epochs of two successive rungs.
        first: Epochs to the first rung.
    """
    return _Halving(eta, first)


def hyperband(eta: float = 3, skip_last: int = 0) -> Scheduler:
    """Hyperband: brackets of successive halving, from many trials that are halved often to few that never are.

    With R epochs and ``eta`` there are ``s_max + 1 = floor(log_eta R) + 1`` brackets; bracket ``s`` starts
    ``ceil((s_max + 1) / (s + 1) * eta**s)`` trials with ``R * eta**-s`` epochs each (Li et al., 2018). Another number of
    trials is divided in the same proportions.

    Args:
        eta: Number of trials for each that goes on, and the ratio of the epochs of two successive rungs.
        skip_last: Number of the last rungs that are left out of every bracket; brackets without other rungs are left out.
    """
    return _Hyperband(eta, 1, skip_last)


def asynchronous_halving(eta: float = 3, first: int = 1) -> Scheduler:
    """Successive halving in which no trial waits for the whole rung (ASHA; Li et al., 2020).

    A trial goes on as soon as it is among the best 1 in ``eta`` of those that have reached its rung; meanwhile, waiting and
    new trials train.

    Args:
        eta: Number of trials for each that goes on, and the ratio of the epochs of two successive rungs.
        first: Epochs to the first rung.
    """
    return _Asynchronous(eta, first)


def median_stopping(every: int = 1, warmup: int = 0, startup: int = 5) -> Scheduler:
    """Stop a trial whose best value is worse than the median of the others' average values (Golovin et al., 2017).

    The others are the trials with smaller numbers.

    Args:
        every: Epochs from one comparison to the next.
        warmup: Epochs in which no trial is stopped.
        startup: Least number of other trials for a comparison.
    """
    check_counts(every=every)
    return _Median(every, warmup, startup)


def population_based(
    every: int = 1, share: float = 0.25, factors: tuple[float, float] = (0.8, 1.25), resample: float = 0.25
) -> PopulationBased:
    """Population-based training: the worst copy the best, with similar hyperparameters (Jaderberg et al., 2017).

    Args:
        every: Epochs from one round to the next.
        share: The share of the trials with equal non-fusible values that copy others in a round, at least one of two,
            at most one half.
        factors: Two factors; a copied hyperparameter is multiplied by one of them at random.
        resample: Probability that it is drawn anew from the space instead.
    """
    check_counts(every=every)
    if not (0 < share <= 0.5 and 0 <= resample <= 1):
        raise ValueError(f"share is {share} and resample is {resample}; pass at most 0.5, and a probability")
    return PopulationBased(every, share, factors, resample)
