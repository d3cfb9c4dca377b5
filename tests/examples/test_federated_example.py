"""Federated averaging and peers, in small: an array reaches what a loop reaches, and averages come as expected."""

import re

import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn; pip install 'hfta_func[examples]'")
from examples.federated.main import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.exhaustive
def test_clients_of_an_array_reach_what_a_loop_reaches(capsys):
    assert main("fedavg --clients 12 --seeds 3 --rounds 12 --alpha 0.5".split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " ± " in line]
    array, loop = (torch.tensor([float(line[place]) for line in lines]) for place in (1, 4))
    spread = max(float(lines[-1][place]) for place in (3, 6))
    assert len(lines) == 12 and array[0] < 0.6 and array[-1] > 0.85
    assert abs(array[-1] - loop[-1]) < 4 * spread / 3**0.5 + 0.01


@pytest.mark.exhaustive
def test_peers_come_together_as_expected(capsys):
    assert main("peers --peers 64 --rounds 4".split()) == 0
    averaged, trained = capsys.readouterr().out.split("accuracy after")
    grid = re.search(r"^  grid +(\S+)  (\S+)", averaged, re.M)
    assert grid and 0.05 < float(grid[1]) < 0.25 and float(grid[2]) < 1e-12
    drawn = re.search(r"^  at random +(.*)", averaged, re.M)
    assert drawn
    for found, expected in re.findall(r"(\S+) \((\S+)\)", drawn[1]):
        assert 0.4 < float(found) / float(expected) < 2.5
    rows = {line[:20].strip(): line[20:].split() for line in trained.splitlines()[1:] if line.startswith("  ")}
    assert float(rows["all with all"][2]) < 1e-9 < float(rows["grid"][2]) < float(rows["alone"][2])
