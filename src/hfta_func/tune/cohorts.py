"""The contract of schedulers, which decide which trials go on.

A scheduler divides the trials of a study into cohorts. Each cohort has rungs: the epochs in which its trials are compared.
The scheduler decides by the values at the rungs and the order of the trials, never by the clock, so that a study that was
broken off gives the same result. :func:`hfta_func.testing.assert_scheduler` tests a scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from hfta_func.tune.groups import group_key


class Copy(NamedTuple):
    """The verdict that a trial copies the state of another one; it keeps its seed and the order of its data.

    Args:
        source: The other trial: of the same :meth:`group <Cohort.groups>`, at the same rung, and not ended.
        changes: New values of hyperparameters by name; the others keep their values.
    """

    source: int
    changes: Mapping[str, Any]


Verdict = Literal["go", "stop"] | Copy
"""The decision about a trial at a rung: it goes on, it ends, or it copies another trial."""


class Cohort(NamedTuple):
    """Trials that are compared with each other, and their values so far.

    A scheduler makes cohorts with the first two fields; :meth:`Scheduler.decide` gets them with all fields.

    Args:
        trials: Number of trials.
        rungs: The epochs in which the trials are compared, ascending; the last one ends a trial.
        values: By number of each trial that has begun, in their order, its value at every rung that it has reached; larger is
            better, and a value that is not finite is minus infinity.
        ended: The trials that were stopped or have failed.
        params: By trial, its hyperparameters by name.
        space: Optuna's distributions by name.
        nonfusible: Names whose values a trial keeps, because they decide shapes or code.
        seed: The study's seed, for draws that a resumed study repeats.
    """

    trials: int
    rungs: tuple[int, ...]
    values: Mapping[int, Sequence[float]] = {}
    ended: frozenset[int] = frozenset()
    params: Mapping[int, Mapping[str, Any]] = {}
    space: Mapping[str, Any] = {}
    nonfusible: Sequence[str] = ()
    seed: int = 0

    @property
    def alive(self) -> dict[int, Sequence[float]]:
        """The :attr:`values` of trials that have not ended."""
        return {trial: values for trial, values in self.values.items() if trial not in self.ended}

    @property
    def complete_rung(self) -> int:
        """The rung, from 1, that all trials alive have reached; 0 before all have begun, and once all are at the last one."""
        rung = min((len(values) for values in self.alive.values()), default=0)
        return 0 if len(self.values) < self.trials or rung == len(self.rungs) else rung

    def groups(self, trials: Iterable[int]) -> list[list[int]]:
        """Groups of trials that can copy each other: of equal names and equal non-fusible values."""
        groups: dict[Any, list[int]] = {}
        for trial in trials:
            groups.setdefault(group_key(self.params[trial], self.nonfusible), []).append(trial)
        return list(groups.values())

    def check(self, verdicts: Mapping[int, Verdict], copies: bool) -> None:
        """Raise a ValueError that names the trial if verdicts are invalid; ``copies`` is the scheduler's attribute."""
        alive, fusible = self.alive, self.space.keys() - {*self.nonfusible}
        for trial, verdict in verdicts.items():
            is_valid = verdict in ("go", "stop") and bool(alive.get(trial))
            if isinstance(verdict, Copy) and copies and alive.get(trial):
                ahead = len(alive.get(verdict.source, ())) >= len(alive[trial])
                stays = ahead and not isinstance(verdicts.get(verdict.source), Copy)
                alike = stays and len(self.groups((trial, verdict.source))) == 1
                is_valid = alike and verdict.changes.keys() <= fusible
            if not is_valid:
                cure = "say 'go', 'stop' or, if copies is True, tune.Copy of one of its group, at its rung, that copies none"
                raise ValueError(f"decide says {verdict!r} of trial {trial}; {cure}, of trials that are at a rung")


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """One cohort whose trials all train to the end. Other schedulers derive from it and define :meth:`decide`.

    Attributes:
        waits: Whether all trials of a cohort begin at once, because they wait for each other.
        copies: Whether verdicts may be :class:`Copy`; trials then have one seed each.
    """

    waits: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        """The cohorts of a study, in the order in which their trials begin."""
        return [Cohort(trials, (epochs,))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        """Verdicts about trials at a rung; trials without a verdict wait there.

        It is called after every array that has trained, and again when a study is resumed. So it depends on the cohort
        alone, never on the clock or on earlier calls, and it gives a trial at a rung the same verdict until the trial has
        left the rung.
        """
        return {trial: "go" for trial, values in cohort.alive.items() if values}
