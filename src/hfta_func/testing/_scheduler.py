"""The laws of a scheduler."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Mapping
from typing import Any

from hfta_func.testing._laws import law

SPACE = {"lr": types.SimpleNamespace(low=1e-4, high=1.0, log=True, step=None)}


def assert_scheduler(make: Callable[[], Any], *, trials: int = 9, epochs: int = 9) -> None:
    """Check that a scheduler keeps its laws, in simulated studies with several orders of arrival and with failing trials.

    The laws: cohorts have ascending rungs, none above ``epochs``, and the requested number of trials in all; a new scheduler
    gives the same verdicts for the same cohort, and ``decide`` does not write the cohort; verdicts are valid, and only for
    trials that have reached a rung; if no trial fails, some trial reaches its last rung; and two schedulers made alike have
    the same ``repr``, by which a resumed study recognises its scheduler.

    Args:
        make: Makes the scheduler.
        trials: Number of trials of the studies.
        epochs: Number of epochs.

    Raises:
        AssertionError: if a law is broken; it names the law, the trial and the cohort.

    Example:
        >>> from hfta_func import tune
        >>> from hfta_func.testing import assert_scheduler
        >>> assert_scheduler(lambda: tune.halving(eta=3))
    """
    with law("repr names the scheduler"):
        first, second = [repr(one) for one in (make(), make())]
        assert first == second, f"two that are made alike are {first} and {second}; make it a frozen dataclass"
    with law("cohorts"):
        cohorts = make().cohorts(trials, epochs)
        total = sum(cohort.trials for cohort in cohorts)
        assert total == trials, f"they have {total} trials, not {trials}"
        for cohort in cohorts:
            rungs = list(cohort.rungs)
            ok = rungs and rungs == sorted({*rungs}) and 1 <= rungs[0] and rungs[-1] <= epochs
            assert ok, f"the rungs are {rungs}; let them ascend from at least 1 to at most {epochs}"
    for cohort in cohorts:
        for failing in (set(), {0}, {1, 2}):
            for order in range(3):
                _study(make, cohort, failing, random.Random(f"{order}"))


def _study(make: Callable[[], Any], cohort: Any, failing: set[int], draws: random.Random) -> None:
    """A simulated study of one cohort, in which few trials train at a time."""
    numbers, rungs = range(cohort.trials), cohort.rungs
    values: dict[int, list[float]] = {trial: [] for trial in numbers}
    params = {trial: {"lr": 10.0 ** -(1 + trial % 4)} for trial in numbers}
    ended, verdicts = set[int](), {}
    for _ in range(2 * cohort.trials * len(rungs) + 2):
        waiting = [t for t in numbers if t not in ended and len(values[t]) < len(rungs)]
        ready = [t for t in waiting if not values[t] or verdicts.get(t, "stop") != "stop"]
        if not ready:
            break
        for trial in draws.sample(ready, min(3, len(ready))):
            if trial in failing and values[trial]:
                ended.add(trial)
            else:
                params[trial] |= getattr(verdicts.get(trial), "changes", {})
                values[trial].append(-float(trial * 7 % len(numbers)) + len(values[trial]))
        now = cohort._replace(
            values={trial: tuple(reports) for trial, reports in values.items()},
            **{"ended": frozenset(ended), "params": {t: dict(p) for t, p in params.items()}, "space": dict(SPACE)},
        )
        verdicts = _decided(make, now)
        ended |= {trial for trial, verdict in verdicts.items() if verdict == "stop" and len(values[trial]) < len(rungs)}
    with law("some trial reaches its last rung"):
        reached = [len(reports) for reports in values.values()]
        assert failing or len(rungs) in reached, f"of rungs {rungs} the trials have reached {reached}"


def _decided(make: Callable[[], Any], cohort: Any) -> Mapping[int, Any]:
    before = repr(cohort)
    with law("verdicts are valid", f"values {dict(cohort.values)}"):
        verdicts = make().decide(cohort)
        cohort.check(verdicts, make().copies)
    with law("the same cohort gets the same verdicts", f"values {dict(cohort.values)}"):
        again = make().decide(cohort)
        assert again == verdicts, f"asked again, decide says {again}, not {verdicts}"
        assert repr(cohort) == before, "decide writes the cohort"
    return verdicts
