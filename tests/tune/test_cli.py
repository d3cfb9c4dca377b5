"""The command line, on a study in a file."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

optuna = pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from hfta_func.tune import cli  # noqa: E402

STUDY = """
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from torch import nn
import hfta_func as hfta
from hfta_func import tune

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
space = {"lr": FloatDistribution(1e-3, 0.3, log=True), "width": CategoricalDistribution([4, 8])}
nonfusible = ["width"]
metric, direction = "loss", "minimize"
trials, epochs = 6, 3
max_models = 4

def loss_fn(model, batch):
    return (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()

def build(fixed, members):
    def factory():
        return nn.Sequential(nn.Linear(4, fixed["width"]), nn.Tanh(), nn.Linear(fixed["width"], 1))
    seeds = members["seed"]
    step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"]))
    state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
    return tune.Array(step, state, hfta.ArrayLoader(x, 16, seeds=seeds), model=factory())
"""


@pytest.fixture
def study(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    file = tmp_path / "example_study.py"
    file.write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "example_study", raising=False)
    return file


def test_a_study_of_a_file(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("9 trials\n") and printed.out.count("stopped") == 2
    # The same command has nothing left to do.
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "9"]) == 0
    assert capsys.readouterr().out == printed.out
    # More trials train what is missing; another scheduler is another study.
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "12"]) == 0
    assert capsys.readouterr().out.startswith("12 trials\n")
    assert cli.main(["tune", "example_study.py"]) == 1
    assert "the storage has another study 'study', whose scheduler is" in capsys.readouterr().err


def test_storage_and_seeds(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ["tune", "example_study.py", "--seeds", "2", "--storage", "sqlite:///study.db", "--folder", "kept"]
    assert cli.main([*order, "--epochs", "1"]) == 0
    shown = optuna.load_study(storage="sqlite:///study.db", study_name="example_study")
    assert [trial.state.name for trial in shown.trials] == ["COMPLETE"] * 6


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processors that can be chosen")
def test_workers_import_the_file(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "example_study.py", "--epochs", "1"]) == 0
    alone = capsys.readouterr().out.splitlines()[1:]
    assert cli.main(["tune", "example_study.py", "--epochs", "1", "--folder", "other", "--workers", "auto"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == alone
    assert cli.main(["tune", "example_study.py", "--folder", "other", "--workers", "999"]) == 1
    assert "workers is 999, more than the" in capsys.readouterr().err


@pytest.mark.soak
def test_ctrl_c_saves_and_the_same_command_goes_on(study: pathlib.Path) -> None:
    study.write_text(
        STUDY.replace("trials, epochs = 6, 3", "trials, epochs = 6, 400").replace("max_models = 4", "max_models = 2")
    )
    order = [sys.executable, "-m", "hfta_func.tune.cli", "tune", str(study), "--tensorboard"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(order, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        while not (study.with_suffix(".study") / "tensorboard").is_dir():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; the same command goes on from" in err
    again = subprocess.run(order, check=True, capture_output=True, text=True, env=environment)
    assert again.stdout.startswith("6 trials\n")
    runs = study.with_suffix(".study") / "tensorboard"
    assert sorted(path.name for path in runs.iterdir()) == [f"trial-{number:04d}" for number in range(6)]


@pytest.mark.parametrize(
    ("text", "order", "message"),
    [
        (None, [], "there is no file"),
        ("x = 1", [], "does not define build"),
        (STUDY.replace("metric, direction", "other, direction"), [], "does not define metric; define it there"),
        (STUDY, ["--epochs", "0"], "epochs is 0; give an integer of at least 1"),
        (STUDY.replace('"loss", "minimize"', '"accuracy", "minimize"'), [], "no metric 'accuracy'; it has"),
    ],
)
def test_bad_input(
    study: pathlib.Path, text: str | None, order: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is None:
        study.unlink()
    else:
        study.write_text(text)
    assert cli.main(["tune", str(study), *order]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.splitlines()[-1].startswith("hfta-func: ")
