"""Evolution strategies: a loop over members in plain PyTorch makes the same noise, ranks and update."""

import functools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from comparisons import identical
from hfta_func import es, random
from hfta_func.errors import BatchError, HyperparameterError

COUNT, SEEDS, SIGMA, LR = 6, [3, 5], [0.1, 0.3], [0.02, 0.05]


def make_model():
    """A layer that is factored, kernels and a table that are not, a frozen layer and an output of few units."""
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12), nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 5, 3))
    layers.extend([nn.Flatten(), nn.Linear(10, 2), nn.Linear(2, 2)])
    layers[7].requires_grad_(False)
    return layers.double()


def rounded(model, batch):
    """A fitness without a gradient."""
    return -((4 * model(batch[0])).round() / 4 - batch[1]).abs().mean()


def start(optimizer, seeds=SEEDS, **options):
    """A strategy, and the state of a run from each seed."""
    strategy = es.make_strategy(make_model(), optimizer, **{"population": COUNT, **options})
    return strategy, strategy.init(*hfta.init_params(make_model, seeds), seeds=seeds)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)


def drawn(seed, step, pair, number, shape):
    """Noise of a pair by its key alone."""
    key = random.fold_in(random.fold_in(random.keys([seed]), es.NOISE), step)
    return random.normal(random.fold_in(random.fold_in(key, pair), number), shape, dtype=torch.float64)[0]


class Loop:
    """One run in plain PyTorch: members one by one, ranks by comparison, an optimizer of ``torch.optim``."""

    def __init__(self, model, seed, sigma, lr, rank):
        self.model, self.seed, self.sigma, self.rank = model, seed, sigma, rank
        self.params = {path: param for path, param in model.named_parameters() if param.requires_grad}
        self.optimizer, self.step = torch.optim.AdamW(self.params.values(), lr=lr, weight_decay=0.1), 0

    def noise(self, pair):
        number = 0
        for path, param in self.params.items():
            m, n = len(param), param[0].numel()
            if self.rank and param.dim() > 1 and self.rank * (m + n) < m * n:
                left = drawn(self.seed, self.step, pair, number, (m, self.rank))
                right = drawn(self.seed, self.step, pair, number + 1, (self.rank, n))
                number += 2
                yield path, (left @ right / math.sqrt(self.rank)).reshape(param.shape)
            else:
                yield path, drawn(self.seed, self.step, pair, number, param.shape)
                number += 1

    def generation(self, fitness_of):
        values, noises = [], []
        with torch.no_grad():
            for pair in range(COUNT // 2):
                for sign in (1, -1):
                    noise = {path: sign * leaf for path, leaf in self.noise(pair)}
                    moved = {path: param + self.sigma * noise[path] for path, param in self.params.items()}
                    member = functools.partial(torch.func.functional_call, self.model, moved)
                    noises.append(noise)
                    values.append(float(fitness_of(member)))
        order = [-math.inf if math.isnan(value) else value for value in values]
        for path, param in self.params.items():
            slope = torch.zeros_like(param)
            for value, noise in zip(order, noises, strict=True):
                place = sum(other < value for other in order) + (order.count(value) - 1) / 2
                slope -= (place / (COUNT - 1) - 0.5) * noise[path]
            param.grad = slope / (COUNT * self.sigma)
        self.optimizer.step()
        self.step += 1
        return values


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_two_runs_are_the_loops_of_each(batch, rank):
    strategy, state = start(hfta.adamw(lr=LR, weight_decay=0.1), sigma=SIGMA, rank=rank)
    models = hfta.unstack_params(make_model(), state.params, state.buffers)
    loops = [Loop(*each, rank) for each in zip(models, SEEDS, SIGMA, LR, strict=True)]
    evaluate = hfta.make_eval_step(strategy.model, rounded)
    for _ in range(4):
        fitness = evaluate(strategy.ask(state), batch)["rounded"]
        state, metrics = strategy.tell(state, fitness)
        values = [loop.generation(lambda member: rounded(member, batch)) for loop in loops]
        values = torch.tensor(values, dtype=torch.float64)
        close(fitness, values.flatten())
        close(metrics["fitness"], values.mean(1))
        close(metrics["loss"], -values.mean(1))
        close(metrics["best"], values.amax(1))
    for run, loop in enumerate(loops):
        for path, param in loop.model.named_parameters():
            close(state.params[path][run], param.detach())
    assert bool((state.params["0.weight"] != hfta.init_params(make_model, SEEDS).params["0.weight"]).all())


def test_linear_layers_hold_the_base_once():
    strategy, state = start(hfta.sgd(lr=0.1), [0], rank=1)
    members = strategy.ask(state)
    assert members.params["0.weight"].data_ptr() == state.params["0.weight"].data_ptr()
    assert members.params["0.left"].shape == (COUNT, 8, 1) and members.params["0.right"].shape == (COUNT, 1, 6)
    # A kernel is perturbed as it is, and so is a layer whose factors would not be smaller.
    assert not torch.equal(members.params["4.weight"][0], members.params["4.weight"][1])
    assert "6.left" in members.params and "7.left" not in members.params
    assert members.params.keys() == dict(strategy.model.named_parameters()).keys()
    assert state.params.keys() == dict(make_model().named_parameters()).keys()


def test_a_frozen_base_may_be_shared(batch):
    torch.manual_seed(3)
    model = make_model()
    outputs = []
    for shared in ({}, {"share_frozen": True}):
        strategy = es.make_strategy(model, hfta.sgd(lr=0.1), population=COUNT, rank=1, **shared)
        state = strategy.init(*hfta.stack_params([model], **shared), seeds=[0])
        evaluate = hfta.make_eval_step(strategy.model, rounded, **shared)
        state, _ = strategy.tell(state, evaluate(strategy.ask(state), batch)["rounded"])
        outputs.append(state.params)
    assert outputs[0].keys() - outputs[1].keys() == {"7.weight", "7.bias"}
    assert all(torch.equal(leaf, outputs[0][path]) for path, leaf in outputs[1].items())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.inner, self.table = nn.Linear(6, 7, bias=False), nn.Linear(6, 6), nn.Embedding(7, 6)
        self.table.weight = self.out.weight

    def forward(self, tokens):
        # A layer's weight that is read outside of its call is perturbed, too.
        return self.out(F.linear(self.inner(self.table(tokens)), self.inner.weight))


def test_members_are_the_same_whoever_reads_a_weight():
    torch.manual_seed(0)
    model, tokens = Tied().double(), torch.tensor([1, 5, 2])
    strategy = es.make_strategy(model, hfta.sgd(lr=0.1), population=COUNT, rank=2)
    state = strategy.init(*hfta.stack_params([model]), seeds=[4])
    members = strategy.ask(state)
    outputs = hfta.predict(strategy.model, members, tokens).outputs
    loop = Loop(model, 4, 0.1, 0.1, 2)
    for member in range(COUNT):
        moved = {
            path: param.detach() + (0.1, -0.1)[member % 2] * noise
            for (path, param), (_, noise) in zip(loop.params.items(), loop.noise(member // 2), strict=True)
        }
        close(outputs[member], torch.func.functional_call(model, moved, tokens).detach())


def test_a_member_is_the_same_whatever_others_are_asked_for():
    strategy, state = start(hfta.sgd(lr=0.1), rank=1)
    alone = strategy.init(*hfta.init_params(make_model, SEEDS[1:]), seeds=SEEDS[1:])
    whole = strategy.ask(state)
    for part in (slice(0, 1), slice(1, 3)):
        few = strategy.ask(alone, part)
        index = torch.arange(COUNT)[2 * part.start : 2 * part.stop] + COUNT
        for path, leaf in few.params.items():
            assert torch.equal(leaf, whole.params[path][index]), path
    assert torch.equal(whole.keys, torch.tensor(SEEDS).repeat_interleave(COUNT))


def test_noise_differs_between_steps_seeds_pairs_and_leaves():
    strategy, state = start(hfta.sgd(lr=0.0), [0, 0, 1], population=64)
    after, _ = strategy.tell(state, torch.arange(192.0))
    first, second = (strategy.ask(each).params["0.weight"].unflatten(0, (3, 64)) for each in (state, after))
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0] - state.params["0.weight"][0], second[0])
    noise = [(leaf[:, ::2] - leaf[:, 1::2]) / 0.2 for leaf in (first, second)]
    draws = torch.stack([noise[0][0], noise[0][2], noise[1][0]]).flatten(1)
    assert float((torch.corrcoef(draws) - torch.eye(3)).abs().max()) < 0.1
    pairs = torch.corrcoef(noise[0][0].flatten(1)) - torch.eye(32)
    assert float(pairs.abs().max()) < 0.65
    assert abs(float(draws.std()) - 1) < 0.05


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 4, 4, 4, 4, 4], [1, 0, 0, 1, 1, 2]])
def test_ranks_are_those_of_comparison(order):
    values = torch.tensor([order, order[::-1]]).double()
    expected = [(sum(b < a for b in order) + (order.count(a) - 1) / 2) / 5 - 0.5 for a in order]
    close(es.ranks(values), torch.tensor([expected, expected[::-1]], dtype=torch.float64))


def test_equal_members_leave_the_base_where_it_is():
    strategy, state = start(hfta.sgd(lr=1.0), [0])
    after, _ = strategy.tell(state, [500.0] * COUNT)
    assert identical(after.params, state.params)


def test_a_member_without_a_number_is_last_and_a_run_without_any_fails():
    strategy, state = start(hfta.sgd(lr=1.0))
    nan, low = [[first, -6.0, -5.0, -4.0, -3.0, -2.0] for first in (math.nan, -9.0)]
    bad, metrics = strategy.tell(state, torch.tensor([*nan, *[math.nan] * 6]))
    good, _ = strategy.tell(state, torch.tensor([*low, *low]))
    for path in state.params:
        assert torch.equal(bad.params[path][0], good.params[path][0])
        assert torch.equal(bad.params[path][1], state.params[path][1])
    assert metrics["finite"].tolist() == [True, False] and metrics["fitness"][0] == -4.0


def test_numbers_of_a_simulator_and_infinity():
    strategy, state = start(hfta.sgd(lr=1.0), [0])
    listed, _ = strategy.tell(state, [1, 2, 3, 4, 5, 6])
    infinite, metrics = strategy.tell(state, torch.tensor([-math.inf, 2, 3, 4, 5, math.inf]))
    assert torch.equal(listed.params["0.weight"], infinite.params["0.weight"])
    assert metrics["finite"].tolist() == [True] and metrics["best"].tolist() == [math.inf]


def test_a_run_goes_on_from_a_file(tmp_path, batch):
    strategy, first = start(hfta.adam(lr=LR), sigma=SIGMA, rank=1)
    evaluate = hfta.make_eval_step(strategy.model, rounded)

    def run(strategy, state, count):
        for _ in range(count):
            state, _ = strategy.tell(state, evaluate(strategy.ask(state), batch)["rounded"])
        return state

    hfta.save(run(strategy, first, 2), tmp_path / "half.safetensors")
    resumed = run(pickle.loads(pickle.dumps(strategy)), hfta.load(tmp_path / "half.safetensors", like=first), 2)
    assert identical(run(strategy, first, 4).params, resumed.params)


def test_fit_trains_by_generations(batch):
    def fitness(members):
        return evaluate(members, batch)["rounded"]

    strategy, state = start(hfta.adam(lr=LR), sigma=SIGMA, rank=1, evaluate=fitness)
    evaluate = hfta.make_eval_step(strategy.model, rounded)
    fitted, history = hfta.fit(strategy.step, state, [None] * 2, epochs=2, progress=False)
    for _ in range(4):
        state, _ = strategy.tell(state, fitness(strategy.ask(state)))
    assert identical(fitted.params, state.params)
    assert history["fitness"].shape == (2, 2) and bool((history["best"] >= history["fitness"]).all())
    close(history["loss"], -history["fitness"])


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_generations_are_one_graph(batch):
    def evaluate(members):
        return hfta.vmap(one, in_dims=(0, 0, None))(members.params, members.buffers, batch)

    def one(params, buffers, batch):
        return rounded(lambda inputs: call(params, buffers, inputs)[0], batch)

    strategy, state = start(hfta.adam(lr=LR), sigma=SIGMA, rank=1, evaluate=evaluate)
    call = hfta.functional(strategy.model)
    eager, metrics = strategy.step.loop(state, 3)
    compiled, again = torch.compile(strategy.step.loop, fullgraph=True, dynamic=False)(state, 3)
    close(again["fitness"], metrics["fitness"])
    for path, leaf in eager.params.items():
        close(compiled.params[path], leaf)


def test_buffers_and_numbers_are_those_of_the_run():
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(rate)) for rate in (0.2, 0.4)]
    models[1][1].running_mean.fill_(7.0)
    strategy = es.make_strategy(models[0], hfta.sgd(lr=0.1), population=4)
    state = strategy.init(*hfta.stack_params(models), seeds=SEEDS, hparams={})
    members = strategy.ask(state)
    assert members.buffers["1.running_mean"][:, 0].tolist() == [0.0] * 4 + [7.0] * 4
    assert members.hparams["2.p"].tolist() == [0.2] * 4 + [0.4] * 4
    assert hfta.predict(models[0], members, torch.ones(2, 3)).outputs.shape == (8, 2, 4)


def test_what_does_not_fit_is_refused():
    make = functools.partial(es.make_strategy, nn.Linear(2, 2), hfta.sgd(lr=0.1))
    for population in (1, 7):
        with pytest.raises(HyperparameterError, match=f"population is {population}; give an even number, as members"):
            make(population=population)
    with pytest.raises(ValueError, match="rank is 0; give an integer of at least 1"):
        make(rank=0)
    with pytest.raises(HyperparameterError, match=r"model 1: sigma is 0.0; it must be positive and finite"):
        make(sigma=[0.1, 0.0])
    strategy = make(population=4)
    state = strategy.init(*hfta.init_params(lambda: nn.Linear(2, 2), SEEDS), seeds=SEEDS)
    with pytest.raises(BatchError, match=r"fitness is \[4\], but must be \[8\], a number for each member"):
        strategy.tell(state, torch.ones(4))


def make_agent():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def test_a_policy_learns_to_balance_a_pole():
    pytest.importorskip("gymnasium", reason="needs gymnasium; pip install 'hfta_func[rl]'")
    from hfta_func import rl

    environment = rl.CartPole(max_steps=100, dtype=torch.float64)

    def returns(policy, members):
        running = rl.start(environment, random.fold_in(members.keys, members.step), num_envs=2)
        running, _ = rl.rollout(environment, policy, members, running, 100)
        return rl.episode_metrics(running)["return"]

    def act(agent, observation):
        return agent(observation).argmax(-1)

    options = {"population": 32, "sigma": 0.5, "rank": 1, "evaluate": lambda members: returns(policy, members)}
    strategy = es.make_strategy(make_agent(), hfta.adam(lr=0.2), **options)
    policy = rl.make_policy(strategy.model, act)
    state = strategy.init(*hfta.init_params(make_agent, SEEDS), seeds=SEEDS)
    fitness = returns(policy, strategy.ask(state)).unflatten(0, (2, 32))
    # The second run, with whole matrices of noise in ordinary policies.
    alone = hfta.unstack_params(make_agent(), state.params, state.buffers)[1]
    loop = Loop(alone, SEEDS[1], 0.5, 0.2, 1)
    for pair in (0, 5):
        for side, sign in enumerate((1, -1)):
            moved = dict(loop.params)
            for path, noise in loop.noise(pair):
                moved[path] = (moved[path] + sign * 0.5 * noise).detach().unsqueeze(0)
            member = hfta.take(state, 1)._replace(params=moved)
            assert returns(rl.make_policy(make_agent(), act), member)[0] == fitness[1, 2 * pair + side]
    state, history = hfta.fit(strategy.step, state, [None] * 4, epochs=4, progress=False)
    assert bool((history["fitness"][-1] > 2 * fitness.mean(1)).all())
