"""Trials that are good enough: they end complete, and new ones take their places."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import hfta_func as hfta
from hfta_func import tune
from studies import SCHEDULERS, SPACE, STUDY, build, told

FLAT: Any = {**STUDY, "nonfusible": (), "trials": 8, "batch": 4, "max_models": 4, "seed": 1}
NAMES: Any = {name: SPACE[name] for name in ("lr", "momentum")}


def first(curve: list[float], target: float) -> int | None:
    return next((epoch for epoch, value in enumerate(curve, 1) if value <= target), None)


@pytest.fixture(scope="module")
def target() -> tuple[list[list[float]], float]:
    """What each trial has after every epoch, and a value that some reach early, some late and some never."""
    study = tune.run(build, NAMES, **FLAT, keep="all")
    known = [[one["error"] for one in member.metrics] for member in study.population.members]
    target = sorted(min(curve) for curve in known)[4] + 1e-9
    epochs = [first(curve, target) for curve in known]
    assert len({*epochs}) >= 3 and None in epochs
    return known, target


def test_a_trial_ends_where_it_is_good_enough_and_makes_room(target: tuple[list[list[float]], float]) -> None:
    known, value = target
    sizes: list[list[int]] = []

    def note(study: tune.Study) -> None:
        sizes.append([trial.number for trial in study.trials if trial.status == "running"])

    study = tune.run(build, NAMES, **FLAT, target=value, callbacks=[note])
    for trial, curve in zip(study.trials, known, strict=True):
        end = first(curve, value) or 9
        (member,) = trial.members
        assert (trial.status, study.population.members[member].epoch) == ("complete", end)
        assert trial.values[-1] == pytest.approx((curve[end - 1],), rel=1e-9)
    # While earlier trials train on, later ones have taken the places of those that have left.
    assert any(max(numbers) >= 4 and min(numbers) < 4 for numbers in sizes if numbers)
    assert all(len(numbers) <= 4 for numbers in sizes)
    assert study.best.values[-1][0] <= value
    study.export(study.best.number)


@pytest.mark.parametrize("scheduler", ["halving", "hyperband", "median"])
def test_schedulers_see_the_value_at_later_rungs(scheduler: str, target: tuple[list[list[float]], float]) -> None:
    _, value = target
    study = tune.run(build, NAMES, **FLAT, scheduler=SCHEDULERS[scheduler], target=value)
    done = [trial for trial in study.trials if trial.values[-1][0] <= value]
    assert done and all(trial.status == "complete" for trial in done)
    assert all(len(trial.values) == len(done[0].values) for trial in done if trial.cohort == done[0].cohort)
    assert not study.counts["running"]


def test_a_study_that_was_broken_off_knows_them(
    tmp_path: pathlib.Path, target: tuple[list[list[float]], float]
) -> None:
    _, value = target
    whole = tune.run(build, NAMES, **FLAT, target=value)
    rounds: list[int] = []

    def stop(study: tune.Study) -> None:
        rounds.append(0)
        study.optuna.stop()

    while True:
        study = tune.run(build, NAMES, **FLAT, target=value, resume=tmp_path, callbacks=[stop])
        if not study.interrupted:
            break
    assert len(rounds) > 5
    assert told(study) == told(whole)
    study = tune.run(build, NAMES, **FLAT, target=value, storage=f"sqlite:///{tmp_path}/s.db", name="s")
    again = tune.run(build, NAMES, **FLAT, target=value, storage=f"sqlite:///{tmp_path}/s.db", name="s")
    assert told(again) == told(study)


def test_a_value_in_float32_is_the_number_that_is_meant() -> None:
    def report(fixed: Any, members: Any) -> tune.Array:
        array = build(fixed, members)

        def evaluate(state: Any) -> Any:
            return {"error": hfta.random.keys(members["seed"]).float() * 0 + 0.95}

        return array._replace(evaluate=evaluate)

    study = tune.run(report, NAMES, **{**FLAT, "direction": "maximize", "trials": 1, "seeds": 1}, target=0.95)
    assert study.population.members[0].epoch == 1


def test_what_has_no_target_is_refused() -> None:
    message = r"^target is a value of one metric, and of trials that no other copies; leave it out here$"
    with pytest.raises(ValueError, match=message):
        tune.run(build, NAMES, **FLAT, scheduler=SCHEDULERS["population"], target=0.1)
    with pytest.raises(ValueError, match=message):
        tune.run(build, NAMES, **{**FLAT, "metric": ["error", "loss"]}, target=0.1)
