"""Rollouts, advantages, normalisation and replay are what loops over members, environments and steps compute."""

from __future__ import annotations

import math

import numpy as np
import optree
import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func import rl

M, T, N = 2, 12, 3


def act(model, observation):
    probability = model(observation)[..., 0].sigmoid()
    return torch.bernoulli(probability).long(), {"probability": probability}


def agents(count=M):
    return hfta.init_params(lambda: nn.Linear(4, 1), range(count))


def happened(seed=0):
    """What could have happened: episodes end in both ways, also at the last step."""
    generator = torch.Generator().manual_seed(seed)
    terminated, truncated = (torch.rand(M, T, N, generator=generator) < 0.2 for _ in range(2))
    reward = torch.randn(M, T, N, generator=generator, dtype=torch.float64)
    observation = torch.randn(M, T + 1, N, 2, generator=generator)
    return {
        **{"reward": reward, "terminated": terminated, "truncated": truncated & ~terminated},
        **{"observation": observation[:, :-1], "next_observation": observation[:, 1:]},
    }


def test_a_rollout_is_a_loop_and_members_are_alone():
    environment, policy = rl.CartPole(max_steps=8), rl.make_policy(nn.Linear(4, 1), act)
    running = rl.start(environment, hfta.random.keys([5, 6]), N)
    after, steps = rl.rollout(environment, policy, agents(), running, T)
    assert {name: leaf.shape[:3] for name, leaf in steps.items()} == dict.fromkeys(steps, (M, T, N))
    assert steps["truncated"].any() and len(steps["action"].unique()) == 2
    half, first = rl.rollout(environment, policy, agents(), running, T // 2)
    _, second = rl.rollout(environment, policy, agents(), half, T // 2)
    alone, own = rl.rollout(environment, policy, hfta.take(agents(), 1), hfta.take(running, 1), T)
    for name, leaf in steps.items():
        assert torch.equal(leaf, torch.cat((first[name], second[name]), 1)), name
        torch.testing.assert_close(leaf[1:], own[name], rtol=1e-6, atol=1e-7)
    assert torch.equal(alone.episodes, after.episodes[1:])
    assert torch.equal(steps["observation"][:, 1:][~(steps["truncated"] | steps["terminated"])[:, :-1]],
                       steps["next_observation"][:, :-1][~(steps["truncated"] | steps["terminated"])[:, :-1]])  # fmt: skip


def test_advantages_tell_truncation_from_termination():
    steps, rates, decays = happened(), [0.9, 0.99], [0.8, 0.95]
    value, next_value = (torch.randn(M, T, N, dtype=torch.float64) for _ in range(2))
    advantage, target = rl.gae(steps, value, next_value, discount=rates, decay=decays)
    for i in range(M):
        for n in range(N):
            later = 0.0
            for t in reversed(range(T)):
                reward, terminated, truncated = (
                    steps[k][i, t, n].item() for k in ("reward", "terminated", "truncated")
                )
                bootstrap = 0.0 if terminated else rates[i] * next_value[i, t, n].item()
                later = 0.0 if terminated or truncated else later
                later = reward + bootstrap - value[i, t, n].item() + rates[i] * decays[i] * later
                assert advantage[i, t, n].item() == pytest.approx(later, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(target, advantage + value)
    # A terminated step knows nothing of what follows, even if that is no number.
    wrong = torch.where(steps["terminated"], torch.nan, next_value)
    assert torch.equal(rl.gae(steps, value, wrong, discount=rates, decay=decays)[0], advantage)
    mistaken = steps | {"terminated": steps["terminated"] | steps["truncated"]}
    assert not torch.equal(rl.gae(mistaken, value, next_value)[0], rl.gae(steps, value, next_value)[0])


def test_values_are_one_a_step():
    steps = happened()
    value = torch.zeros(M, T, N).double()
    # They would be broadcast against each other.
    for values in ((value[..., None], value), (value, value[:, :1])):
        with pytest.raises(
            hfta.errors.BatchError, match=r"values are \[2, 1?2?, 3(, 1)?\], but rewards are \[2, 12, 3\]"
        ):
            rl.gae(steps, *values)


class Normalising(nn.Module):
    """Takes off the mean of the observations that it has acted by."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("other", torch.ones(3))

    def forward(self, x):
        return self.linear(x - self.mean.float())


def act_and_learn(model, observation):
    model.count.add_(len(observation))
    model.mean.add_((observation - model.mean).sum(0) / model.count)
    return act(model, observation)


def test_what_a_policy_writes_is_kept():
    """As a module alone keeps it; by hand, in a step's ``collect``, and not of agents that are not active."""
    environment, policy = rl.CartPole(), rl.make_policy(Normalising(), act_and_learn)
    array = hfta.init_params(Normalising, range(M))
    running = rl.start(environment, hfta.random.keys([5, 6]), N)
    other, before = array.buffers["other"], {name: leaf.clone() for name, leaf in array.buffers.items()}
    _, steps = rl.rollout(environment, policy, array, running, T)
    torch.testing.assert_close(array.buffers["mean"], steps["observation"].double().mean((1, 2)))
    assert array.buffers["count"].tolist() == [T * N] * M and array.buffers["other"] is other
    # The second of two rollouts goes on from the first.
    halves = hfta.init_params(Normalising, range(M))
    middle, first = rl.rollout(environment, policy, halves, running, T // 2)
    _, second = rl.rollout(environment, policy, halves, middle, T // 2)
    assert torch.equal(torch.cat((first["action"], second["action"]), 1), steps["action"])
    assert torch.equal(halves.buffers["mean"], array.buffers["mean"])

    def collect(state):
        running, steps = rl.rollout(environment, policy, state, state.carry, T)
        rows = {"x": steps["observation"].flatten(1, 2)}
        return running, rl.minibatches(state.keys, rows, 1)

    def loss_fn(model, batch):
        return model(batch["x"]).square().mean()

    step = hfta.make_train_step(Normalising(), loss_fn, hfta.sgd(lr=0.0), collect=collect)
    state = step.init(array.params, before, seeds=[5, 6], carry=running)
    one = state._replace(active=torch.tensor([True, False]), buffers={**state.buffers})
    for given, active in ((state, [0, 1]), (one, [0])):
        trained, _ = step.loop(given, 1)
        for index in range(M):
            expected = array.buffers["mean"] if index in active else before["mean"]
            torch.testing.assert_close(trained.buffers["mean"][index], expected[index])
    with pytest.raises(Exception, match="the policy writes the buffer 'count', which a graph cannot keep"):
        torch.compile(step.loop, backend="eager", fullgraph=True)(state, 1)


def test_agents_may_share_a_frozen_base():
    base = nn.Linear(4, 8).requires_grad_(False)
    models = [nn.Sequential(base, nn.Tanh(), nn.Linear(8, 1)) for _ in range(M)]
    running = rl.start(rl.CartPole(), hfta.random.keys([5, 6]), N)
    found = []
    for share in (False, True):
        policy = rl.make_policy(models[0], act, share_frozen=share)
        array = hfta.stack_params(models, share_frozen=share)
        found.append(rl.rollout(rl.CartPole(), policy, array, running, 4)[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for model, given, message in (
        (models[0], array, "'0.weight' is in the model but not in the array; .* the same share_frozen"),
        (nn.Linear(5, 1), agents(), r"'weight' is \[1, 4\] per member but \[1, 5\] in the model"),
    ):
        with pytest.raises(hfta.errors.StateError, match=message):
            rl.rollout(rl.CartPole(), rl.make_policy(model, act), given, running, 4)


@pytest.mark.parametrize("n", [1, 3])
def test_n_steps_in_a_row(n):
    steps, rates = happened(1), [0.9, 0.5]
    found = rl.n_step(steps, n, discount=rates)
    assert found["reward"].shape == (M, T - n + 1, N)
    for i, t, e in np.ndindex(M, T - n + 1, N):
        total, k = 0.0, 0
        while True:
            total += rates[i] ** k * steps["reward"][i, t + k, e].item()
            if k == n - 1 or steps["terminated"][i, t + k, e] or steps["truncated"][i, t + k, e]:
                break
            k += 1
        assert found["reward"][i, t, e].item() == pytest.approx(total, rel=1e-12)
        assert found["discount"][i, t, e].item() == pytest.approx(rates[i] ** (k + 1))
        for name in ("next_observation", "terminated", "truncated"):
            assert torch.equal(found[name][i, t, e], steps[name][i, t + k, e])
        assert torch.equal(found["observation"][i, t, e], steps["observation"][i, t, e])
    with pytest.raises(hfta.errors.BatchError, match="12 steps have no 13 in a row"):
        rl.n_step(steps, 13)
    with pytest.raises(ValueError, match="n is 0; give an integer of at least 1"):
        rl.n_step(steps, 0)


def test_normalisation_of_observations_and_rewards():
    seen, parts = rl.moments(M, (2,), dtype=torch.float64), []
    for size in (1, 7, 30):
        parts.append(torch.randn(M, size, N, 2, dtype=torch.float64) * torch.tensor([1.0, 50.0]) + 3)
        seen = rl.observed(seen, parts[-1])
    everything = torch.cat(parts, 1).flatten(1, 2)
    torch.testing.assert_close(seen.mean, everything.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen.variance, everything.var(1, correction=0), rtol=1e-12, atol=1e-12)
    scaled = rl.normalised(seen, everything, limit=math.inf)
    torch.testing.assert_close(scaled.mean(1), torch.zeros(M, 2).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(scaled.std(1, correction=0), torch.ones(M, 2).double(), atol=1e-6, rtol=0)
    assert rl.normalised(seen, everything * 1e6).abs().max() == 10
    steps = happened()
    last, totals = rl.discounted(torch.ones(M, N).double(), steps, discount=[0.9, 0.5])
    for i, n in np.ndindex(M, N):
        total = 1.0
        for t in range(T):
            total = total * [0.9, 0.5][i] + steps["reward"][i, t, n].item()
            assert totals[i, t, n].item() == pytest.approx(total, rel=1e-12)
            total = 0.0 if steps["terminated"][i, t, n] or steps["truncated"][i, t, n] else total
        assert last[i, n].item() == pytest.approx(total, rel=1e-12)


def test_minibatches_hold_every_row_once_an_epoch():
    rows = {"x": torch.arange(12).expand(M, 12), "y": torch.arange(12.0).reshape(1, 12, 1).expand(M, 12, 2)}
    batches = rl.minibatches(hfta.random.keys([0, 1]), rows, 3, epochs=2)
    assert batches["x"].shape == (6, M, 4) and batches["y"].shape == (6, M, 4, 2)
    assert torch.equal(batches["x"], batches["y"][..., 0].long())
    epochs = batches["x"].transpose(0, 1).reshape(M, 2, 12)
    assert torch.equal(epochs.sort().values, torch.arange(12).expand(M, 2, 12))
    assert len({tuple(order.tolist()) for order in epochs.flatten(0, 1)}) == 4
    alone = rl.minibatches(hfta.random.keys([1]), hfta.take(rows, [1]), 3, epochs=2)
    assert torch.equal(alone["x"], batches["x"][:, 1:])
    for name, wrong in (("count", 0), ("count", 2.0), ("epochs", 0)):
        with pytest.raises(ValueError, match=f"{name} is {wrong}; give an integer of at least 1"):
            rl.minibatches(hfta.random.keys([0, 1]), rows, **{"count": 2, name: wrong})
    with pytest.raises(hfta.errors.BatchError, match=r"keys are torch.int64\[1\], but must be torch.int64\[2\]"):
        rl.minibatches(hfta.random.keys([0]), rows, 3)


@pytest.mark.parametrize("donate", [False, True])
def test_a_buffer_keeps_the_latest_rows(donate):
    buffer, kept = rl.replay({"x": torch.zeros(M, 1, 2)}, 7), [[], []]
    generator = torch.Generator().manual_seed(0)
    for size in (3, 2, 5, 7, 1):
        rows, before = torch.randn(M, size, 2, generator=generator), buffer
        copy = optree.tree_map(torch.clone, before)
        buffer = rl.written(buffer, {"x": rows}, donate=donate)
        assert donate or all(map(torch.equal, optree.tree_leaves(before), optree.tree_leaves(copy)))
        kept = [[*old, *new.tolist()][-7:] for old, new in zip(kept, rows, strict=True)]
        for i in range(M):
            assert sorted(buffer.rows["x"][i, : buffer.size[i]].tolist()) == sorted(kept[i])
    assert (buffer.rows["x"].data_ptr() == before.rows["x"].data_ptr()) is donate
    assert torch.equal(hfta.concat([hfta.take(buffer, 0), hfta.take(buffer, 1)]).rows["x"], buffer.rows["x"])
    with pytest.raises(hfta.errors.BatchError, match="8 rows do not fit into a buffer of 7"):
        rl.written(buffer, {"x": torch.zeros(M, 8, 2)})
    for shape, dtype in (((M, 1, 3), torch.float32), ((1, 1, 2), torch.float32), ((M, 1, 2), torch.float64)):
        kinds = rf"rows\['x'\] is torch.float32\[2, 1, 2\] in the buffer but {dtype}\[{str([*shape])[1:-1]}\] in"
        with pytest.raises(hfta.errors.BatchError, match=kinds):
            rl.written(buffer, {"x": torch.zeros(shape, dtype=dtype)})
    with pytest.raises(hfta.errors.BatchError, match=r"what is written has rows\['y'\] but the buffer does not"):
        rl.written(buffer, {"y": torch.zeros(M, 1, 2)})
    with pytest.raises(ValueError, match="capacity is 0; give an integer of at least 1"):
        rl.replay({"x": torch.zeros(M, 1)}, 0)


def test_samples_are_rows_that_were_written():
    buffer = rl.replay({"x": torch.zeros(M, 1)}, 100)
    buffer = rl.written(buffer, {"x": torch.arange(1.0, 11.0).expand(M, 10)})
    (rows, index), own = rl.sample(buffer, hfta.random.keys([0, 1]), 4000), hfta.take(buffer, [1])
    assert torch.equal(rows["x"], index + 1.0)
    counts = torch.stack([row.bincount(minlength=10) for row in index])
    assert counts.shape == (M, 10) and (counts - 400).abs().max() < 100
    assert torch.equal(rl.sample(own, hfta.random.keys([1]), 4000)[1], index[1:])
    for wrong in (-1, 2.0):
        with pytest.raises(ValueError, match=f"n is {wrong}; give an integer of at least 1"):
            rl.sample(buffer, hfta.random.keys([0, 1]), wrong)
    with pytest.raises(hfta.errors.BatchError, match=r"keys are torch.int64\[1\], but must be torch.int64\[2\]"):
        rl.sample(buffer, hfta.random.keys([0]), 4)


def test_a_member_with_an_empty_buffer_fails_alone_in_a_graph():
    rows = {"x": torch.ones(M, 4), "action": torch.ones(M, 4).long()}
    full = rl.written(rl.replay(rows, 8), rows)
    buffer = hfta.concat([rl.replay(hfta.take(rows, 0), 8), hfta.take(full, 1)])
    keys = hfta.random.keys([0, 1])
    found, index = torch.compile(rl.sample, backend="eager", fullgraph=True)(buffer, keys, 3)
    expected, places = rl.sample(full, keys, 3)
    assert found["x"][0].isnan().all() and not found["action"][0].any()
    assert torch.equal(index[1], places[1]) and torch.equal(found["x"][1], expected["x"][1])
