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
from studies import X, Y, build, loss_fn  # noqa: E402

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
        with pytest.raises(ValueError, match="no trial is complete and fulfils the sampler's constraints"):
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


def kinds(trial: Any) -> None:
    """A space whose trials of one kind have a parameter that those of the other lack."""
    trial.suggest_categorical("lr", [0.01, 0.1])
    if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("momentum", 0.0, 0.6, step=0.3)


def build_kinds(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    assert ("momentum" in members) == (fixed["kind"] == "sgd")
    array = build(fixed, {"momentum": [0.0] * len(members["seed"]), **members})
    if fixed["kind"] == "sgd":
        return array
    step = hfta.make_train_step(array.model, loss_fn, hfta.adam(lr=members["lr"]))
    state = step.init(array.state.params, seeds=members["seed"])
    return array._replace(step=step, state=state)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
def test_trials_have_the_names_of_their_kind(tmp_path: pathlib.Path) -> None:
    """A space of eight configurations ends; each trial is as alone; what it lacks is stored nowhere."""
    url, options = f"sqlite:///{tmp_path}/study.db", OPTIONS | {"nonfusible": ["kind"], "epochs": 2}
    first = {"kind": "sgd", "momentum": 0.6, "lr": 0.1}

    def search(**more: Any) -> tune.Study:
        sampler = optuna.samplers.BruteForceSampler(seed=0)
        more = {"enqueue": [first, {"kind": "adam"}], "sampler": sampler, "trials": 20, **more}
        return tune.run(build_kinds, kinds, **options | more)

    study = search(storage=url, name="kinds", resume=tmp_path / "study")
    assert study.trials[0].params == first and study.trials[1].params["kind"] == "adam"
    assert len({tuple(sorted(trial.params.items())) for trial in study.trials}) == len(study.trials) == 8
    stored = optuna.load_study(storage=url, study_name="kinds").trials
    for trial, shown in zip(study.trials, stored, strict=True):
        assert ("momentum" in trial.params) == (trial.params["kind"] == "sgd") and trial.params == shown.params
        assert study.population.members[trial.members[0]].config == {**trial.params, "seed": 0}
        alone = tune.population(build_kinds, [trial.params], nonfusible=["kind"], max_models=1)
        alone.fit(2)
        assert trial.values[-1][0] == pytest.approx(alone.members[0].value("error"), rel=1e-12)
    importances = optuna.importance.get_param_importances(study.optuna, params=["lr", "kind"])
    assert set(importances) == {"lr", "kind"}
    frame = study.frame()
    assert list(frame["momentum"].isna()) == list(frame["kind"] == "adam")
    assert list(frame)[:4] == ["trial", "lr", "kind", "momentum"]
    assert search(resume=tmp_path / "study", storage=url, name="kinds").trials == study.trials


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("scheduler", [tune.halving(), tune.population_based(every=1)])
def test_schedulers_of_a_space_with_kinds(scheduler: Any) -> None:
    options = OPTIONS | {"trials": 9, "nonfusible": ["kind"], "scheduler": scheduler, "epochs": 3}
    study, again = (tune.run(build_kinds, kinds, **options | {"max_models": most}) for most in (8, 1))
    assert [(one.params, one.status) for one in study.trials] == [(one.params, one.status) for one in again.trials]
    members = study.population.members
    kind_of = {member.number: member.config["kind"] for member in members}
    assert all(kind_of[source] == kind_of[member.number] for member in members for _, source in member.parents)
    if scheduler.copies:
        assert any(member.parents for member in members)
