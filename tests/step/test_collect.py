"""Iterations of a step that collects its batches: their failures, metrics and carries."""

from __future__ import annotations

import functools

import gymnasium
import optree
import pytest
import torch
from torch import nn

import hfta_func as hfta
from comparisons import identical
from hfta_func import rl
from hfta_func._torch import recorded
from hfta_func.step import replay

SEEDS, PAIR = [3, 4, 5], [5, 6]


def square(model, x):
    return model(x).square().mean()


def iterating(**options):
    """An array of three whose iteration from step 4 on is as planned: at a 1 gradients fail, at a 2 losses."""
    model, plan = nn.Linear(1, 1), torch.tensor([[0.0, 0, 0], [0, 2, 0], [0, 1, 1], [0, 0, 0]])

    def collect(state):
        return state.carry, (plan * (state.step == 4)).unsqueeze(-1), {"seen": state.step + 0.0}

    def loss_fn(model, x):
        return (model.weight - model.weight.detach() + 1 - x).sqrt().sum()

    step = hfta.make_train_step(model, loss_fn, hfta.sgd(lr=0.1), collect=collect, **options)
    return step, step.init(*hfta.stack_params([model] * 3), seeds=SEEDS)


@pytest.mark.parametrize("nonfinite", ["skip", "freeze"])
def test_a_failure_is_the_first_one_of_an_iteration(nonfinite):
    step, state = iterating(nonfinite=nonfinite)
    result = hfta.fit(step, state, [None] * 2, epochs=1, progress=False)
    failures = [(one.member, one.step, one.cause) for one in result.history.failures]
    assert failures == [(1, 5, "loss"), (2, 6, "gradient")]
    assert sorted(result.history.epochs[0]) == ["finite", "loss", "seen"]
    assert result.history["finite"].tolist() == [[1.0, 0.5, 0.5]]
    state, _ = step(state)
    state, metrics = step(state)
    assert metrics["failure"].tolist() == [0, 1, 2] and metrics["failed_step"].tolist() == [4, 5, 6]


@pytest.mark.exhaustive
def test_a_failure_is_the_first_one_of_an_iteration_in_a_graph():
    for donate in (False, True):
        step, state = iterating(donate=donate)
        call = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
        for _ in range(2):
            state, metrics = call(state, None)
        assert metrics["failure"].tolist() == [0, 1, 2] and metrics["failed_step"].tolist() == [4, 5, 6]


REFUSED = [
    (lambda carry: (carry, {"failed_step": torch.ones(2)}), "collect reports 'failed_step', which the step reports"),
    (
        lambda carry: (carry, {"loss": torch.ones(2)}),
        "collect reports 'loss', which the step reports too; give it another",
    ),
    (lambda carry: ((), {}), r"the state has carry\['seen'\]\[0\] but what collect"),
    (lambda carry: ({"y": carry["x"]}, {}), r"what collect returns has carry\['y'\] but the state does not; give"),
    (
        lambda carry: ({**carry, "x": carry["x"].double()}, {}),
        r"carry\['x'\] is torch.float32\[2, 6, 4\] in the state but torch.float64\[2, 6, 4\] in",
    ),
    (
        lambda carry: ({**carry, "x": torch.zeros(2, 7)}, {}),
        r"carry\['x'\] is torch.float32\[2, 6, 4\] in the state but torch.float32\[2, 7\] in",
    ),
    (
        lambda carry: ({**carry, "x": torch.arange(2)}, {}),
        r"carry\['x'\] is torch.float32\[2, 6, 4\] in the state but torch.int64\[2\] in what collect",
    ),
]
"""What a collect makes of what members carry, what it reports, and why that is refused."""


@pytest.mark.parametrize(("result", "message"), REFUSED)
def test_a_collect_that_returns_something_else(result, message):
    def collect(state):
        carry, reports = result(state.carry)
        return carry, torch.ones(1, 2, 6, 4), reports

    step = hfta.make_train_step(nn.Linear(4, 1), square, hfta.sgd(lr=0.1), collect=collect)
    params = hfta.init_params(lambda: nn.Linear(4, 1), PAIR)
    state = step.init(*params, seeds=PAIR, carry={"x": torch.ones(2, 6, 4), "seen": (torch.zeros(2),)})
    error = hfta.errors.LossError if "reports" in message else hfta.errors.TraceError
    for call in (step, step.loop):
        with pytest.raises(error, match=message):
            call(state)
    for wrong in (0, 2.0):
        with pytest.raises(ValueError, match=f"iterations is {wrong}; give an integer of at least 1"):
            step.loop(state, wrong)


class Bold:
    """What a policy reads from Python: how often it does what it likes."""

    rate = 0.1


def playing(replay, *, collected=lambda state: None, steps=6, extra=()):
    """Agents in environments, with what is ``collected`` beside, of a step that is replayed or not."""
    bold, environment, make = Bold(), rl.CartPole(), lambda: nn.Linear(4, 2)

    def act(model, observation):
        wild = torch.rand(observation.shape[:-1]) < bold.rate
        return torch.where(wild, torch.randint(2, wild.shape), model(observation).argmax(-1))

    policy = rl.make_policy(make(), act)

    def collect(state):
        running, happened = rl.rollout(environment, policy, state, state.carry, steps)
        rows = {name: happened[name].flatten(1, 2) for name in ("observation", "reward")}
        collected(state)
        return running, rl.minibatches(state.keys, rows, 2), {**rl.episode_metrics(running), **dict(extra)}

    def loss_fn(model, batch):
        return (model(batch["observation"]).logsumexp(-1) * batch["reward"]).mean()

    step = hfta.make_train_step(make(), loss_fn, hfta.adam(lr=[0.01, 0.1]), collect=collect, replay=replay)
    running = rl.start(environment, hfta.random.keys(PAIR), 3)
    return step, step.init(*hfta.init_params(make, PAIR), seeds=PAIR, carry=running), bold


def assert_alike(make, rounds=8, change=lambda bold, turn: None):
    """Iterations of a replayed step are those of one that is not, to the bit; how each was collected."""
    (step, state, bold), (plain, expected, other) = make(True), make(False)
    seen = []
    for turn in range(rounds):
        change(bold, turn), change(other, turn)
        (state, metrics), (expected, right) = step.loop(state, 1), plain.loop(expected, 1)
        numbers = (optree.tree_map(lambda x: x.nan_to_num(-1), one) for one in ((state, metrics), (expected, right)))
        assert identical(*numbers)
        seen.append(step.status.partition("collecting ")[2])
    return seen


@pytest.fixture
def soon(monkeypatch):
    """Records are made at the second call."""
    monkeypatch.setattr(replay, "_STEPS", 0)


def test_what_is_collected_is_replayed_to_the_bit(soon):
    seen = assert_alike(playing)
    assert not seen[0].startswith("replayed") and seen[-1].startswith("replayed")


def test_what_is_collected_follows_values_in_python(soon):
    def grows(bold, turn):
        bold.rate = 0.1 if turn < 4 else 0.9

    seen = assert_alike(playing, 10, grows)
    assert [one.startswith("replayed") for one in seen[3:5]] == [True, False] and seen[-1].startswith("replayed")


def test_a_collection_that_does_more_than_compute_runs_as_it_is(soon, monkeypatch):
    calls = [0]

    def counts(state):
        calls[0] += 1

    def writes(state):
        state.params["bias"] = state.params["bias"] * 0.5

    for collected, why in ((counts, "changes objects of Python"), (writes, "changes the state")):
        seen = assert_alike(functools.partial(playing, collected=collected), 4)
        assert why in seen[-1]
    assert calls == [2 * 4]
    monkeypatch.setattr(recorded, "_MOST", 100)
    assert "more than 100 operators" in assert_alike(playing, 4)[-1]


def test_environments_in_python_are_stepped_as_often(soon):
    class Counting(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            Counting.steps += 1
            return super().step(action)

    def make(replay):
        mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        made = gymnasium.make_vec("CartPole-v1", 2, "sync", wrappers=[Counting], vector_kwargs=mode)
        envs = rl.GymnasiumEnvs(made, num_models=2)
        policy = rl.make_policy(nn.Linear(4, 2), lambda model, x: model(x).argmax(-1))

        def collect(state):
            running, happened = envs.rollout(policy, state, state.carry, 5)
            return running, happened["observation"].transpose(0, 1)

        step = hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd(lr=0.1), collect=collect, replay=replay)
        running = envs.start(hfta.random.keys(PAIR))
        return step, step.init(*hfta.init_params(lambda: nn.Linear(4, 2), PAIR), seeds=PAIR, carry=running), None

    assert assert_alike(make, 4)[-1].startswith("eager: its functions can reach")
    assert Counting.steps == 2 * 4 * 5 * 2


def test_a_run_knows_how_often_it_collects(monkeypatch):
    # Without that, records are made after as many calls as they cost.
    monkeypatch.setattr(replay, "_CHEAP", 0)
    step, state, _ = playing(None)
    result = hfta.fit(step, state, [None] * 40, epochs=1, progress=False)
    assert "collecting replayed" in step.status
    assert sum(record.uses for shape in step.loop.collecting._shapes.values() for record in shape.records) > 30
    plain, state, _ = playing(False)
    expected = hfta.fit(plain, state, [None] * 40, epochs=1, progress=False)
    assert identical(result.state.params, expected.state.params)
