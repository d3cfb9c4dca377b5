"""The example of evolution strategies, in small."""

import re

import pytest
from examples.evolution.main import main

pytestmark = pytest.mark.usefixtures("one_thread")


def fitness(capsys, runs):
    """Fitness at both lines, and scores, of all runs."""
    lines = capsys.readouterr().out.splitlines()
    assert re.match(rf"CPU time: [\d.]+ s, [\d.]+ ms for {16 * runs} members of a generation", lines[-1])
    assert len(lines) == 8 + runs
    return [line.split()[1:] for line in lines[1:3]], [line.split()[2] for line in lines[-2 - runs : -2]]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_network_of_thresholds_learns(capsys, rank):
    pytest.importorskip("sklearn", reason="the example's data: needs scikit-learn")
    order = f"digits --population 16 --generations 24 --every 12 --rows 100 --rank {rank}".split()
    assert main([*order, *"--lr 0.01 0.02 --runs 2".split()]) == 0
    (first, last), scores = fitness(capsys, 2)
    assert all(float(then) > float(now) + 0.05 for then, now in zip(last, first, strict=True))
    assert main([*order, *"--lr 0.02 --runs 1 --seed 1".split()]) == 0
    assert fitness(capsys, 1) == ([first[1:], last[1:]], scores[1:])


def test_the_policy_learns(capsys):
    pytest.importorskip("gymnasium", reason="needs gymnasium; pip install 'hfta_func[rl]'")
    assert main("cartpole --population 16 --generations 8 --every 4 --runs 2 --steps 40 --episodes 1".split()) == 0
    (first, last), scores = fitness(capsys, 2)
    assert all(float(then) > float(now) for then, now in zip(last, first, strict=True))
    assert all(8 < float(value) <= 40 for value in scores)


def test_lines_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["cartpole", "--generations", "5", "--every", "2"])
    assert "--generations is 5; give a multiple of --every 2" in capsys.readouterr().err
