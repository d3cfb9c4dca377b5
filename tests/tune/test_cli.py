"""The command line, on a study in a file."""

from __future__ import annotations

import csv
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from hfta_func.tune import cli

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


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_of_a_file(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("9 trials, ") and printed.err.endswith("3 complete, 6 stopped\n")
    history = rows(study.parent / "example_study.study" / "history.csv")
    assert len(history) == 9 and [row["status"] for row in history].count("complete") == 3
    trajectory = rows(study.parent / "example_study.study" / "trajectory.csv")
    losses, seconds = ([float(row[name]) for row in trajectory] for name in ("loss", "seconds"))
    assert losses == sorted(losses, reverse=True) and seconds == sorted(seconds)
    assert losses[-1] == min(float(row["loss"]) for row in history)
    # The same command has nothing left to do.
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "9"]) == 0
    assert capsys.readouterr().out == printed.out
    assert rows(study.parent / "example_study.study" / "history.csv") == history
    # More trials train what is missing; another scheduler is another study.
    assert cli.main(["tune", "example_study.py", "--scheduler", "halving", "--trials", "12"]) == 0
    grown = rows(study.parent / "example_study.study" / "history.csv")
    assert grown[:9] == history and len(grown) == 12
    assert cli.main(["tune", "example_study.py"]) == 1
    assert "the storage has another study 'study', whose scheduler is" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_storage_sampler_and_seeds(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ["tune", "example_study.py", "--sampler", "tpe", "--batch", "2", "--seeds", "2", "--max-models", "auto"]
    assert cli.main([*order, "--storage", "sqlite:///study.db", "--folder", "kept", "--epochs", "1"]) == 0
    import optuna

    found = optuna.load_study(storage="sqlite:///study.db", study_name="example_study")
    assert [trial.state.name for trial in found.trials] == ["COMPLETE"] * 6
    assert len(rows(study.parent / "kept" / "history.csv")) == 6


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
        assert process.stderr.readline() == "4 running, 2 complete\n"
        # Others read it while the study runs.
        grown = rows(study.with_suffix(".study") / "history.csv")
        assert [row["status"] for row in grown].count("complete") == 2 and len(grown) == 6
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; the same command goes on from" in err
    kept = [row["status"] for row in rows(study.with_suffix(".study") / "history.csv")]
    assert 2 <= kept.count("complete") < 6
    again = subprocess.run(order, check=True, capture_output=True, text=True, env=environment)
    assert again.stdout.startswith("6 trials, ")
    runs = study.with_suffix(".study") / "tensorboard"
    assert sorted(path.name for path in runs.iterdir()) == [f"trial-{number:04d}" for number in range(6)]
    assert cli.main(["tune", str(study), "--folder", "whole"]) == 0
    history = [rows(folder / "history.csv") for folder in (study.with_suffix(".study"), study.parent / "whole")]
    assert [(row["trial"], row["loss"]) for row in history[0]] == [(row["trial"], row["loss"]) for row in history[1]]


@pytest.mark.exhaustive
def test_the_status_of_a_study(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "nowhere"]) == 1
    assert "nowhere holds no study that has run; pass the folder" in capsys.readouterr().err
    gate = study.parent / "gate"
    study.write_text(
        STUDY.replace("import torch\n", "import os, time, torch\n", 1).replace(
            "    return (model(",
            f"    while not os.path.exists({str(gate)!r}):\n        time.sleep(0.01)\n    return (model(",
        )
    )
    order = [sys.executable, "-m", "hfta_func.tune.cli", "tune", str(study), "--scheduler", "halving"]
    folder = str(study.with_suffix(".study"))
    with subprocess.Popen(order, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            if cli.main(["status", folder]) == 0 and "epochs 1 to 1" in (printed := capsys.readouterr().out):
                break
            time.sleep(0.1)
        assert printed.startswith("running: 6 running, of 6 trials\n") and "this process: trials " in printed
        process.kill()
        process.communicate()
    assert cli.main(["status", folder]) == 0
    assert "not running any more (last status" in capsys.readouterr().out
    gate.touch()
    assert cli.main(["tune", str(study), "--scheduler", "halving"]) == 0
    capsys.readouterr()
    assert cli.main(["status", folder]) == 0
    # Six train one epoch, two of them two more.
    assert capsys.readouterr().out.startswith("ended: 2 complete, 4 stopped, of 6 trials\n")
    log = (study.with_suffix(".study") / "study.log").read_text()
    assert "hfta_func.tune members " in log and " train for 1 epochs" in log


@pytest.mark.exhaustive
def test_plan_explain_profile_and_doctor(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "example_study.py", "--limit", "8", "--sizes", "1", "4"]) == 0
    assert "8 of 8 models fit" in capsys.readouterr().out
    assert cli.main(["explain", "example_study.py", "--models", "3"]) == 0
    assert "linear" in capsys.readouterr().out
    assert cli.main(["profile", "example_study.py", "--models", "3", "--trace", "step.json"]) == 0
    assert "3 models, eager" in capsys.readouterr().out and pathlib.Path("step.json").stat().st_size
    assert cli.main(["profile", "example_study.py", "--trace", "step.txt"]) == 1
    assert "pass a file .json or .json.gz" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    found = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["torch"].strip() and "runs as" in found["rules"]


@pytest.mark.parametrize(
    ("text", "order", "message"),
    [
        (None, [], "there is no file"),
        ("x = 1", [], "does not define build"),
        (STUDY.replace("metric, direction", "other, direction"), [], "does not define metric; define it there"),
        (
            STUDY.replace("trials, epochs", "other, epochs"),
            [],
            "does not define trials; define it there, or pass --trials",
        ),
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


def test_names_that_are_almost_arguments(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write_text(STUDY + "\nschedular = tune.halving()\n")
    assert cli.main(["tune", str(study)]) == 0
    assert "defines schedular, which is not used; did you mean scheduler?" in capsys.readouterr().err


def test_a_file_that_cannot_be_run(study: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write_text("1 / 0\n")
    assert cli.main(["tune", str(study)]) == 1
    assert "example_study.py cannot be run: ZeroDivisionError: division by zero" in capsys.readouterr().err
