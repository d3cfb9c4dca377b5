"""Whole training runs: agents of an array are agents trained alone, and what they carry follows them."""

from __future__ import annotations

import math

import optree
import pytest
import torch
from examples.rl import dqn, ppo
from torch import nn

import hfta_func as hfta
from hfta_func import rl

SEEDS = [3, 4, 5]


def rates(places):
    return [[3e-3, 1e-3, 1e-2][place] for place in places]


def start_ppo(places, environment):
    step = ppo.make(environment, hfta.adam(lr=rates(places)), minibatches=2, epochs=2)
    seeds = [SEEDS[place] for place in places]
    params, _ = hfta.init_params(lambda: ppo.Agent(environment).double(), seeds)
    carry = rl.start(environment, hfta.random.keys(seeds), ppo.N)
    return step, step.init(params, seeds=seeds, hparams={"entropy": rates(places)}, carry=carry)


def start_dqn(places, environment):
    step, start = dqn.make(environment, hfta.adam(lr=rates(places)), every=2, exploring=10, capacity=50, steps=3)
    seeds = [SEEDS[place] for place in places]
    params, _ = hfta.init_params(lambda: dqn.make_model(environment).double(), seeds)
    return step, step.init(params, seeds=seeds, carry=start(params, seeds))


RUNS = {
    "ppo, discrete": (start_ppo, lambda: rl.CartPole(dtype=torch.float64, max_steps=3)),
    "ppo, continuous": (start_ppo, lambda: rl.Pendulum(dtype=torch.float64, max_steps=3)),
    "dqn": (start_dqn, lambda: rl.CartPole(dtype=torch.float64, max_steps=3)),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(ppo, "T", 4)
    monkeypatch.setattr(ppo, "N", 2)
    monkeypatch.setattr(dqn, "T", 4)
    monkeypatch.setattr(dqn, "N", 2)
    monkeypatch.setattr(dqn, "BATCH", 5)


def assert_same(found, expected, tolerance=0.0):
    for a, b in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.exhaustive(unless="discrete-1$")
@pytest.mark.parametrize("iterations", [1, 13])
@pytest.mark.parametrize("name", RUNS)
def test_an_agent_of_an_array_is_the_agent_alone(name, iterations):
    start, environment = RUNS[name]
    step, state = start([0, 1, 2], environment())
    state, metrics = step.loop(state, iterations)
    assert metrics["loss"].shape[:2] == (iterations, 4) and metrics["finite"].all()
    other, permuted = start([2, 0, 1], environment())
    assert_same(other.loop(permuted, iterations)[0], hfta.take(state, [2, 0, 1]))
    one, alone = start([1], environment())
    alone, own = one.loop(alone, iterations)
    assert_same(alone, hfta.take(state, [1]), 1e-10)
    assert_same(own["return"], metrics["return"][:, [1]], 1e-10)


@pytest.mark.exhaustive
def test_what_agents_carry_follows_them(tmp_path):
    step, state = start_dqn([0, 1, 2], rl.CartPole(dtype=torch.float64))
    state, _ = step.loop(state, 2)
    hfta.save(state, tmp_path / "agents")
    loaded = hfta.load(tmp_path / "agents", like=state)
    joined = hfta.concat([hfta.take(state, [0]), hfta.take(state, [1, 2])])
    expected, _ = step.loop(state, 2)
    assert_same(step.loop(loaded, 2)[0], expected)
    assert_same(step.loop(joined, 2)[0], expected)
    # Two iterations and two more are four.
    _, again = start_dqn([0, 1, 2], rl.CartPole(dtype=torch.float64))
    assert_same(step.loop(again, 4)[0], expected)


@pytest.mark.exhaustive
def test_agents_that_stopped_stay_as_they_are_with_their_environments():
    step, state = start_ppo([0, 1, 2], rl.CartPole(dtype=torch.float64))
    expected, _ = step.loop(state, 2)
    stopped, _ = step.loop(state._replace(active=torch.tensor([True, False, True])), 2)
    assert_same(hfta.take(stopped, [1]), hfta.take(state._replace(active=stopped.active), [1]))
    assert_same(hfta.take(stopped, [0, 2]), hfta.take(expected, [0, 2]))


def test_an_agent_that_diverges_leaves_the_others_bit_identical():
    step, state = start_ppo([0, 1, 2], rl.Pendulum(dtype=torch.float64))
    bias = state.params["critic.4.bias"].clone()
    bias[1] = math.inf
    broken = state._replace(params={**state.params, "critic.4.bias": bias})
    (expected, _), (found, metrics) = step.loop(state), step.loop(broken)
    assert metrics["finite"].all(1).all(0).tolist() == [True, False, True]
    assert_same(hfta.take(found, [0, 2]), hfta.take(expected, [0, 2]))


def test_what_a_step_carries():
    model = nn.Linear(2, 1)
    step = hfta.make_train_step(model, lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1))
    params = hfta.stack_params([nn.Linear(2, 1) for _ in range(3)])
    carry = {"a": torch.arange(3), "b": (torch.ones(3, 2),)}
    state = step.init(*params, seeds=SEEDS, carry=carry)
    state, _ = step(state, torch.ones(3, 4, 2))
    assert_same(state.carry, carry)
    result = hfta.fit(step, state, hfta.ArrayLoader(torch.ones(8, 2), 4, seeds=SEEDS), epochs=1, progress=False)
    assert_same(result.state.carry, carry)
    with pytest.raises(hfta.StateError, match=r"carry\['b'\]\[0\] is \[2, 2\], but every leaf of what 3 models carry"):
        step.init(*params, seeds=SEEDS, carry={"a": torch.arange(3), "b": (torch.ones(2, 2),)})
    with pytest.raises(hfta.StateError, match=r"carry\['a'\] is a float"):
        step.init(*params, seeds=SEEDS, carry={"a": 1.0})
    with pytest.raises(ValueError, match=r"make it with make_train_step\(..., collect=\)"):
        _ = step.loop
    with pytest.raises(ValueError, match="collect is 3; it must be a function of a state"):
        hfta.make_train_step(model, lambda model, x: model(x).sum(), hfta.sgd(lr=0.1), collect=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("places", [[0, 1, 2], [1]], ids=["three", "one"])
def test_a_training_run_is_one_graph(name, places):
    start, environment = RUNS[name]
    step, state = start(places, environment())
    expected, metrics = step.loop(state, 3)
    found, own = torch.compile(step.loop, fullgraph=True, dynamic=False, backend="aot_eager")(state, 3)
    assert_same(found, expected, 1e-9)
    assert_same(own["return"], metrics["return"], 1e-9)
