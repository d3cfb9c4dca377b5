"""Arrays as trials of Ray Tune: a trial is the array's run, also after it was restored elsewhere."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import hfta_func as hfta
from hfta_func import cluster
from processes import local_ray
from studies import build

tune = pytest.importorskip("ray.tune", reason="needs Ray Tune; pip install 'ray[tune]'", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore", "ignore::pytest.PytestUnraisableExceptionWarning")
CONFIG = {"width": 4, "lr": [0.01, 0.05, 0.1], "momentum": [0.0, 0.5, 0.9], "seed": [3, 1, 2]}


def expected(config: dict[str, Any], epochs: int) -> list[float]:
    members = {name: value for name, value in config.items() if isinstance(value, list)}
    array = build({"width": config["width"]}, members)
    _, history = hfta.fit(array.step, array.state, array.loader, epochs=epochs, evaluate=array.evaluate, progress=False)
    return history["error"][-1].tolist()


def test_a_trial_is_the_run_of_its_array_and_goes_on_elsewhere(tmp_path: pathlib.Path) -> None:
    made = cluster.trainable(build)
    trial, other = made(CONFIG), made(CONFIG)
    for _ in range(2):
        trial.train()
    trial.save_checkpoint(str(tmp_path))
    # It has dealt other epochs before.
    for _ in range(3):
        other.train()
    other.load_checkpoint(str(tmp_path))
    for each in (trial, other):
        found = each.train()
        assert found["error_members"] == expected(CONFIG, 3)
        assert found["error_min"] == min(found["error_members"]) < found["error"] < found["error_max"]
    assert len({*found["error_members"]}) == 3


def test_configs_without_members_are_refused() -> None:
    for config in ({"lr": 0.1}, {"lr": [0.1], "seed": [1, 2]}, {"lr": []}):
        with pytest.raises(ValueError, match=r"the config has lists of lengths \{.*one value per member"):
            cluster.trainable(build)(config)


@pytest.mark.exhaustive
def test_a_tuner_runs_arrays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    with local_ray(num_cpus=2):
        tuner = tune.Tuner(
            cluster.trainable(build),
            param_space=CONFIG | {"width": tune.grid_search([4, 6])},
            run_config=tune.RunConfig(stop={"training_iteration": 2}, storage_path=str(tmp_path), verbose=0),
        )
        found = {result.config["width"]: result.metrics for result in tuner.fit()}
    for width in (4, 6):
        assert found[width]["error_members"] == expected(CONFIG | {"width": width}, 2)
