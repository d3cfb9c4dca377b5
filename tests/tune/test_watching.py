"""What others see of a study while it runs: TensorBoard and Prometheus."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from hfta_func import tune
from studies import SPACE, STUDY, build


class BrokenOff(Exception):
    pass


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
            raise BrokenOff

    # What is written again after a break replaces what was there.
    with pytest.raises(BrokenOff):
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
