"""The contract on a CUDA device: trajectories, noise, compiled steps."""

from __future__ import annotations

import optree
import pytest
import torch

import hfta_func as hfta
from cases import OPTIMIZERS, WORKLOADS, batches, loss_fn, models, ours
from hfta_func.testing import assert_matches_solo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDS = [11, 7, 1002]


def _on(device, tree):
    return optree.tree_map(lambda leaf: leaf.to(device), tree)


@pytest.mark.parametrize("name", WORKLOADS)
def test_members_are_arrays_of_one(name):
    members = models(name, 3, dropout=0.3)
    step = hfta.make_train_step(members[0], loss_fn, ours(OPTIMIZERS[1]))
    state = step.init(*_on("cuda", hfta.stack_params(members)), seeds=SEEDS)
    assert_matches_solo(step, state, _on("cuda", batches(3, 50)), rtol=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
def test_trajectories_are_those_of_the_cpu(name):
    members = models(name, 3, dropout=0.3)
    step = hfta.make_train_step(members[0], loss_fn, ours(OPTIMIZERS[1]))
    here = step.init(*hfta.stack_params(members), seeds=SEEDS)
    there = _on("cuda", here)
    for batch in batches(3, 20):
        here, _ = step(here, batch)
        there, _ = step(there, _on("cuda", batch))
    for mine, theirs in zip(optree.tree_leaves(_on("cpu", there)), optree.tree_leaves(here), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled(name):
    torch._dynamo.reset()
    members = models(name, 3, dropout=0.3)
    step = hfta.make_train_step(members[0], loss_fn, ours(OPTIMIZERS[1]))
    state = step.init(*_on("cuda", hfta.stack_params(members)), seeds=SEEDS)
    compiled = torch.compile(step, fullgraph=True)
    assert_matches_solo(step, state, _on("cuda", batches(3, 5)), run=compiled, rtol=1e-10)


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_is_that_of_the_cpu(compiled):
    def draws(key):
        return (
            hfta.random.uniform(key, (1001,)),
            hfta.random.normal(key, (1001,)),
            hfta.random.bernoulli(key, 0.3, (1001,)),
            hfta.random.randint(key, -3, 11, (1001,)),
            hfta.random.permutation(key, 101),
        )

    func = torch.compile(hfta.vmap(draws), fullgraph=True) if compiled else hfta.vmap(draws)
    keys = hfta.random.keys(SEEDS)
    for mine, theirs in zip(func(keys.cuda()), draws(keys), strict=True):
        assert torch.equal(mine.cpu(), theirs)
