"""Environments are gymnasium's, step by step, and any number of them is one call."""

from __future__ import annotations

import itertools
import math

import gymnasium
import numpy as np
import optree
import pytest
import torch
from examples.rl.common import NAMES
from examples.rl.grid import Bricks, Crossing

import hfta_func as hfta
from hfta_func import rl


def actions_of(space, generator, count):
    if hasattr(space, "n"):
        return generator.integers(space.n, size=count)
    return generator.uniform(-1.3, 1.3, (count, 1)) * space.high


def follow(name, count):
    """As many random steps of both, each from this package's state; as many environments take them here at once."""
    environment, real = getattr(rl, name)(dtype=torch.float64), gymnasium.make(NAMES[name])
    assert environment.observation_space == real.observation_space
    assert environment.action_space == real.action_space
    assert environment.max_steps == real.spec.max_episode_steps
    real = real.unwrapped
    real.reset(seed=0)
    keys = hfta.random.keys(range(50))
    state, _ = environment.reset(keys)
    generator = np.random.default_rng(0)
    for turn in range(count // 50):
        before, actions = state["place"].numpy(), actions_of(real.action_space, generator, 50)
        state, observation, reward, terminated, truncated = environment.step(state, torch.as_tensor(actions), keys)
        assert not truncated.any()
        for i in range(50):
            real.state, real.steps_beyond_terminated = before[i].copy(), None
            seen, own_reward, ended, *_ = real.step(actions[i])
            rounds = np.float32 if name == "MountainCarContinuous" else np.float64
            np.testing.assert_allclose(state["place"][i].numpy().astype(rounds), real.state, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(observation[i].numpy().astype(np.float32), seen, rtol=2e-7, atol=1e-7)
            np.testing.assert_allclose(reward[i].item(), own_reward, rtol=1e-12, atol=1e-12)
            assert terminated[i].item() == ended
        again, _ = environment.reset(hfta.random.fold_in(keys, turn))
        # Some begin anew, so that most places are near to where episodes are.
        fresh = terminated | (torch.arange(50) % 10 == turn % 10)
        state = {**state, "place": torch.where(fresh[:, None], again["place"], state["place"])}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_the_dynamics_are_those_of_gymnasium(name):
    follow(name, 500)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_dynamics_over_many_steps(name):
    follow(name, 10_000)


EVERY = [*(getattr(rl, name)() for name in NAMES), Bricks(), Crossing()]


@pytest.mark.parametrize("environment", EVERY, ids=lambda environment: type(environment).__name__)
def test_an_environment_alone_is_one_of_many(environment):
    running = rl.start(environment, hfta.random.keys([3, 4]), 3)
    one = rl.start(environment, hfta.random.keys([4]), 3)
    assert environment.observation_space.contains(running.observation[0, 0].numpy())
    generator = np.random.default_rng(1)
    for _ in range(30):
        action = torch.as_tensor(actions_of(environment.action_space, generator, 6)).unflatten(0, (2, 3))
        running, step = rl.advance(environment, running, action)
        one, _ = rl.advance(environment, one, action[1:])
        assert environment.observation_space.contains(step["next_observation"][0, 0].numpy())
    for a, b in zip(optree.tree_leaves(hfta.take(running, 1)), optree.tree_leaves(one), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_members_may_differ_in_physics():
    lengths = [0.5, 0.7, 1.0]
    running = rl.start(rl.CartPole(length=lengths), hfta.random.keys([1, 2, 3]), 2)
    action = torch.tensor([[0, 1]] * 3)
    for i, length in enumerate(lengths):
        alone = rl.start(rl.CartPole(length=length), hfta.random.keys([i + 1]), 2)
        after, _ = rl.advance(rl.CartPole(length=lengths), hfta.take(running, i), action[:1])
        own, _ = rl.advance(rl.CartPole(length=length), alone, action[:1])
        assert torch.equal(after.state["place"], own.state["place"])
    for given in (np.array(lengths), torch.tensor(lengths), tuple(lengths)):
        other = rl.start(rl.CartPole(length=given), hfta.random.keys([1, 2, 3]), 2)
        assert torch.equal(other.state["numbers"]["length"], running.state["numbers"]["length"])
    for given in (0.7, torch.tensor(0.7), np.float64(0.7)):
        assert not rl.start(rl.CartPole(length=given), hfta.random.keys([1, 2, 3]), 2).state["numbers"]


def test_episodes_end_and_begin_anew():
    environment = rl.CartPole(max_steps=12)
    running = rl.start(environment, hfta.random.keys([0, 1]), 40)
    lengths, total, seen = torch.zeros(2, 40), torch.zeros(2, 40), {"terminated": 0, "truncated": 0}
    for _ in range(40):
        before = running
        # One half of the environments falls, and the other does not.
        balanced = (running.observation[..., 2] > 0) & (torch.arange(40) % 2 == 0)
        running, step = rl.advance(environment, running, balanced.long())
        lengths, done = lengths + 1, step["terminated"] | step["truncated"]
        assert not (step["terminated"] & step["truncated"]).any()
        assert torch.equal(running.last_length[done], lengths[done].long())
        assert torch.equal(running.last_total[done], lengths[done])
        # The final observation is kept, the next one is that of a new episode.
        assert (running.observation[done].abs() <= 0.05).all() and not running.length[done].any()
        assert torch.equal(running.observation[~done], step["next_observation"][~done])
        place, angle = (step["next_observation"][..., i].abs() for i in (0, 2))
        out = (angle > 12 * math.pi / 180) | (place > 2.4)
        assert torch.equal(step["terminated"], out)
        assert torch.equal(step["truncated"], ~out & (before.length == 11))
        lengths, total = lengths * ~done, total + done
        seen = {name: count + int(step[name].sum()) for name, count in seen.items()}
    assert min(seen.values()) > 10
    metrics = rl.episode_metrics(running)
    assert torch.equal(metrics["episodes"], total.sum(1).long())
    torch.testing.assert_close(metrics["return"], running.last_total.mean(1))
    assert rl.episode_metrics(rl.start(environment, hfta.random.keys([0]), 2))["return"].isnan().all()
    # An episode without an end is left out, and one whose return is no number is not.
    running = rl.start(environment, hfta.random.keys([0, 1]), 3)._replace(
        episodes=torch.tensor([[1, 0, 2], [1, 1, 1]]), last_length=torch.tensor([[4, 0, 8], [3, 3, 3]]),
        last_total=torch.tensor([[4.0, math.nan, 8.0], [3.0, math.nan, 3.0]]),
    )  # fmt: skip
    metrics = rl.episode_metrics(running)
    assert metrics["return"][0] == 6 and metrics["return"][1].isnan() and metrics["length"].tolist() == [6, 3]


def test_what_cannot_be_started():
    for count in (0, 2.5, [1, 2]):
        with pytest.raises(ValueError, match=r"max_steps is .*; give an integer of at least 1"):
            rl.start(rl.CartPole(max_steps=count), hfta.random.keys([0, 1]), 2)
    for count in (0, 3.0):
        with pytest.raises(ValueError, match=f"num_envs is {count}; give an integer of at least 1"):
            rl.start(rl.CartPole(), hfta.random.keys([0, 1]), count)
    for keys in (torch.tensor(1), torch.ones(2)):
        with pytest.raises(hfta.errors.BatchError, match=r"keys are .*, but must be torch.int64\[M\], one per member"):
            rl.start(rl.CartPole(), keys, 3)


STEPS = itertools.count()


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda x: x - x.mean(), hfta.errors.StateError, "mixes environments or remembers: obs"),
        (lambda x: x + next(STEPS), hfta.errors.StateError, "mixes environments or remembers"),
        (lambda x: x + torch.randn(4), hfta.errors.RandomnessError, "key"),
    ],
)
def test_environments_of_ones_own_are_checked(step, error, message):
    class Own(rl.Environment):
        observation_space, action_space = rl.CartPole.observation_space, rl.CartPole.action_space

        def reset(self, key):
            return (hfta.random.uniform(key, (4,)),) * 2

        def step(self, state, action, key):
            after = step(state)
            nothing = torch.zeros_like(after[..., 0])
            return after, after, nothing, nothing > 0, nothing > 0

    with pytest.raises(error, match=message):
        rl.start(Own(), hfta.random.keys([0, 1]), 3)


@pytest.mark.parametrize("empty", [None, (), {"a": None}])
def test_an_environment_without_a_state(empty):
    class Own(rl.Environment):
        observation_space, action_space = rl.CartPole.observation_space, rl.CartPole.action_space

        def reset(self, key):
            return empty, hfta.random.uniform(key, (4,))

        def step(self, state, action, key):
            seen = hfta.random.normal(key, (4,))
            return empty, seen, seen[..., 0], seen[..., 1] > 1, seen[..., 1] < -1

    running = rl.start(Own(), hfta.random.keys([0, 1]), 3)
    for _ in range(3):
        running, step = rl.advance(Own(), running, torch.zeros(2, 3).long())
    assert running.state == empty and step["reward"].unique().numel() == 6


class Counting(gymnasium.Env):
    """Counts steps, ends on every fifth, and says whose it is."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, place=0):
        self.place, self.count = place, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([self.place, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        reward = float(action) + 10 * self.place
        return np.array([self.place, self.count], np.float32), reward, self.count == 5, False, {}


def counting(mode, count=6):
    return gymnasium.vector.SyncVectorEnv([lambda i=i: Counting(i) for i in range(count)], autoreset_mode=mode)


def wrapped():
    """A wrapper of gymnasium, which refuses to be one of environments that begin anew in the same step."""
    envs = counting(gymnasium.vector.AutoresetMode.DISABLED)
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)


@pytest.mark.parametrize("make", [lambda: counting(gymnasium.vector.AutoresetMode.SAME_STEP), wrapped])
def test_environments_of_gymnasium_serve_all_members(make):
    envs = rl.GymnasiumEnvs(make(), num_models=2)
    policy = rl.make_policy(torch.nn.Linear(2, 3), lambda model, x: x[:, 1].long() % 3)
    agents = hfta.stack_params([torch.nn.Linear(2, 3) for _ in range(2)])
    running = envs.start(hfta.random.keys([0, 1]))
    running, steps = envs.rollout(policy, agents, running, 7)
    assert steps["next_observation"].shape == (2, 7, 3, 2)
    assert torch.equal(steps["observation"][..., 0], torch.arange(6.0).reshape(2, 1, 3).expand(2, 7, 3))
    assert steps["observation"][0, :, 0, 1].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert steps["next_observation"][1, :, 2, 1].tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert torch.equal(steps["terminated"][0, :, 0], steps["next_observation"][0, :, 0, 1] == 5)
    assert steps["reward"][1, :, 0].tolist() == [30, 31, 32, 30, 31, 30, 31]
    assert running.last_total[0].tolist() == [4.0, 54.0, 104.0] and running.length.unique().tolist() == [2]
    with pytest.raises(hfta.errors.StateError, match=r"is NextStep; make them with .*SAME_STEP"):
        rl.GymnasiumEnvs(counting(gymnasium.vector.AutoresetMode.NEXT_STEP), 2)
    for kind in ("NormalizeObservation", "NormalizeReward"):
        mixing = getattr(gymnasium.wrappers.vector, kind)(counting(gymnasium.vector.AutoresetMode.NEXT_STEP))
        mixing = gymnasium.wrappers.vector.RecordEpisodeStatistics(mixing)
        with pytest.raises(hfta.errors.StateError, match=f"{kind} mixes the statistics of all agents; use rl.moments"):
            rl.GymnasiumEnvs(mixing, 2)


class Odd(gymnasium.Env):
    """Has any spaces, and checks that actions are of its own."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, False, {}


BOX = gymnasium.spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    "seen, taken",
    [
        (gymnasium.spaces.Box(0, 255, (2, 4), np.uint8), gymnasium.spaces.MultiDiscrete([2, 3])),
        (gymnasium.spaces.Discrete(5), gymnasium.spaces.MultiBinary(3)),
        (gymnasium.spaces.MultiBinary(2), gymnasium.spaces.Box(0, 5, (2,), np.int64)),
        (BOX, gymnasium.spaces.Box(-1, 1, (2, 2), np.float64)),
    ],
)
def test_environments_of_gymnasium_have_arrays_for_spaces(seen, taken):
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    vector = gymnasium.vector.SyncVectorEnv([lambda: Odd(seen, taken)] * 4, **same_step)
    envs = rl.GymnasiumEnvs(vector, 2)
    kind = torch.bfloat16 if taken.dtype.kind == "f" else torch.int64

    def act(weight, x):
        # An action may have a gradient, which gymnasium has no use for.
        return torch.ones(len(x), *taken.shape, dtype=kind) * (weight.bias.to(kind) if kind.is_floating_point else 1)

    agents = hfta.stack_params([torch.nn.Linear(1, 1)] * 2)
    agents.params["bias"].fill_(0.5).requires_grad_()
    policy = rl.make_policy(torch.nn.Linear(1, 1), lambda model, x: act(model, x).reshape(len(x), *taken.shape))
    _, steps = envs.rollout(policy, agents, envs.start(hfta.random.keys([0, 1])), 2)
    assert steps["observation"].shape == (2, 2, 2, *seen.shape) and steps["action"].shape == (2, 2, 2, *taken.shape)
    with pytest.raises(hfta.errors.BatchError, match=r"torch.int64\[1\], but must be torch.int64\[2\]"):
        envs.start(hfta.random.keys([0]))
    with pytest.raises(ValueError, match="steps is 0; give an integer"):
        envs.rollout(policy, agents, None, 0)
