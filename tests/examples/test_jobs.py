"""The jobs: how few lines they take beside the loop, and that both find the same."""

import ast
import importlib
import itertools
import pathlib
import re
import sys

import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn; pip install 'hfta_func[examples]'")
JOBS = pathlib.Path(__file__).parents[2] / "examples" / "jobs"
LOOPS = sorted(path.stem for path in JOBS.glob("*_loop.py"))
NAMES = [name.removesuffix("_loop") for name in LOOPS]
LINES = {"ensemble": 18, "halving": 24, "federated": 20, "subjects": 20, "gan": 22}

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def run(name, capsys, *arguments):
    sys.modules.pop(f"examples.jobs.{name}", None)
    argv, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        importlib.import_module(f"examples.jobs.{name}")
    finally:
        sys.argv = argv
    return capsys.readouterr().out


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def count(name):
    """Lines of code: no docstring, no comments, nothing blank."""
    source = (JOBS / f"{name}.py").read_text()
    body = source.splitlines()[ast.parse(source).body[0].end_lineno :]
    assert max(map(len, body)) <= 120 and not [line for line in body if ";" in line]
    return len([line for line in body if line.strip() and not line.strip().startswith("#")])


def test_lines():
    """Never more than the loop, and at most 70 % together."""
    lines = {name: (count(name), count(f"{name}_loop")) for name in NAMES}
    assert len(lines) == 9 and all(array <= loop for array, loop in lines.values())
    arrays, loops = zip(*lines.values(), strict=True)
    assert sum(arrays) <= 0.7 * sum(loops), lines
    gallery = (JOBS.parents[1] / "docs" / "gallery.md").read_text()
    for name, (array, loop) in lines.items():
        assert f"[{array}](../examples/jobs/{name}.py) | [{loop}](../examples/jobs/{name}_loop.py)" in gallery
    for name, most in LINES.items():
        assert count(name) <= most
    assert {path.stem for path in JOBS.glob("*.py")} == {"__init__", *NAMES, *LOOPS, "halving", "federated"}


def near(*bounds):
    """Whether two lists of numbers are near each other, each number within a bound of its own."""

    def check(array, loop):
        assert len(array) == len(loop) == len(bounds)
        for found, expected, bound in zip(array, loop, bounds, strict=True):
            assert abs(found - expected) <= bound

    return check


# About three standard errors of the difference of both; a learning rate that is drawn is drawn alike.
AGREE = {
    "seeds": near(0.01, 0.006),
    "folds": near(0.015, 0.012),
    "trials": near(0.02, 0.05),
    "checkpoints": near(0.008, 5.0),
    "ensemble": near(0.06, 0.06, 0.06),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", AGREE)
def test_array_and_loop_find_the_same(name, capsys, tmp_path):
    files = tmp_path / "array", tmp_path / "loop"
    found, expected = (run(one, capsys, file) for one, file in zip((name, f"{name}_loop"), files, strict=True))
    AGREE[name](numbers(found), numbers(expected))
    if name == "checkpoints":
        # What has ended is not trained again.
        assert run(name, capsys, files[0]) == found and run(f"{name}_loop", capsys, files[1]) == expected
    if name == "ensemble":
        error, alone, deviation = numbers(found)
        assert 0.3 < error < alone < 0.6 and 0.05 < deviation < 0.5
        for file in files:
            mean, std = torch.export.load(file).module()(torch.randn(5, 10))
            assert mean.shape == std.shape == (5,)


@pytest.mark.exhaustive
def test_grids_are_the_same_table(capsys):
    found, expected = (run(name, capsys).splitlines() for name in ("grid", "grid_loop"))
    assert found[:2] == expected[:2] and len(found) == len(expected) == 5
    for row, other in zip(found[2:], expected[2:], strict=True):
        (rate, *values), (same, *others) = map(str.split, (row, other))
        assert rate == same
        near(*[0.06] * 3)([*map(float, values)], [*map(float, others)])


@pytest.mark.exhaustive
def test_the_first_example_and_its_loop_print_one_table(capsys):
    found, expected = (run(name, capsys).splitlines() for name in ("first", "first_loop"))
    assert found[1].split() == expected[1].split() and len(found) == len(expected) == 12
    for row, other in zip(found[2:], expected[2:], strict=True):
        # Member, seed and learning rate; other batches make another best epoch.
        assert row.split()[:3] == other.split()[:3] and abs(float(row.split()[3]) - float(other.split()[3])) < 0.02


@pytest.mark.exhaustive
def test_halves_go_on(capsys):
    rungs = [re.findall(r"\d+\.\d+", line) for line in run("halving", capsys).splitlines()]
    assert len(rungs) == 4 and all(set(after) <= set(before) for before, after in itertools.pairwise(rungs))
    assert len(rungs[0]) >= 32 and 4 <= len(rungs[-1]) <= 12 and all(0.001 < float(rate) < 0.2 for rate in rungs[-1])


@pytest.mark.exhaustive
def test_clients_that_hold_few_classes_learn_all_of_them(capsys):
    found = numbers(run("federated", capsys))
    assert len(found) == 30 and found[-1] > 0.7 and max(found[:3]) < 0.6


@pytest.mark.exhaustive
def test_every_subject_is_fitted_until_its_own_best_epoch(capsys):
    tables = []
    for name in ("subjects", "subjects_loop"):
        rows = [line.split() for line in run(name, capsys).splitlines()[1:]]
        assert [int(row[0]) for row in rows] == [*range(24)] and len({row[1] for row in rows}) > 5
        tables.append(torch.tensor([float(row[2]) for row in rows]))
    assert all(errors.max() < 0.5 and errors.mean() < 0.2 for errors in tables)
    assert abs(tables[0].mean() - tables[1].mean()) < 0.04


@pytest.mark.exhaustive
def test_generators_find_the_points(capsys):
    for name in ("gan", "gan_loop"):
        found = numbers(run(name, capsys))
        assert len(found) == 4 and min(found) < 0.25 and max(found) < 0.6
