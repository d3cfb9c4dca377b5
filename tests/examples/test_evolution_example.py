"""The example of evolution strategies, in small."""

import re

import pytest
from examples.evolution.main import main

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = "--population 16 --generations 4 --every 2".split()


def fitness(capsys, runs):
    """Fitness at the second line, and scores, of all runs."""
    lines = capsys.readouterr().out.splitlines()
    assert re.match(rf"CPU time: [\d.]+ s, [\d.]+ ms for {16 * runs} members of a generation", lines[-1])
    assert lines[2].split()[0] == "4"
    return lines[2].split()[1:], [line.split()[2] for line in lines[-2 - runs : -2]]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_network_of_thresholds_learns(capsys, rank):
    pytest.importorskip("sklearn", reason="the example's data: needs scikit-learn")
    assert main(["digits", *SMALL, *"--rows 100 --lr 0.1 0.2 --runs 2 --rank".split(), rank]) == 0
    found, scores = fitness(capsys, 2)
    assert main(["digits", *SMALL, *"--rows 100 --lr 0.1 --runs 1 --rank".split(), rank]) == 0
    assert fitness(capsys, 1) == (found[:1], scores[:1])
    assert all(-2.6 < float(value) < -0.5 for value in found) and all(0 <= float(value) <= 1 for value in scores)


def test_the_policy_learns(capsys):
    pytest.importorskip("gymnasium", reason="needs gymnasium; pip install 'hfta_func[rl]'")
    assert main(["cartpole", *SMALL, *"--runs 2 --steps 40 --episodes 1".split()]) == 0
    found, scores = fitness(capsys, 2)
    assert all(8 < float(value) <= 40 for value in (*found, *scores))


def test_lines_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["cartpole", "--generations", "5", "--every", "2"])
    assert "--generations is 5; give a multiple of --every 2" in capsys.readouterr().err
