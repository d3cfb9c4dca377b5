"""The schedulers of the package; with all but asynchronous halving, results do not depend on how trials share arrays."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping
from typing import Any

from hfta_func.tune.cohorts import Cohort, Copy, Scheduler, Verdict


@dataclasses.dataclass(frozen=True)
class _Halving(Scheduler):
    eta: float
    first: int
    waits = True

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        return [Cohort(trials, _rungs(self.first, epochs, self.eta))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        alive = cohort.alive
        rung = min((len(found) for found in alive.values()), default=0)
        # A cohort moves on together, once all of it has arrived.
        if rung == 0 or len(cohort.values) < cohort.trials or rung == len(cohort.rungs):
            return {}
        # Of all that ever arrived, so that asking again gives the same answer.
        here = {trial: found[rung - 1] for trial, found in cohort.values.items() if len(found) >= rung}
        going = set(_best(here)[: max(1, int(len(here) / self.eta + 1e-9))])
        return {trial: "go" if trial in going else "stop" for trial, found in alive.items() if len(found) == rung}


@dataclasses.dataclass(frozen=True)
class _Hyperband(_Halving):
    skip_last: int

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        brackets = []
        most = int(math.log(epochs) / math.log(self.eta) + 1e-9)
        for bracket in range(most, -1, -1):
            rungs = tuple(int(epochs * self.eta ** (place - bracket) + 1e-9) for place in range(bracket + 1))
            rungs = rungs[: max(0, len(rungs) - self.skip_last)]
            if rungs:
                brackets.append((math.ceil((most + 1) / (bracket + 1) * self.eta**bracket - 1e-9), rungs))
        if not brackets:
            raise ValueError(
                f"skip_last={self.skip_last} leaves out all rungs of {epochs} epochs; pass a smaller number"
            )
        if trials:
            brackets = _shared_out(trials, brackets)
        return [Cohort(count, rungs) for count, rungs in brackets if count]


def _best(values: Mapping[int, float]) -> list[int]:
    """Trials with a value, best first; of equal ones, the first."""
    return sorted((trial for trial in values if values[trial] > -math.inf), key=lambda trial: -values[trial])


def _shared_out(trials: int, brackets: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """The brackets of another number of trials in all, in the same proportions."""
    total, given, result = sum(count for count, _ in brackets), 0, []
    before = 0
    for count, rungs in brackets:
        before += count
        upto = round(trials * before / total)
        result.append((upto - given, rungs))
        given = upto
    return result


@dataclasses.dataclass(frozen=True)
class _Asynchronous(Scheduler):
    eta: float
    first: int

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        return [Cohort(trials, _rungs(self.first, epochs, self.eta))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        verdicts: dict[int, Verdict] = {}
        values, ended = cohort.values, cohort.ended
        for rung in range(1, len(cohort.rungs)):
            here = {trial: found[rung - 1] for trial, found in values.items() if len(found) >= rung}
            best = _best(here)[: int(len(here) / self.eta + 1e-9)]
            verdicts |= {trial: "go" for trial in best if len(values[trial]) == rung and trial not in ended}
        return verdicts


@dataclasses.dataclass(frozen=True)
class _Median(Scheduler):
    every: int
    warmup: int
    startup: int

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        return [Cohort(trials, tuple(dict.fromkeys([*range(self.every, epochs, self.every), epochs])))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        verdicts: dict[int, Verdict] = {}
        values, ended = cohort.values, cohort.ended
        for trial, found in values.items():
            rung = len(found)
            behind = [n for n, other in values.items() if n < trial and len(other) < rung and n not in ended]
            if not rung or trial in ended or behind:
                continue
            # Of those that were asked for before, so that nothing depends on who trained with whom.
            averages = [
                statistics.fmean(other[:rung])
                for number, other in values.items()
                if number < trial and len(other) >= rung
            ]
            late = cohort.rungs[rung - 1] > self.warmup and len(averages) >= self.startup
            verdicts[trial] = "stop" if late and max(found) < statistics.median(averages) else "go"
        return verdicts


@dataclasses.dataclass(frozen=True)
class PopulationBased(Scheduler):
    """Made by :func:`population_based`."""

    every: int
    share: float
    factors: tuple[float, float]
    resample: float
    waits = True
    copies = True

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        """One cohort that never shrinks."""
        return [Cohort(trials, tuple(dict.fromkeys([*range(self.every, epochs, self.every), epochs])))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        """Once all have arrived, the worst copy the best, with hyperparameters near theirs, and the others go on."""
        alive = cohort.alive
        rung = min((len(found) for found in alive.values()), default=0)
        if rung == 0 or len(cohort.values) < cohort.trials or rung == len(cohort.rungs):
            return {}
        verdicts: dict[int, Verdict] = {}
        names = [name for name in cohort.space if name not in cohort.nonfusible]
        for group in cohort.groups(alive):
            for loser, winner in self.pairs({trial: alive[trial][rung - 1] for trial in group}):
                # From seed, round and trial alone, so that a study that is broken off draws the same again.
                draws = random.Random(f"{cohort.seed} {rung} {loser}")
                source = cohort.params[winner]
                changes = {name: self.explored(cohort.space[name], source[name], draws) for name in names}
                verdicts[loser] = Copy(winner, changes)
        here: dict[int, Verdict] = {
            trial: verdicts.get(trial, "go") for trial, found in alive.items() if len(found) == rung
        }
        return {trial: verdict for trial, verdict in (verdicts | here).items() if trial in here}

    def pairs(self, values: Mapping[int, float]) -> list[tuple[int, int]]:
        """Who copies whom: the worst the best, one each, and at least one of two or more."""
        ranked = sorted(values, key=lambda trial: -values[trial])
        count = min(max(1, int(len(ranked) * self.share + 1e-9)), len(ranked) // 2)
        return list(zip(ranked[::-1][:count], ranked[:count], strict=True))

    def explored(self, distribution: Any, value: Any, draws: random.Random) -> Any:
        """A value of a hyperparameter near another one, or anywhere in its distribution."""
        if hasattr(distribution, "choices"):
            return draws.choice(distribution.choices) if draws.random() < self.resample else value
        low, high = distribution.low, distribution.high
        if draws.random() < self.resample:
            place = draws.random()
            found = low * (high / low) ** place if distribution.log else low + (high - low) * place
        else:
            found = value * draws.choice(self.factors)
        if distribution.step is not None:
            found = low + round((found - low) / distribution.step) * distribution.step
        return type(value)(min(max(found, low), high))


def halving(eta: float = 3, first: int = 1) -> Scheduler:
    """Successive halving: at every rung the best of 1 in ``eta`` go on (Jamieson and Talwalkar, 2016).

    Args:
        eta: How many trials there are for each that goes on, and by how much the next rung is later.
        first: Epochs to the first rung.
    """
    return _Halving(_ratio(eta), _positive("first", first))


def hyperband(eta: float = 3, skip_last: int = 0) -> Scheduler:
    """Hyperband: brackets of successive halving, from many trials that are halved often to few that never are.

    With R epochs and ``eta`` there are ``s_max + 1 = floor(log_eta R) + 1`` brackets; bracket ``s`` starts
    ``ceil((s_max + 1) / (s + 1) * eta**s)`` trials with ``R * eta**-s`` epochs each (Li et al., 2018). Another number of
    trials is divided in the same proportions.

    Args:
        eta: How many trials there are for each that goes on, and by how much the next rung is later.
        skip_last: How many of the last rungs of every bracket are left out; brackets without further rungs are, too.
    """
    if not isinstance(skip_last, int) or skip_last < 0:
        raise ValueError(f"skip_last is {skip_last!r}; pass the number of rungs to leave out, at least 0")
    return _Hyperband(_ratio(eta), 1, skip_last)


def asynchronous_halving(eta: float = 3, first: int = 1) -> Scheduler:
    """Successive halving in which nobody waits for the whole rung (ASHA; Li et al., 2020).

    A trial goes on as soon as it is among the best 1 in ``eta`` of those that have reached its rung; places that fall free
    are taken by trials that wait, and by new ones.

    Args:
        eta: How many trials there are for each that goes on, and by how much the next rung is later.
        first: Epochs to the first rung.
    """
    return _Asynchronous(_ratio(eta), _positive("first", first))


def median_stopping(every: int = 1, warmup: int = 0, startup: int = 5) -> Scheduler:
    """Stop a trial whose best value is worse than the median of the others' average values (Golovin et al., 2017).

    The others are those that were asked for before it.

    Args:
        every: Epochs from one comparison to the next.
        warmup: Epochs in which no trial is stopped.
        startup: How many others there must be.
    """
    return _Median(_positive("every", every), warmup, startup)


def population_based(
    every: int = 1, share: float = 0.25, factors: tuple[float, float] = (0.8, 1.25), resample: float = 0.25
) -> PopulationBased:
    """Population-based training: the worst go on from the best, with hyperparameters near theirs (Jaderberg et al., 2017).

    Args:
        every: Epochs from one round to the next.
        share: The share of the members with equal non-fusible values that copy others in a round, at least one of two,
            at most one half.
        factors: What a copied hyperparameter is multiplied by, one of both at random.
        resample: How often it is drawn anew from the space instead.
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"share is {share}; it must be above 0 and at most 0.5")
    if not 0 <= resample <= 1:
        raise ValueError(f"resample is {resample}; it must be between 0 and 1")
    return PopulationBased(_positive("every", every), share, factors, resample)


def _rungs(first: int, epochs: int, eta: float) -> tuple[int, ...]:
    rungs, rung = [], float(first)
    while rung < epochs:
        rungs.append(int(rung + 1e-9))
        rung *= eta
    return (*dict.fromkeys(rungs), epochs)


def _ratio(eta: float) -> float:
    if not eta > 1:
        raise ValueError(f"eta is {eta}; it must be greater than 1")
    return eta


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; pass a number of epochs, at least 1")
    return value
