"""A study is its storage: called again it trains what is missing; it can be stopped, retried, and keeps few states."""

from __future__ import annotations

import gc
import itertools
import pathlib
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta

optuna = pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from hfta_func import tune  # noqa: E402
from studies import SCHEDULERS, SPACE, STUDY, X, Y, after, build, loss_fn, told  # noqa: E402

FLAT = {name: SPACE[name] for name in ("lr", "momentum")}
SIX: dict[str, Any] = STUDY | {"nonfusible": (), "trials": 6, "epochs": 3, "max_models": 2}


def kept(where: str, folder: pathlib.Path) -> dict[str, Any]:
    """The arguments of a study that is kept in a folder, in a storage, or in both."""
    storage = {"storage": f"sqlite:///{folder}/study.db", "name": "study"} if where != "folder" else {}
    return storage | ({"resume": folder / "study"} if where != "storage" else {})


@pytest.mark.parametrize("scheduler", ["none", "halving", "asynchronous", "median"])
@pytest.mark.parametrize("where", ["folder", "storage", "both"])
def test_the_same_call_trains_what_is_missing(where: str, scheduler: str, tmp_path: pathlib.Path) -> None:
    trained: list[int] = []

    def counted(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        trained.append(len(members["seed"]))
        return build(fixed, members)

    def stop(study: tune.Study) -> None:
        if len(trained) == 2:
            study.optuna.stop()

    options = SIX | {"scheduler": SCHEDULERS[scheduler]} | kept(where, tmp_path)
    first = tune.run(counted, FLAT, callbacks=[stop], **options)
    assert first.interrupted and first.counts["running"] and sum(trained) < 6
    ended = {trial.number: trial for trial in first.trials if trial.status != "running"}
    trained.clear()
    study = tune.run(counted, FLAT, **options)
    whole = tune.run(build, FLAT, **SIX | {"scheduler": SCHEDULERS[scheduler]})
    if scheduler == "asynchronous" and where == "storage":
        # Who arrives first is another one where trials begin again.
        assert not any(trial.status == "running" for trial in study.trials)
    else:
        assert told(study) == told(whole)
    assert all(study.trials[number] == trial for number, trial in ended.items())
    known = {one.number: one.intermediate_values for one in study.optuna.trials}
    assert list(study.frame()["epochs"]) == [len(trial.values) and max(known[trial.number]) for trial in study.trials]
    trained.clear()
    again = tune.run(counted, FLAT, **options)
    assert told(again) == told(study) and again.best == study.best
    assert again.frame().drop(columns="seconds").equals(study.frame().drop(columns="seconds"))
    if where == "storage":
        assert not trained
        with pytest.raises(ValueError, match="and its state is gone"):
            again.state(again.best.number)
    else:
        mine, other = (one.state(whole.best.number).params for one in (again, whole))
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", ["folder", "storage"])
@pytest.mark.parametrize("scheduler", [None, tune.halving(), tune.hyperband(), tune.population_based()])
def test_more_trials_later(scheduler: Any, where: str, tmp_path: pathlib.Path) -> None:
    options = SIX | {"scheduler": scheduler} | kept(where, tmp_path)
    first = tune.run(build, FLAT, **options)
    if where == "storage" and scheduler is not None and scheduler.copies:
        with pytest.raises(ValueError, match="trial 0 has ended, and this study needs the metrics and states of all"):
            tune.run(build, FLAT, **options | {"trials": 9})
        return
    study = tune.run(build, FLAT, **options | {"trials": 9})
    assert study.trials[:6] == first.trials and len(study.trials) == 9 and study.counts["running"] == 0
    whole = tune.run(build, FLAT, **SIX | {"trials": 9})
    asked = [[trial.params for trial in one.optuna.trials] for one in (study, whole)]
    assert asked[0] == asked[1]
    if scheduler is None:
        assert told(study) == told(whole)
    elif scheduler.waits:
        # Those that are added are compared with each other.
        assert {trial.cohort for trial in study.trials[6:]}.isdisjoint(trial.cohort for trial in first.trials)
    assert told(tune.run(build, FLAT, **options)) == told(study)


def test_samplers_that_learn_go_on_as_if_they_had_not_been_stopped(tmp_path: pathlib.Path) -> None:
    def search(callbacks: Sequence[Any] = (), **more: Any) -> tune.Study:
        sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=2)
        return tune.run(build, FLAT, sampler=sampler, batch=2, callbacks=callbacks, **SIX, **more)

    whole = search()
    for where in ("folder", "storage"):
        (tmp_path / where).mkdir()
        for _ in range(3):
            study = search([lambda study: study.optuna.stop()], **kept(where, tmp_path / where))
        assert told(study) == told(whole)


def failing(broken: list[float]) -> Any:
    """A ``build`` whose members of some learning rates cannot be made, once for each."""

    def build_failing(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        for lr in members["lr"]:
            if lr in broken:
                if len(members["lr"]) == 1:
                    broken.remove(lr)
                raise RuntimeError("out of luck")
        return build(fixed, members)

    return build_failing


@pytest.mark.parametrize("where", ["folder", "storage"])
@pytest.mark.parametrize("scheduler", [None, tune.halving()])
def test_trials_that_failed_stay_so(scheduler: Any, where: str, tmp_path: pathlib.Path) -> None:
    options = SIX | {"scheduler": scheduler}
    whole = tune.run(build, FLAT, **options)
    bad = [whole.trials[1].params["lr"], whole.trials[4].params["lr"]]
    options |= kept(where, tmp_path)
    for _ in range(2):
        study = tune.run(failing([*bad]), FLAT, **options)
        assert [trial.number for trial in study.trials if trial.status == "failed"] == [1, 4]
        assert study.trials[1].error == "RuntimeError: out of luck"
        assert study.counts["running"] == 0 and len(study.trials) == 6


@pytest.mark.parametrize("max_models", [2, 6])
def test_a_study_ends_after_some_seconds_and_goes_on(max_models: int, tmp_path: pathlib.Path) -> None:
    def slow(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        return found._replace(evaluate=after(lambda state: time.sleep(0.05), found.evaluate))

    options = SIX | {"epochs": 400, "max_models": max_models, "resume": tmp_path / "study"}
    study = tune.run(slow, FLAT, timeout=1.0, **options)
    epochs = max(member.epoch for member in study.population.members)
    assert 0 < epochs < 400 and study.counts["running"] == 6
    again = tune.run(slow, FLAT, timeout=0.5, **options)
    assert epochs < max(member.epoch for member in again.population.members) < 400
    for member, before in zip(again.population.members, study.population.members, strict=True):
        assert member.metrics[: before.epoch] == before.metrics
    alone = tune.population(build, [again.population.members[0].config])
    alone.fit(again.population.members[0].epoch)
    for mine, other in zip(again.population.members[0].metrics, alone.members[0].metrics, strict=True):
        assert mine["error"] == pytest.approx(other["error"], rel=1e-9)


def test_those_that_are_kept() -> None:
    for keep, count in (("best", 1), (3, 3), ("all", 6)):
        study = tune.run(build, FLAT, keep=keep, **SIX)  # pyright: ignore
        ranked = sorted(study.trials, key=lambda trial: trial.values[-1])
        for rank, trial in enumerate(ranked):
            if rank < count:
                assert hfta.num_models(study.state(trial.number)) == 1
                continue
            match = f"trial {trial.number} is complete, and its state is gone; train with"
            with pytest.raises(ValueError, match=match):
                study.export(trial.number)
    study = tune.run(build, FLAT, **SIX | {"metric": ("error", "loss"), "direction": "minimize", "epochs": 1})
    front = {trial.number for trial in study.optuna.best_trials}
    assert {*study.population.alive} == front and 0 < len(front) < 6


@pytest.mark.usefixtures("small_heap")
def test_only_trials_that_train_are_in_memory() -> None:
    """Of twelve trials, at most the two of an array that trains, the two before it, and the best."""
    states: list[Any] = []

    def alive() -> int:
        gc.collect()
        storages = {}
        for reference in states:
            if (tensor := reference()) is not None:
                storages[tensor.untyped_storage().data_ptr()] = len(tensor)
        return sum(storages.values())

    def note(state: Any) -> None:
        states.append(weakref.ref(state.params["0.weight"]))

    most: list[int] = []

    def watched(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        most.append(alive())
        found = build(fixed, members)
        note(found.state)
        return found._replace(evaluate=after(note, found.evaluate))

    study = tune.run(watched, FLAT, **SIX | {"trials": 12})
    assert len(most) == 6 and max(most) <= 5
    assert study.counts["complete"] == 12 and alive() <= 3


def sized(trial: Any) -> None:
    trial.suggest_categorical("hidden", [(4,), (6, 5)])
    trial.suggest_float("lr", 0.01, 0.1)


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution should be:UserWarning")
def test_values_may_be_tuples(tmp_path: pathlib.Path) -> None:
    def build_sized(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        def factory() -> nn.Module:
            sizes = (4, *fixed["hidden"], 1)
            return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).double()

        seeds = members["seed"]
        step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"]))
        state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
        return tune.Array(step, state, hfta.ArrayLoader((X, Y), 16, seeds=seeds), model=factory())

    options = SIX | {"nonfusible": ["hidden"], "metric": "loss", "enqueue": [{"hidden": (6, 5)}]}
    whole = tune.run(build_sized, sized, **options)
    assert {trial.params["hidden"] for trial in whole.trials} == {(4,), (6, 5)}
    assert whole.trials[0].params["hidden"] == (6, 5)
    for where in ("folder", "storage"):
        (tmp_path / where).mkdir()
        more = kept(where, tmp_path / where)
        tune.run(build_sized, sized, callbacks=[lambda study: study.optuna.stop()], **options, **more)
        for _ in range(2):
            study = tune.run(build_sized, sized, **options, **more)
            assert told(study) == told(whole)
    study.population.save(tmp_path / "saved")
    again = tune.population(build_sized, nonfusible=["hidden"])
    again.load(tmp_path / "saved")
    assert [member.config for member in again.members] == [member.config for member in study.population.members]


def test_tensorboard_has_a_run_per_trial(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard; pip install 'hfta_func[tensorboard]'")
    from tensorboard import context
    from tensorboard.backend.event_processing import data_provider, event_accumulator, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    options: dict[str, Any] = STUDY | {"scheduler": tune.halving(), "max_models": 4, "seeds": 2}
    options["resume"] = tmp_path / "study"
    arrays: list[int] = []

    def stop(study: tune.Study) -> None:
        arrays.append(sum(trial.status != "running" for trial in study.trials))
        if len(arrays) == 7:
            raise LookupError("broken off")

    # What is written again after a break replaces what was there.
    with pytest.raises(LookupError, match="broken off"):
        tune.run(build, SPACE, callbacks=[tune.tensorboard(tmp_path / "board"), stop], **options)
    assert 0 < arrays[-1] < 11
    study = tune.run(build, SPACE, callbacks=[tune.tensorboard(tmp_path / "board")], **options)

    members = study.population.members
    for trial in study.trials:
        run = event_accumulator.EventAccumulator(str(tmp_path / "board" / f"trial-{trial.number:04d}"))
        run.Reload()
        histories = [members[member].metrics for member in trial.members]
        for name in ("loss", "error"):
            expected = [[metrics[name] for metrics in history] for history in histories]
            for place, values in enumerate(expected):
                shown = run.Scalars(f"{name}/{place}")
                assert [event.step for event in shown] == [*range(1, len(values) + 1)]
                assert [event.value for event in shown] == pytest.approx(values, rel=1e-6)
            means = [(a + b) / 2 for a, b in zip(*expected, strict=True)]
            assert [event.value for event in run.Scalars(name)] == pytest.approx(means, rel=1e-6)

    # As the page HPARAMS of TensorBoard asks for them.
    found = plugin_event_multiplexer.EventMultiplexer()
    found.AddRunsFromDirectory(str(tmp_path / "board"))
    found.Reload()
    provider = data_provider.MultiplexerDataProvider(found, str(tmp_path / "board"))
    page = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=99, allowed_statuses=[0, 1, 2, 3])
    groups = list_session_groups.Handler(context.RequestContext(), page, "", request).run().session_groups
    assert len(groups) == len(study.trials) == 11
    for group in groups:
        trial = study.trials[int(group.name[6:])]
        assert {name: value.number_value for name, value in group.hparams.items()} == trial.params
        (value,) = group.metric_values
        assert value.name.tag == "error" and value.value == pytest.approx(trial.values[-1][0], rel=1e-6)
        assert group.sessions[0].status == api_pb2.STATUS_SUCCESS
