"""The short examples: how few lines they take, and that they do what they say."""

import ast
import importlib
import itertools
import pathlib
import re
import sys

import pytest

SHORT = pathlib.Path(__file__).parents[2] / "examples" / "short"
LINES = {"deep_ensemble": 14, "halving": 24, "federated": 20, "subjects": 20, "gan": 22}

pytestmark = pytest.mark.usefixtures("one_thread")


def run(name, capsys):
    sys.modules.pop(f"examples.short.{name}", None)
    importlib.import_module(f"examples.short.{name}")
    return capsys.readouterr().out


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.parametrize("name", LINES)
def test_lines(name):
    source = (SHORT / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0].end_lineno
    assert len([line for line in source.splitlines()[docstring:] if line.strip()]) <= LINES[name]
    assert {path.stem for path in SHORT.glob("*.py")} == {"__init__", *LINES}


@pytest.mark.exhaustive
def test_an_ensemble_errs_less_than_its_members(capsys):
    error, alone, deviation = numbers(run("deep_ensemble", capsys))
    assert 0.3 < error < alone < 0.6 and 0.05 < deviation < 0.5


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
    rows = [line.split() for line in run("subjects", capsys).splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [*range(24)] and len({row[1] for row in rows}) > 5
    errors = [float(row[2]) for row in rows]
    assert max(errors) < 0.5 and sum(errors) / 24 < 0.2


@pytest.mark.exhaustive
def test_generators_find_the_points(capsys):
    found = numbers(run("gan", capsys))
    assert len(found) == 4 and min(found) < 0.25 and max(found) < 0.6
