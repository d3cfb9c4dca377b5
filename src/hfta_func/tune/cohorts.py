"""The contract of schedulers: which trials go on, and when that is decided.

A scheduler divides the trials of a study into cohorts, gives each the epochs in which its trials are compared, its rungs, and
decides from the values found there. It decides by values and order alone, never by the clock, so that a study gives the same
result however often it was broken off. :func:`hfta_func.testing.assert_scheduler` tests one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple


class Copy(NamedTuple):
    """The verdict that a trial goes on from what another one has learned; it keeps its seed and the order of its data.

    Args:
        source: The other trial: of the same :meth:`group <Cohort.groups>`, at the same rung, and not ended.
        changes: New values of hyperparameters by name; the others stay as they are.
    """

    source: int
    changes: Mapping[str, Any]


Verdict = Literal["go", "stop"] | Copy
"""What becomes of a trial at a rung: it goes on, it ends, or it goes on from another one."""


class Cohort(NamedTuple):
    """Trials that are compared with each other, as they stand.

    A scheduler makes cohorts of the first two fields and gets them back with all.

    Args:
        trials: How many they are.
        rungs: The epochs in which they are compared, ascending; the last one ends a trial.
        values: By number of each trial that there is, in the order of asking, its value at every rung that it has reached;
            larger is better, and what is not finite is minus infinity.
        ended: The trials that were stopped before, or have failed.
        params: By trial, its hyperparameters by name.
        space: Optuna's distributions by name.
        nonfusible: Names whose values a trial keeps, because they decide shapes or code.
        seed: The study's seed, for draws that a study that is broken off must draw again.
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
        """Those of :attr:`values` whose trials have not ended."""
        return {trial: found for trial, found in self.values.items() if trial not in self.ended}

    def groups(self, trials: Iterable[int]) -> list[list[int]]:
        """The trials, those together that can copy each other: their non-fusible values are equal."""
        found: dict[Any, list[int]] = {}
        for trial in trials:
            # 1 and True, which Python holds for equal, are two.
            key = tuple((type(value), value) for value in (self.params[trial][name] for name in self.nonfusible))
            found.setdefault(key, []).append(trial)
        return list(found.values())

    def check(self, verdicts: Any, copies: bool) -> None:
        """Raise a ValueError that names the trial unless a scheduler may decide so; ``copies`` is the scheduler's."""
        if not isinstance(verdicts, Mapping):
            raise ValueError(f"decide returns {verdicts!r}; return a dict of verdicts by trial")
        alive = self.alive
        for trial, verdict in verdicts.items():
            if not alive.get(trial):
                state = "has ended" if trial in self.values else "is not in the cohort"
                raise ValueError(f"decide names trial {trial}, which {'is at no rung' if trial in alive else state}")
            if not isinstance(verdict, Copy):
                if verdict not in ("go", "stop"):
                    raise ValueError(f"decide says {verdict!r} of trial {trial}; say 'go', 'stop' or tune.Copy(...)")
                continue
            what = f"decide has trial {trial} copy trial {verdict.source}"
            rungs = [len(alive.get(one, ())) for one in (trial, verdict.source)]
            if not copies:
                raise ValueError(f"{what}, but the scheduler's attribute copies is False; set it to True")
            if verdict.source not in alive or rungs[0] > rungs[1]:
                raise ValueError(f"{what}, which is not at rung {rungs[0]}; choose one that is, and has not ended")
            if isinstance(verdicts.get(verdict.source), Copy):
                raise ValueError(f"{what}, which copies another one itself; choose one that goes on")
            if len(self.groups((trial, verdict.source))) > 1:
                raise ValueError(f"{what}, whose non-fusible values are others; choose one of its group")
            unknown = [name for name in verdict.changes if name not in self.space or name in self.nonfusible]
            if unknown:
                raise ValueError(f"{what} and change '{unknown[0]}', which is no fusible name of the space")


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """One cohort whose trials all train to the end. Schedulers of one's own derive from it and write :meth:`decide`.

    Attributes:
        waits: Whether a cohort is asked for at once, because trials wait for each other.
        copies: Whether verdicts may be :class:`Copy`; trials then have one seed each.
        eta: About how many trials there are at a rung for each that goes on, for estimates of the time left.
    """

    waits: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    def cohorts(self, trials: int, epochs: int) -> list[Cohort]:
        """The cohorts of a study, in the order in which their trials are asked for."""
        return [Cohort(trials, (epochs,))]

    def decide(self, cohort: Cohort) -> Mapping[int, Verdict]:
        """What becomes of trials that stand at a rung; those that are left out wait there.

        It is asked after every array that has trained, and again when a study goes on after it was broken off. So it depends
        on the cohort alone, never on the clock or on what it was asked before, and it gives a trial at a rung the same
        verdict until the trial has left the rung.
        """
        return {trial: "go" for trial, found in cohort.alive.items() if found}
