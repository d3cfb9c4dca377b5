"""Studies: a trial gives the same result whatever trains beside it, and nothing is lost when a study is broken off."""

from __future__ import annotations

import json
import math
import pathlib
import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta

optuna = pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")
from optuna.distributions import FloatDistribution  # noqa: E402

from hfta_func import tune  # noqa: E402
from hfta_func.tune import folder  # noqa: E402
from studies import SCHEDULERS, SPACE, STUDY, Net, X, Y, after, build, error, loss_fn, told  # noqa: E402

FLAT = {name: SPACE[name] for name in ("lr", "momentum")}
SIX = STUDY | {"nonfusible": (), "trials": 6, "epochs": 1, "max_models": 8}


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(unless="hyperband|asynchronous")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_results_are_the_same_however_trials_are_packed(scheduler: str) -> None:
    alone = tune.run(build, SPACE, scheduler=SCHEDULERS[scheduler], batch=11, max_models=1, **STUDY)
    assert len(alone.trials) == 11 and not any(trial.status == "running" for trial in alone.trials)
    for size in (3, 16):
        array = tune.run(build, SPACE, scheduler=SCHEDULERS[scheduler], batch=11, max_models=size, **STUDY)
        if scheduler == "asynchronous":
            # Who goes on depends on who came first, but never on what a trial does.
            values = [dict(enumerate(trial.values)) for trial in alone.trials]
            for trial, expected in zip(array.trials, values, strict=True):
                for rung, value in enumerate(trial.values):
                    assert value == pytest.approx(expected.get(rung, value), rel=1e-9)
        else:
            assert told(array) == told(alone)
            assert array.best.number == alone.best.number
            mine, other = (study.state(study.best.number).params for study in (array, alone))
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def by_hand(config: Mapping[str, Any], epochs: int) -> float:
    """What plain PyTorch makes of a configuration without noise."""
    found = build({"width": config["width"]}, {name: [value] for name, value in config.items() if name != "width"})
    _, history = hfta.fit(found.step, found.state, found.loader, epochs=epochs, evaluate=found.evaluate, progress=False)
    return float(history["error"][-1, 0])


@pytest.mark.exhaustive
def test_hyperband_finds_the_winner_of_hfht() -> None:
    study = tune.run(build, SPACE, scheduler=tune.hyperband(), max_models=8, **STUDY | {"trials": 0})
    assert len(study.trials) == 9 + 5 + 3
    # HFHT trains the survivors of every rung again from the start.
    start, winners = 0, {}
    for count, rungs in ((9, (1, 3, 9)), (5, (3, 9)), (3, (9,))):
        left = list(range(start, start + count))
        start += count
        for place, rung in enumerate(rungs):
            values = {number: by_hand({**study.trials[number].params, "seed": 0}, rung) for number in left}
            left = sorted(left, key=values.__getitem__)
            left = left[: max(1, len(left) // 3)] if place + 1 < len(rungs) else left
        winners |= {number: values[number] for number in left}
    assert {trial.number for trial in study.trials if trial.status == "complete"} == set(winners)
    assert study.best.number == min(winners, key=winners.__getitem__)
    assert study.best.values[-1][0] == pytest.approx(min(winners.values()), rel=1e-9)
    frame = study.frame()
    assert list(frame.trial) == list(range(17)) and (frame.seconds > 0).all()
    assert study.optuna.best_trial.number == study.best.number


class Killed(BaseException):
    """Ends a study without any of its handlers."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_study_that_is_killed_goes_on(
    scheduler: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = {"halving": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=2, constant_liar=True)}.get(
        scheduler, lambda: None
    )
    options = STUDY | {"scheduler": SCHEDULERS[scheduler], "max_models": 4}
    expected = tune.run(build, SPACE, sampler=sampler(), **options)
    calls, draws = 0, random.Random(1)
    wait = 0

    def killing(kind: Any, name: str) -> None:
        inner = getattr(kind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, wait
            # The thread that writes the status ends with the study, and is not what is killed here.
            is_main = threading.current_thread() is threading.main_thread()
            wait -= is_main
            if is_main and wait == 0:
                calls += 1
                raise Killed
            return inner(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    for kind, name in (
        (hfta, "save"), (hfta, "fit"), (folder.atomic, "replacing"), (folder.os, "remove"), (optuna.study.Study, "tell"),
        *((optuna.storages.JournalStorage, f"set_trial_{what}") for what in ("param", "intermediate_value", "user_attr")),
    ):  # fmt: skip
        killing(kind, name)
    while True:
        wait = draws.randrange(1, 90)
        try:
            study = tune.run(build, SPACE, sampler=sampler(), resume=tmp_path / "study", **options)
            break
        except Killed:
            pass
    monkeypatch.undo()
    assert calls >= 2
    found, wanted = ([(t.params, t.status, t.values) for t in one.trials] for one in (study, expected))
    assert found == wanted
    mine, other = (one.state(one.best.number).params for one in (study, expected))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    # As Optuna itself reads it.
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study" / "study.journal"))
    shown = optuna.load_study(storage=optuna.storages.JournalStorage(backend), study_name="study").trials
    # Optuna keeps what was asked for; who copies others goes on with something else.
    assert [trial.user_attrs.get("params", trial.params) for trial in shown] == [t.params for t in expected.trials]
    assert [trial.params for trial in shown] == [trial.params for trial in expected.optuna.trials]
    states = {"complete": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL"}
    assert [trial.state.name for trial in shown] == [states[trial.status] for trial in expected.trials]
    assert [trial.values for trial in shown if trial.state.name == "COMPLETE"] == [
        list(trial.values[-1]) for trial in expected.trials if trial.status == "complete"
    ]
    # What is left are the states that the index names.
    index = json.loads((tmp_path / "study" / "members.json").read_bytes())
    named = {block["file"] for group in index["groups"] for block in group["blocks"]}
    assert named == {path.name for path in (tmp_path / "study").glob("*.safetensors")}


def test_another_study_is_refused(tmp_path: pathlib.Path) -> None:
    storage, folder = f"sqlite:///{tmp_path}/study.db", tmp_path / "study"
    given = STUDY | {"trials": 3, "epochs": 1, "max_models": 4, "storage": storage, "name": "study"}

    def refused(message: str, error: Any = ValueError, space: Any = SPACE, **options: Any) -> None:
        with pytest.raises(error, match=message):
            tune.run(build, space, **given | options)

    tune.run(build, SPACE, resume=folder, **given)
    other = SPACE | {"lr": FloatDistribution(1e-3, 0.3)}
    refused("the storage has another study 'study', whose space is .*; pass another name", space=other)
    refused("whose epochs is 1 and not 2; pass another name or folder", epochs=2)
    refused("a storage keeps studies by name; pass name=", name=None)
    message = "the folder has 3 members, but the storage 0 trials; pass the folder and the"
    refused(message, resume=folder, storage=None, name=None)
    optuna.create_study(storage=storage, study_name="own").enqueue_trial({"lr": 0.1})
    refused("the storage has another study 'own', whose", name="own")
    (folder / "members.json").write_bytes(b"{")
    refused(r"members\.json is damaged: truncated, or changed", hfta.errors.CheckpointError, resume=folder)


def test_a_trial_that_raises_fails_alone() -> None:
    def failing(model: nn.Module, batch: Any, hparams: Any) -> Tensor:
        if (hparams["power"] > 2).item():
            raise RuntimeError("power is above 2")
        return loss_fn(model, batch)

    def build_failing(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        if any(width > 5 for width in members["width"]):
            raise ValueError("no width above 5")
        seeds = members["seed"]
        step = hfta.make_train_step(Net(4).double(), failing, hfta.sgd(lr=0.1), chunk_size=1)
        params = hfta.init_params(lambda: Net(4).double(), seeds)
        state = step.init(*params, seeds=seeds, hparams={"power": members["power"]})
        return tune.Array(step, state, hfta.ArrayLoader((X, Y), 16, seeds=seeds))

    table = {"power": [1.0, 3.0, 2.0, 1.0, 1.0], "width": [4, 4, 4, 6, 4]}
    population = tune.population(build_failing, table, max_models=8)
    population.fit(2)
    assert [member.status for member in population.members] == ["alive", "failed", "alive", "failed", "alive"]
    assert "power is above 2" in (population.members[1].error or "")
    assert population.members[3].error == "ValueError: no width above 5"
    assert [member.epoch for member in population.members] == [2, 0, 2, 0, 2]
    alone = tune.population(build_failing, [{"power": 2.0, "width": 4}], max_models=1)
    alone.fit(2)
    assert alone.members[0].metrics[-1]["loss"] == pytest.approx(population.members[2].metrics[-1]["loss"])
    with pytest.raises(ValueError, match="no width above 5"):
        population.add([{"power": 1.0, "width": 7}])


def test_values_that_are_not_finite_lose() -> None:
    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = error(model, batch)["error"]
        return {"error": torch.where(found > 0.55, torch.nan, found)}

    def build_nan(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        evaluate = hfta.make_eval_step(Net(fixed["width"]).double(), metric, batch_dims=None)
        return found._replace(evaluate=lambda state: evaluate(state, (X, Y)))

    study = tune.run(build_nan, SPACE, scheduler=tune.halving(), max_models=16, **STUDY)
    first = [trial.values[0][0] for trial in study.trials]
    assert sum(map(math.isnan, first)) >= 3
    going = [trial.number for trial in study.trials if len(trial.values) > 1]
    assert going and not any(math.isnan(first[number]) for number in going)
    study = tune.run(build_nan, SPACE, max_models=16, **STUDY | {"epochs": 1})
    lost = [trial for trial in study.trials if math.isnan(trial.values[0][0])]
    assert lost and all(trial.status == "failed" for trial in lost)
    assert lost[0].error == "error is nan after epoch 1"
    assert {t.state.name for t in study.optuna.trials} == {"FAIL", "COMPLETE"}


def test_a_population_is_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    table = [{"lr": 0.1, "momentum": 0.1 * number, "width": 4 + number % 2, "seed": number} for number in range(5)]
    first = tune.population(build, table, nonfusible=["width"], max_models=2)
    first.fit(2)
    first.drop([2, 3])
    first.save(tmp_path)
    first.fit(1)
    again = tune.population(build, nonfusible=["width"], max_models=3)
    again.load(tmp_path)
    again.fit(1)
    for mine, other in zip(again.members, first.members, strict=True):
        assert (mine.status, mine.epoch, mine.config) == (other.status, other.epoch, other.config)
        assert all(a == pytest.approx(b) for a, b in zip(mine.metrics, other.metrics, strict=True))
    torch.testing.assert_close(again.state(4).params, first.state(4).params, rtol=1e-9, atol=1e-12)
    first.save(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) == len([block for group in first.groups for block in group.blocks])
    with pytest.raises(ValueError, match="the population has members"):
        again.load(tmp_path)
    with pytest.raises(ValueError, match="holds no members"):
        tune.population(build).load(tmp_path / "empty")


def test_an_edited_index_writes_no_file_elsewhere(tmp_path: pathlib.Path) -> None:
    first = tune.population(build, [{"lr": 0.1, "momentum": 0.0, "width": 4, "seed": 0}])
    first.save(tmp_path / "study")
    (state,) = (tmp_path / "study").glob("*.safetensors")
    other, index = state.rename(tmp_path / "other.safetensors"), tmp_path / "study" / "members.json"
    index.write_text(index.read_text().replace(state.name, f"../{other.name}"))
    again = tune.population(build)
    again.load(tmp_path / "study")
    before = other.stat().st_mtime_ns
    again.save(tmp_path / "copy")
    assert other.stat().st_mtime_ns == before and len([*(tmp_path / "copy").glob("*.safetensors")]) == 1


def test_population_based_training_copies_and_explores() -> None:
    study = tune.run(
        build, SPACE, scheduler=tune.population_based(every=1, share=0.4), max_models=16, keep="all", **STUDY
    )
    members = study.population.members
    assert all(trial.status == "complete" and len(trial.values) == 9 for trial in study.trials)
    # What they ended with; Optuna keeps what was asked for besides.
    assert all({**trial.params, "seed": 0} == members[trial.members[0]].config for trial in study.trials)
    changed = {t.number: t.user_attrs["params"] for t in study.optuna.trials if "params" in t.user_attrs}
    assert changed == {m.number: study.trials[m.number].params for m in members if m.parents}
    assert sum(len(member.parents) for member in members) >= 8
    for member in members:
        assert member.config["seed"] == 0 and int(study.population.state(member.number).keys[0]) == 0
        for name in ("lr", "momentum"):
            held = float(study.population.state(member.number).opt_state.hyperparams[name])
            assert held == pytest.approx(member.config[name])
            assert SPACE[name].low <= held <= SPACE[name].high
        for _, parent in member.parents:
            assert members[parent].config["width"] == member.config["width"]


def test_values_that_python_holds_for_equal_are_two_groups(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []

    def build_kinds(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        seen.append(fixed["kind"])
        return build({}, members)

    numpy = pytest.importorskip("numpy")
    table = {"lr": numpy.array([0.1, 0.2]), "momentum": [0.0, 0.5], "kind": [1, True], "seed": numpy.arange(2)}
    population = tune.population(build_kinds, table, nonfusible=["kind"])
    assert [repr(kind) for kind in seen] == ["1", "True"]
    population.save(tmp_path)
    again = tune.population(build_kinds, nonfusible=["kind"])
    again.load(tmp_path)
    assert [repr(group.fixed["kind"]) for group in again.groups] == ["1", "True"]
    population.fit(1)
    with pytest.raises(ValueError, match="'kind' has 1 values; give fusible names one for each of the pairs"):
        population.copy([(0, 0)], kind=[1])
    with pytest.raises(ValueError, match="'lr' has 2 values; give"):
        population.copy([(0, 0)], lr=[0.1, 0.2])
    population.add([{"lr": 0.1, "momentum": 0.0, "kind": 1}])
    with pytest.raises(ValueError, match="members 2 and 0 have trained 0 and 1 epochs, or differ"):
        population.copy([(2, 0)])


def test_bad_builds() -> None:
    def few(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        return build(fixed, {name: values[:1] for name, values in members.items()})

    with pytest.raises(hfta.errors.StateError, match=r"returned 1 models and a loader for 1 for \d+ members"):
        tune.run(few, SPACE, **STUDY)
    with pytest.raises(KeyError, match=r"no metric 'accuracy'; it has .*error"):
        tune.run(build, SPACE, **STUDY | {"metric": "accuracy", "epochs": 1, "max_models": 4})


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(ids="CmaEs|GP")
@pytest.mark.parametrize(
    ("kind", "options", "asked"),
    [
        ("TPESampler", {"n_startup_trials": 2, "constant_liar": True}, [2, 4, 6]),
        ("CmaEsSampler", {"n_startup_trials": 2}, [2, 4, 6]),
        ("GPSampler", {"n_startup_trials": 2}, [2, 4, 6]),
        ("QMCSampler", {"qmc_type": "sobol", "scramble": True}, [6]),
    ],
)
def test_samplers_are_asked_in_batches(kind: str, options: Mapping[str, Any], asked: list[int]) -> None:
    sizes: list[int] = []

    def search(**more: Any) -> tune.Study:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = getattr(optuna.samplers, kind)(seed=0, **options)
        sizes.clear()
        callback = [lambda study: sizes.append(len(study.trials))]
        return tune.run(build, FLAT, sampler=sampler, callbacks=callback, **SIX, **more)

    batch = {} if len(asked) == 1 else {"batch": 2}
    study = search(**batch)
    assert sizes == asked
    if kind == "QMCSampler":
        # The first four points of the sequence, and its first eight, have one in each part of as many.
        assert sorted(int(trial.params["momentum"] / 0.9 * 4) for trial in study.trials[:4]) == [0, 1, 2, 3]
    else:
        drawn = tune.run(build, FLAT, sampler=optuna.samplers.RandomSampler(seed=0), **SIX, **batch)
        assert [trial.params for trial in study.trials] != [trial.params for trial in drawn.trials]
    assert told(search(**batch)) == told(study)


@pytest.mark.exhaustive
def test_a_storage_shows_trials_while_they_train(tmp_path: pathlib.Path) -> None:
    """From before the first epoch on, with curves, states, times and names of the objective."""
    url, seen = f"sqlite:///{tmp_path}/study.db", []

    def look() -> list[Any]:
        seen.append(optuna.load_study(storage=url, study_name="study").trials)
        return seen[-1]

    def build_watched(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        if fixed["width"] == 6:
            raise RuntimeError("too wide")
        return found._replace(evaluate=after(lambda state: look(), found.evaluate))

    options = STUDY | {"epochs": 27, "storage": url, "name": "study", "max_models": 16, "scheduler": tune.halving()}
    study = tune.run(build_watched, SPACE, callbacks=[lambda _: look()], **options)
    # Before anything has trained, all trials are there.
    assert [trial.state.name for trial in seen[0]] == ["RUNNING"] * len(study.trials)
    assert any(trial.state.name == "RUNNING" and trial.intermediate_values for found in seen for trial in found)
    shown = optuna.load_study(storage=url, study_name="study")
    assert shown.metric_names == study.optuna.metric_names == ["error"]
    for trial, found in zip(study.trials, shown.trials, strict=True):
        metrics = study.population.members[trial.members[0]].metrics
        rungs = (1, 3, 9, 27)[: len(trial.values)]
        expected = {epoch: metrics[epoch - 1]["error"] for epoch in {*rungs, *range(3, len(metrics) + 1, 3)}}
        assert found.intermediate_values == expected
        # What Optuna holds for the value of a trial that was stopped.
        assert found.values == ([trial.values[-1][0]] if trial.values else None)
        assert found.user_attrs.get("error") == trial.error
        assert found.datetime_start < found.datetime_complete
    assert {trial.state.name for trial in shown.trials} == {"COMPLETE", "PRUNED", "FAIL"}


def test_several_objectives_have_a_front() -> None:
    options = STUDY | {"metric": ("error", "loss"), "direction": ("minimize", "maximize"), "epochs": 2}
    study = tune.run(build, SPACE, max_models=16, **options)
    assert all(len(trial.values[-1]) == 2 for trial in study.trials)
    values = [trial.values[-1] for trial in study.trials]
    front = {
        place
        for place, (error, loss) in enumerate(values)
        if not any(e <= error and k >= loss and (e, k) != (error, loss) for e, k in values)
    }
    assert {trial.number for trial in study.optuna.best_trials} == front
    with pytest.raises(ValueError, match="there are several objectives"):
        _ = study.best
    assert repr(study) == f"<Study of {len(values)} trials ({len(values)} complete)>"


def test_arrays_that_do_not_fit_are_halved() -> None:
    def refuse(state: Any, batch: Any) -> None:
        if hfta.num_models(state) > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")

    def build_large(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        return found._replace(step=after(refuse, found.step))

    population = tune.population(build_large, {"lr": [0.1] * 8, "momentum": [0.0] * 8}, max_models=8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        population.fit(1)
    message = "an array of 8 members ran out of memory; arrays of 4 are trained instead"
    assert message in {str(one.message) for one in seen}
    assert [member.epoch for member in population.members] == [1] * 8
    population.fit(1)
    assert [member.epoch for member in population.members] == [2] * 8
