"""Trials of several seeds: schedulers see their means, which are those of a loop, and results have their spread."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta

pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")
from optuna.distributions import FloatDistribution

from hfta_func import tune
from studies import X, Y, error, loss_fn

# Rates so large that which of them is best depends on the seed.
FLAT = {"lr": FloatDistribution(0.3, 1.5), "momentum": FloatDistribution(0.0, 0.5)}
STUDY: dict[str, Any] = dict(metric="error", trials=9, epochs=9, seeds=3, seed=6, max_models=8, progress=False)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def build(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    given = {name: [*values] for name, values in members.items()}
    experiment = hfta.Experiment(make_model, loss_fn, hfta.sgd, error, seeds=given.pop("seed"), **given)
    return tune.Array.of(experiment, (X, Y), len(X), evaluate=(X, Y))


def loop(params: Mapping[str, float], epochs: int = 9) -> list[list[float]]:
    """The errors of each seed after every epoch, one model after another."""
    errors = []
    for seed in (6, 7, 8):
        torch.manual_seed(seed)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), **params)
        errors.append([])
        for _ in range(epochs):
            optimizer.zero_grad()
            loss_fn(model, (X, Y)).backward()
            optimizer.step()
            errors[-1].append(float(loss_fn(model, (X, Y)).detach()))
    return errors


def mean(errors: list[list[float]], epoch: int) -> float:
    return statistics.fmean(each[epoch - 1] for each in errors)


@pytest.mark.parametrize(
    "scheduler",
    [tune.halving(), tune.hyperband(), tune.asynchronous_halving(), tune.median_stopping(every=2, startup=3)],
    ids=["halving", "hyperband", "asynchronous", "median"],
)
def test_schedulers_decide_about_means_of_seeds(scheduler: tune.Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    decided, decide = [], type(scheduler).decide

    def record(self: Any, cohort: Any) -> Any:
        decided.append(cohort)
        return decide(self, cohort)

    monkeypatch.setattr(type(scheduler), "decide", record)
    study = tune.run(build, FLAT, scheduler=scheduler, direction="minimize", **STUDY)
    errors = [loop(trial.params) for trial in study.trials]
    for cohort in decided:
        for number, values in cohort.values.items():
            expected = [-mean(errors[number], epoch) for epoch in cohort.rungs[: len(values)]]
            assert values == pytest.approx(expected, rel=1e-10)
    assert len({trial.status for trial in study.trials}) == 2
    for trial in study.trials:
        last = study.population.members[trial.members[0]].epoch
        assert trial.values[-1][0] == pytest.approx(mean(errors[trial.number], last), rel=1e-10)
        assert trial.std == pytest.approx([statistics.stdev(each[last - 1] for each in errors[trial.number])], rel=1e-9)


def test_halving_of_means_is_that_of_a_loop_and_no_single_seed_s() -> None:
    study = tune.run(build, FLAT, scheduler=tune.halving(), direction="minimize", **STUDY)
    errors = [loop(trial.params) for trial in study.trials]

    def survivors(value: Any) -> list[list[int]]:
        left, rounds = [*range(9)], []
        for rung in (1, 3):
            left = sorted(left, key=lambda number: value(errors[number], rung))[: len(left) // 3]
            rounds.append(sorted(left))
        return rounds

    reached = [[t.number for t in study.trials if len(t.values) > place] for place in (1, 2)]
    assert reached == survivors(mean)
    assert all(survivors(lambda each, rung, seed=seed: each[seed][rung - 1]) != reached for seed in range(3))


def test_the_spread_is_reported_and_kept(tmp_path: pathlib.Path) -> None:
    options = STUDY | {"trials": 2, "epochs": 2, "direction": "minimize", "resume": tmp_path / "study"}
    study = tune.run(build, FLAT, **options)
    expected = [statistics.stdev(each[-1] for each in loop(trial.params, 2)) for trial in study.trials]
    assert study.frame()["error_std"].tolist() == pytest.approx(expected, rel=1e-9)
    assert [trial.user_attrs["std"][0] for trial in study.optuna.trials] == pytest.approx(expected, rel=1e-9)
    again = tune.run(build, FLAT, **options | {"trials": 3})
    assert [trial.std for trial in again.trials[:2]] == [trial.std for trial in study.trials]
    alone = tune.run(build, FLAT, **STUDY | {"trials": 2, "epochs": 1, "seeds": 1, "direction": "minimize"})
    assert "error_std" not in alone.frame() and alone.trials[0].std == ()
    assert "std" not in alone.optuna.trials[0].user_attrs


def test_a_target_is_reached_by_the_mean() -> None:
    options = STUDY | {"trials": 4, "direction": "minimize"}
    errors = [loop(trial.params) for trial in tune.run(build, FLAT, **options).trials]
    target = sorted(mean(each, 4) for each in errors)[1]
    study = tune.run(build, FLAT, target=target, **options)
    first = [next((epoch for epoch in range(1, 10) if mean(each, epoch) <= target), 9) for each in errors]
    assert [study.population.members[trial.members[0]].epoch for trial in study.trials] == first
    for trial, epoch in zip(study.trials, first, strict=True):
        assert trial.std == pytest.approx([statistics.stdev(e[epoch - 1] for e in errors[trial.number])], rel=1e-9)
