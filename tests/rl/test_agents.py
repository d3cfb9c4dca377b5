"""Whole training runs: agents of an array are agents trained alone, and what they carry follows them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import gymnasium
import numpy as np
import optree
import pytest
import torch
from examples.rl import common, dqn, ppo, recurrent_ppo, sac, td3
from optuna.distributions import FloatDistribution
from torch import nn

import hfta_func as hfta
from hfta_func import rl, tune
from hfta_func.step import replay

SEEDS = [3, 4, 5]


def rates(places):
    return [[3e-3, 1e-3, 1e-2][place] for place in places]


def start(name, places):
    """The step and the state of the agents in these places."""
    example, environment, options, make_agent = RUNS[name]
    options = {key: rates(places) if key == "entropy" else value for key, value in options.items()}
    step, begin = example.make(environment, rates(places), **options)
    seeds = [SEEDS[place] for place in places]
    params, _ = hfta.init_params(lambda: make_agent(environment).double(), seeds)
    return step, begin(params, seeds)


CARTPOLE, PENDULUM = (kind(dtype=torch.float64, max_steps=3) for kind in (rl.CartPole, rl.Pendulum))
PPO = {"minibatches": 2, "epochs": 2}
RUNS = {
    "ppo, discrete": (ppo, CARTPOLE, {**PPO, "entropy": None}, ppo.Agent),
    "ppo, continuous": (ppo, PENDULUM, {**PPO, "entropy": None}, ppo.Agent),
    "ppo, recurrent": (recurrent_ppo, CARTPOLE, PPO, recurrent_ppo.Agent),
    "dqn": (dqn, CARTPOLE, {"every": 2, "exploring": 10, "capacity": 50, "steps": 3}, dqn.make_model),
    "sac": (sac, PENDULUM, {"capacity": 50}, sac.Agent),
    "td3": (td3, PENDULUM, {"capacity": 50}, td3.Agent),
}
SIZES = {"T": 4, "N": 2, "BATCH": 5, "UPDATES": 4, "WARMUP": 6, "MEMORY": 3}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for example in (ppo, dqn, sac, td3, recurrent_ppo):
        for name in SIZES.keys() & vars(example).keys():
            monkeypatch.setattr(example, name, SIZES[name])
    # PyTorch's softplus rounds otherwise in the last elements of a tensor, those that fill no register.
    monkeypatch.setattr(sac, "BATCH", 16)


def assert_same(found, expected, tolerance=0.0):
    for a, b in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def two_passes(x):
    return ((x - x.mean()).square().sum() / (x.numel() - 1)).sqrt()


@pytest.mark.soak(ids="13|continuous|recurrent|1e-10")
@pytest.mark.exhaustive(unless="0.0-1-ppo, discrete")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("iterations", [1, 13])
@pytest.mark.parametrize("tolerance", [0.0, 1e-10])
def test_an_agent_of_an_array_is_the_agent_alone(name, iterations, tolerance, monkeypatch):
    """To the bit, over 52 updates, where every product is by itself: one for all members rounds otherwise."""
    if tolerance == 0:
        # Of one result, which is what an agent alone has, PyTorch's own takes two passes, and of several it takes one.
        monkeypatch.setattr(torch.Tensor, "std", two_passes)
    with hfta.rules.override(all="loop"):
        step, state = start(name, [0, 1, 2])
        state, metrics = step.loop(state, iterations)
        assert metrics["loss"].shape[:2] == (iterations, 4) and metrics["finite"].all()
        one, alone = start(name, [1])
        alone, own = one.loop(alone, iterations)
        assert_same(alone, hfta.take(state, [1]), tolerance)
        assert_same(own["return"], metrics["return"][:, [1]], tolerance)
        other, permuted = start(name, [2, 0, 1])
        assert_same(other.loop(permuted, iterations)[0], hfta.take(state, [2, 0, 1]))


@pytest.mark.exhaustive(unless="recurrent")
@pytest.mark.parametrize("name", RUNS)
def test_the_steps_of_an_agent_are_replayed(name, monkeypatch):
    monkeypatch.setattr(replay, "_STEPS", 0)
    step, state = start(name, [0, 1, 2])
    expected, metrics = step.loop(state, 3)
    replayed = step.replayed()
    found, own = replayed.loop(state, 3)
    assert replayed.status.startswith("replayed"), replayed.status
    assert_same((found, own), (expected, metrics))


class Brief:
    """An environment whose every episode is one step with a reward of 1."""

    terminates = True

    def step(self, state, action, key):
        state, observation, reward, _, truncated = super().step(state, action, key)
        ended = torch.ones_like(truncated)
        return state, observation, torch.ones_like(reward), ended & self.terminates, ended & (not self.terminates)


@pytest.mark.exhaustive(unless="discrete|td3")
@pytest.mark.parametrize("name", RUNS)
def test_what_follows_a_truncation_counts_and_what_follows_a_termination_does_not(name, monkeypatch):
    example, environment, options, make_agent = RUNS[name]
    for terminates in (False, True):
        case = type("Case", (Brief, type(environment)), {"terminates": terminates})(dtype=torch.float64)
        monkeypatch.setitem(RUNS, name, (example, case, options, make_agent))
        step, state = start(name, [0, 1])
        value = step.options.collect(state)[1]["target"] - 1
        assert (value.abs() < 1e-12).all() if terminates else (value.abs() > 1e-6).all()


@pytest.mark.exhaustive
@pytest.mark.soak(ids="2")
@pytest.mark.parametrize("workers", [None, 2])
def test_fit_trains_agents(workers, tmp_path):
    (step, state), made = start("ppo, discrete", [0, 1, 2]), {"progress": False, "workers": workers}
    after, metrics = step.loop(state, 1)
    failing = torch.tensor([0.1, math.inf, 0.1], dtype=torch.float64)
    found, history = hfta.fit(step, state._replace(hparams={"entropy": failing}), [None], epochs=1, **made)
    assert [failure.member for failure in history.failures] == [1] and history["finite"].tolist() == [[1, 0, 1]]
    assert_same(hfta.take(found.params, [1]), hfta.take(state.params, [1]))
    made["callbacks"] = [hfta.callbacks.early_stopping("loss", patience=1, min_delta=0.46)]
    (whole, history), file = hfta.fit(step, state, [None], epochs=3, **made), tmp_path / "run"
    assert whole.carry.taken.tolist() == [8, 12, 8]
    assert_same(history["loss"][0], metrics["loss"].mean((0, 1)), 1e-12)
    assert_same(history["return"][0], metrics["return"][0])
    between = hfta.fit(step, state, [None], epochs=1, resume=file, **made).state
    assert_same(between, after, 0.0 if workers is None else 1e-10)
    resumed = hfta.fit(step, state, [None], epochs=3, resume=file, **made)
    assert_same(resumed.state, whole)
    assert_same(resumed.history.epochs, history.epochs)


@pytest.mark.exhaustive
def test_what_agents_carry_follows_them(tmp_path):
    step, state = start("dqn", [0, 1, 2])
    state, _ = step.loop(state, 2)
    hfta.save(state, tmp_path / "agents")
    loaded = hfta.load(tmp_path / "agents", like=state)
    joined = hfta.concat([hfta.take(state, [0]), hfta.take(state, [1, 2])])
    expected, _ = step.loop(state, 2)
    assert_same(step.loop(loaded, 2)[0], expected)
    assert_same(step.loop(joined, 2)[0], expected)
    # Two iterations and two more are four.
    _, again = start("dqn", [0, 1, 2])
    assert_same(step.loop(again, 4)[0], expected)


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
    with pytest.raises(hfta.errors.StackError, match=r"tree\['carry'\]\['b'\]\[0\] has 2 members but"):
        step.init(*params, seeds=SEEDS, carry={"a": torch.arange(3), "b": (torch.ones(2, 2),)})
    with pytest.raises(hfta.errors.StackError, match=r"tree\['carry'\]\['a'\] is a float"):
        step.init(*params, seeds=SEEDS, carry={"a": 1.0})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("places", [[0, 1, 2], [1]], ids=["three", "one"])
def test_a_training_run_is_one_graph(name, places):
    step, state = start(name, places)
    expected, metrics = step.loop(state, 3)
    found, own = torch.compile(step.loop, fullgraph=True, dynamic=False, backend="aot_eager")(state, 3)
    assert_same(found, expected, 1e-9)
    assert_same(own["return"], metrics["return"], 1e-9)


@pytest.mark.exhaustive
def test_an_example_trains_goes_on_and_plays(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "EPOCH", 1)
    argv = ["--seeds", "2", "--lr", "1e-3", "1e-2", "--resume", str(tmp_path / "run")]
    td3.main([*argv, "--iterations", "1"])
    state, history = td3.main([*argv, "--iterations", "2", "--log", str(tmp_path / "log")])
    assert state.step.tolist() == [8, 8] and len(history) == 2 and [*(tmp_path / "log").iterdir()]
    lr = state.opt_state.groups["critics"].hyperparams["lr"]
    assert lr.tolist() == [1e-3, 1e-2] and capsys.readouterr().out.count("returns: nan nan") == 2


@pytest.mark.exhaustive(unless="recurrent")
@pytest.mark.parametrize("name", RUNS)
def test_an_agent_plays_in_gymnasium(name):
    example, environment, _, make_agent = RUNS[name]
    game = Filmed(gymnasium.make(common.NAMES[type(environment).__name__]))
    torch.manual_seed(0)
    total, pictures = common.play(make_agent(environment), example.best, game)
    assert total == (game.shown if environment is CARTPOLE else pytest.approx(total))
    assert [int(picture[0, 0, 0]) for picture in pictures] == [*range(1, game.shown + 1, game.shown // 6)][:6]
    assert game.shown == 200 and -2000 < total < -100 if environment is PENDULUM else 6 < total < 200


class Filmed(gymnasium.Wrapper):
    """A game that says in its pictures how many it has shown."""

    render_mode, shown = "rgb_array", 0

    def render(self):
        self.shown += 1
        return np.full((2, 2, 3), self.shown, np.uint8)


@pytest.mark.soak
def test_a_study_of_agents():
    def build(fixed, members):
        step, begin = ppo.make(CARTPOLE, members["lr"], entropy=members["entropy"], **PPO)
        params, _ = hfta.init_params(lambda: ppo.Agent(CARTPOLE).double(), members["seed"])
        return tune.Array(step, begin(params, members["seed"]), [None] * 2)

    space = {"lr": FloatDistribution(1e-4, 1e-1, log=True), "entropy": FloatDistribution(0.001, 0.1)}
    options = {"metric": "loss", "direction": "minimize", "trials": 4, "epochs": 3, "progress": False}
    study = tune.run(build, space, scheduler=tune.population_based(share=0.5), max_models=4, **options)
    assert [trial.status for trial in study.trials] == ["complete"] * 4


def test_an_agent_that_copies_another_keeps_its_noise():
    steps = []

    def build(fixed, members):
        step, state = start("dqn", members["place"])
        steps.append(step)
        seeds = state.keys + 7
        carry = {**state.carry, "keys": seeds, "attention": {"keys": seeds[:, None] + 0.5}, "keys of others": seeds}
        return tune.Array(step, state._replace(carry=carry), [None])

    population = tune.population(build, {"place": [0, 1, 2], "seed": SEEDS})
    source, before = population.state(2), population.state(0)
    population.copy([(0, 2)])
    after = population.state(0)
    kept = source.carry | {"running": source.carry["running"]._replace(keys=before.carry["running"].keys)}
    assert_same(after, source._replace(keys=before.keys, carry=kept | {"keys": before.carry["keys"]}))
    assert not torch.equal(after.carry["running"].keys, source.carry["running"].keys)
    assert_same(population.state(2), source)

    def went_on(state):
        state = state._replace(carry={name: state.carry[name] for name in ("running", "buffer", "target")})
        return steps[0].options.collect(state)[0]["running"].observation

    # Episodes that begin after the copy are of its own noise.
    assert not (went_on(after) == went_on(source)).any()


@pytest.mark.exhaustive
def test_the_short_example_is_short_and_runs(capsys):
    text = Path(common.__file__).with_name("short.py").read_text()
    assert code_lines(Path(common.__file__).with_name("short.py")) <= 45
    for old, new in (
        ("iterations = range(8), rl.CartPole(), 100", "iterations = range(2), rl.CartPole(), 1"),
        ("128", "4"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    names = {}
    exec(compile(text, "short.py", "exec"), names)
    assert names["state"].step.tolist() == [16, 16] and len(capsys.readouterr().out.split(",")) == 2


def test_lines_of_code_are_those_of_the_documentation():
    folder = Path(common.__file__).parent
    page = (folder.parents[1] / "docs/howto/reinforcement-learning.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+)", page, re.MULTILINE)
    shared = code_lines(folder / "common.py")
    assert f"{shared} lines of `common.py`" in page and len(rows) == 5
    for name, lines, others in rows:
        assert shared + code_lines(folder / f"{name.lower().replace(' ', '_')}.py") == int(lines) < int(others)


def code_lines(path):
    return len([line for line in path.read_text().splitlines() if not re.fullmatch(r"\s*(#.*)?", line)])
