"""Agents of an array learn what agents learn that ordinary scripts train one by one on gymnasium itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from examples.rl import dqn, ppo, recurrent_ppo, sac, td3

import hfta_func as hfta
import plain_agents
from hfta_func import rl

SEEDS = range(8)
# Iterations and learning rate, and a return that agents do not reach without learning.
RUNS = {
    "ppo, discrete": (ppo, ppo.Agent, "CartPole", 3e-3, 25, 80),
    "ppo, recurrent": (recurrent_ppo, recurrent_ppo.Agent, "CartPole", 1e-3, 100, 60),
    "dqn": (dqn, dqn.make_model, "CartPole", 1e-3, 600, 40),
    "sac": (sac, sac.Agent, "Pendulum", 1e-3, 600, -600),
    "td3": (td3, td3.Agent, "Pendulum", 1e-3, 600, -600),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
def test_agents_learn_as_plain_ones_on_gymnasium(name):
    example, make_agent, place, lr, iterations, least = RUNS[name]
    environment = getattr(rl, place)()
    step, start = example.make(environment, [lr] * len(SEEDS))
    params, _ = hfta.init_params(lambda: make_agent(environment), SEEDS)
    _, history = hfta.fit(step, start(params, SEEDS), [None], epochs=iterations, progress=False)
    found = history["return"][-1].double().numpy()
    expected = np.array([plain_agents.trained(example, place, seed, lr, iterations) for seed in SEEDS])
    noise = math.sqrt(found.var(ddof=1) / len(found) + expected.var(ddof=1) / len(expected))
    print(f"{name}: array {found.mean():.1f}, plain {expected.mean():.1f}, standard error {noise:.1f}")
    assert found.mean() > least and torch.isfinite(torch.as_tensor(found)).all()
    assert found.mean() > expected.mean() - 3 * noise
