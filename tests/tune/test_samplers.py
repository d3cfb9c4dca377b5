"""What a study takes from Optuna's samplers and how it ends: constraints, grids, any seed, members that are frozen."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import hfta_func as hfta

optuna = pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

from hfta_func import tune  # noqa: E402
from studies import X, Y, build  # noqa: E402

FLAT = {"lr": FloatDistribution(1e-3, 0.2), "momentum": FloatDistribution(0.0, 0.9)}
OPTIONS: dict[str, Any] = dict(metric="error", direction="minimize", epochs=1, progress=False, max_models=8)


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("stored", [False, True])
def test_the_best_trial_fulfils_the_constraints(stored: bool, tmp_path: pathlib.Path) -> None:
    def sampler(most: float) -> Any:
        return optuna.samplers.NSGAIISampler(seed=0, constraints_func=lambda trial: (trial.params["lr"] - most,))

    kept = {"storage": f"sqlite:///{tmp_path}/study.db", "name": "one"} if stored else {}
    with pytest.warns(Warning, match="constraints_func|experimental"):
        samplers = sampler(0.05), sampler(0.0)
    study = tune.run(build, FLAT, trials=8, sampler=samplers[0], resume=tmp_path / "study", **kept, **OPTIONS)
    feasible = [trial for trial in study.trials if trial.params["lr"] <= 0.05]
    assert 0 < len(feasible) < 8
    values = {trial.number: trial.values[-1][0] for trial in study.trials}
    best = min((trial.number for trial in feasible), key=values.__getitem__)
    assert study.best.number == best != min(values, key=values.__getitem__)
    assert study.optuna.best_trial.number == best
    if not stored:
        none = tune.run(build, FLAT, trials=2, sampler=samplers[1], **OPTIONS)
        with pytest.raises(ValueError, match="no complete trial fulfils the sampler's constraints; try more"):
            _ = none.best


GRIDS = {
    "grid": (FLAT, lambda: optuna.samplers.GridSampler({"lr": [0.01, 0.1], "momentum": [0.0, 0.5]}), 4),
    "brute force": (
        {"lr": CategoricalDistribution([0.01, 0.1]), "momentum": FloatDistribution(0.0, 0.6, step=0.3)},
        lambda: optuna.samplers.BruteForceSampler(seed=0),
        6,
    ),
    "integers": (
        {"lr": CategoricalDistribution([0.01]), "momentum": IntDistribution(0, 4, step=2)},
        lambda: optuna.samplers.BruteForceSampler(seed=0),
        3,
    ),
}


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("scheduler", [None, tune.hyperband()])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_is_gone_through_once(grid: str, scheduler: Any) -> None:
    space, sampler, points = GRIDS[grid]

    def halved(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        return build(fixed, {**members, "momentum": [value / 10 for value in members["momentum"]]})

    study = tune.run(halved, space, trials=9, sampler=sampler(), scheduler=scheduler, **OPTIONS | {"epochs": 3})
    assert len({tuple(trial.params.values()) for trial in study.trials}) == len(study.trials) == points


@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_integer_is_a_seed(seed: int) -> None:
    first, again, other = (tune.run(build, FLAT, trials=2, seed=at, **OPTIONS) for at in (seed, seed, 3))
    assert first.trials == again.trials and first.trials[0].params != other.trials[0].params
    assert first.population.members[0].config["seed"] == seed
    with pytest.raises(ValueError, match=r"seed is 1\.5; pass an integer"):
        tune.run(build, FLAT, trials=2, seed=1.5, **OPTIONS)  # pyright: ignore


@pytest.mark.parametrize("eta", [1.1, 1.5, 2, 3, 3.7])
@pytest.mark.parametrize("epochs", [2, 9, 27])
def test_rungs_of_brackets_ascend(eta: float, epochs: int) -> None:
    for cohort in tune.hyperband(eta).cohorts(0, epochs):
        assert list(cohort.rungs) == sorted({*cohort.rungs}) and cohort.rungs[-1] == epochs


def test_rungs_that_do_not_ascend_are_refused() -> None:
    class Twice(tune.Scheduler):
        def cohorts(self, trials: int, epochs: int) -> list[tune.Cohort]:
            return [tune.Cohort(trials, (1, 1, epochs))]

    with pytest.raises(ValueError, match=r"Twice: a cohort has the rungs \(1, 1, 3\); give it epochs that ascend"):
        tune.run(build, FLAT, trials=2, scheduler=Twice(), **OPTIONS | {"epochs": 3})


def counting(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    """Members whose loss is NaN where ``shift`` is negative, and a metric that counts."""
    seeds = members["seed"]

    def loss_fn(model: Any, batch: Any, hparams: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean() + 0 * hparams["shift"].sqrt()

    def right(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]) > batch[1]).sum()

    def factory() -> torch.nn.Module:
        return torch.nn.Linear(4, 1).double()

    step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"]), nonfinite="freeze")
    hparams = {"shift": members["shift"]}
    state = step.init(*hfta.init_params(factory, seeds), seeds=seeds, hparams=hparams)
    evaluate = hfta.make_eval_step(factory(), right)
    return tune.Array(step, state, hfta.ArrayLoader((X, Y), 16, seeds=seeds), lambda state: evaluate(state, (X, Y)))


def test_frozen_members_are_measured_to_the_end_alone_and_beside_others() -> None:
    table = {"lr": [0.1, 0.2, 0.3], "shift": [-1.0, -1.0, 1.0]}
    together, alone = (tune.population(counting, table, max_models=most) for most in (3, 1))
    for each in (together, alone):
        each.fit(2)
    assert [member.epoch for member in alone.members] == [2, 2, 2]
    for member, other in zip(together.members, alone.members, strict=True):
        assert str(member.metrics) == str(other.metrics)
    space = {"lr": FloatDistribution(0.1, 0.2), "shift": FloatDistribution(-2.0, -1.0)}
    with pytest.raises(RuntimeError, match="every trial failed, the first one with loss is nan after epoch 2"):
        tune.run(counting, space, trials=3, **OPTIONS | {"metric": "loss", "epochs": 2})


def test_counts_are_metrics() -> None:
    space = {"lr": FloatDistribution(0.1, 0.2), "shift": FloatDistribution(1.0, 2.0)}
    study = tune.run(counting, space, trials=3, **OPTIONS | {"metric": "right"})
    assert float(study.best.values[-1][0]).is_integer()
