"""The examples of ensembles: what they compute is what a loop over members computes, and their tables say so."""

import importlib

import pytest
import torch
from examples.critics.model import Agent, Batch
from examples.ensemble.main import LEVELS

pytestmark = pytest.mark.usefixtures("one_thread")


def main(name, *argv):
    return importlib.import_module(f"examples.{name}.main").main([*map(str, argv)])


def batches(count, size=16):
    torch.manual_seed(7)
    for _ in range(count):
        obs, action, next_obs = (torch.randn(size, width).double() for width in (3, 1, 3))
        yield Batch(obs, action.tanh(), torch.randn(size).double(), next_obs, (torch.rand(size) < 0.3).double())


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("compile", [False, True])
def test_critics_as_an_array_are_those_of_a_loop(compile):
    torch._dynamo.reset()
    array, loop = (
        Agent(way, 3, 1, count=5, width=8, lr=1e-2, seed=3, dtype=torch.float64, compile=compile and way == "array")
        for way in ("array", "loop")
    )
    for batch in batches(20):
        torch.testing.assert_close(array.update(batch), loop.update(batch), rtol=1e-10, atol=1e-12)
    for held, other in ((array.critics, loop.critics), (array.target_critics, loop.target_critics)):
        for member, critic in zip(held.members(), other.critics, strict=True):
            torch.testing.assert_close(member.state_dict(), critic.state_dict(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(array.actor.state_dict(), loop.actor.state_dict(), rtol=1e-9, atol=1e-11)
    # And are not each other's.
    assert len({round(member.layers[4].bias.item(), 6) for member in array.critics.members()}) == 5


def test_agents_of_both_ways_train_and_act_the_same(tmp_path, capsys):
    argv = "--steps 60 --warmup 20 --every 30 --episodes 1 --count 3 --width 8 --out".split()
    results = []
    for critics in ("array", "loop"):
        assert main("critics", "--critics", critics, *argv, tmp_path) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in (*lines, last)] == ["seed 0, step 30", "seed 0, step 60", critics]
        assert len((tmp_path / f"critics-{critics}.csv").read_text().splitlines()) == 3
        assert -2500 < float(lines[1].split()[-1]) < 0
        results.append(lines)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("critics", ["--env", "CartPole-v1"], "has no continuous actions"),
        ("ensemble", ["--members", "1"], "--members is 1; it must be at least 2"),
    ],
)
def test_bad_flags(name, argv, message, capsys):
    with pytest.raises(SystemExit):
        main(name, *argv)
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_ensemble_on_a_table(tmp_path, capsys):
    assert main("ensemble", "--members", 6, "--epochs", 12, "--out", tmp_path / "new") == 0
    lines = capsys.readouterr().out.splitlines()
    rmse = {line.rsplit(maxsplit=5)[0].strip(): float(line.split()[-5]) for line in lines[1:]}
    assert set(rmse) == {"ensemble of 6", "one network", "random forest"} and all(0.5 < x < 1.1 for x in rmse.values())
    assert (tmp_path / "new" / "ensemble.png").stat().st_size > 10_000
    table = (tmp_path / "new" / "ensemble-calibration.csv").read_text().splitlines()
    assert len(table) == 1 + len(LEVELS) and table[0] == "level,ensemble of 6,one network,random forest"
