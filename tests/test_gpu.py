"""The contract on a CUDA device: rules, modules, trajectories, noise, compiled steps, mixed precision."""

from __future__ import annotations

import optree
import pytest
import torch

import hfta_func as hfta
from cases import OPTIMIZERS, WORKLOADS, batches, loss_fn, models, ours
from hfta_func.testing import assert_matches_solo
from rule_cases import RULE_CASES
from test_composition import check_autocast
from test_modules import ROWS, check_every_sample
from test_rules import check_against_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDS = [11, 7, 1002]


def _on(device, tree):
    return optree.tree_map(lambda leaf: leaf.to(device), tree)


ALL_BATCHED = [pytest.param(case, id=case.name) for case in RULE_CASES]


@pytest.mark.parametrize("case", ALL_BATCHED)
def test_rules_match_the_loop_forward_and_backward(case):
    with torch.device("cuda"):
        check_against_loop(case, (True,) * len(case.make()))


@pytest.mark.parametrize("case", ALL_BATCHED)
def test_rules_match_the_loop_with_a_shared_first_input(case):
    with torch.device("cuda"):
        count = len(case.make())
        if count == 1:
            pytest.skip("has one input")
        check_against_loop(case, (False,) + (True,) * (count - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_autocast_is_that_of_a_member_alone(case, dtype):
    with torch.device("cuda"):
        check_autocast(case, dtype, "cuda")


@pytest.mark.parametrize(("info", "training", "dtype"), ROWS)
def test_modules(info, training, dtype):
    check_every_sample(info, training, dtype, "cuda")


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
