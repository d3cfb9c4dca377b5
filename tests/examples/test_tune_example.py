"""The studies of HFHT, in every mode."""

from __future__ import annotations

import csv
import pathlib

import pytest

pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from examples.tune.main import STUDIES, main

# Sums of another number of threads are rounded otherwise.
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--size", "small", "--limit", "24", "--max-models", "4", "--seed", "3"]
RANDOM = ["--algorithm", "random", "--random-n-configs", "3", "--random-n-iters", "1"]
HYPERBAND = ["--hyperband-max-iters", "3", "--hyperband-skip-last", "0"]


def rows(folder: pathlib.Path, name: str = "history") -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.exhaustive
@pytest.mark.parametrize("study", STUDIES)
def test_every_mode_searches_the_same(study: str, tmp_path: pathlib.Path) -> None:
    modes = ("array", "serial") if study == "mobilenet" else ("array", "serial", "processes")
    for mode in modes:
        order = [study, *SMALL, "--mode", mode, "--outdir", str(tmp_path / mode)]
        assert main([*order, *(RANDOM if study == "mobilenet" else HYPERBAND)]) == 0
    array, *others = (rows(tmp_path / mode) for mode in modes)
    for other in others:
        assert list(other[0]) == list(array[0])
        names = [name for name in array[0] if name not in ("status", "epochs", "seconds", "accuracy")]
        assert [[row[name] for name in names] for row in other] == [[row[name] for name in names] for row in array]
        assert sorted(row["epochs"] for row in other) == sorted(row["epochs"] for row in array)
    assert [row["accuracy"] for row in others[0]] == [row["accuracy"] for row in others[-1]]
    best = max(float(row["accuracy"]) for row in array)
    assert float(rows(tmp_path / "array", "trajectory")[-1]["accuracy"]) == best
