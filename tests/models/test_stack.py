"""Ordinary modules to an array and back, and members taken, joined and trained within it."""

import copy
import itertools
import random
import threading

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hfta_func as hfta
from comparisons import identical
from ways import assert_as_alone, seeded

NUM_MODELS = 3


class Tied(nn.Module):
    """Encoder and decoder share one matrix; the head is frozen."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x).tanh()))


class Whitened(nn.Module):
    """A buffer that is not in the state dict, one that is, and one under two names."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.randn(4), persistent=False)
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.again = self.linear
        self.register_buffer("scale_again", self.scale)

    def forward(self, x):
        return self.again((x - self.mean) / self.scale_again)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0]


class Normalised(nn.Sequential):
    """BatchNorm with statistics of its own, and dropout."""

    def __init__(self):
        # A bias before BatchNorm would have a gradient of pure rounding error, which Adam blows up.
        super().__init__(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        self[1].running_mean.normal_()
        self[1].running_var.uniform_(0.5, 2.0)
        self[1].num_batches_tracked += int(torch.randint(100, ()))


FACTORIES = {
    "linear": lambda: nn.Linear(4, 2),
    "tied and frozen": Tied,
    "buffers": Whitened,
    "recurrent": Recurrent,
    "normalised": Normalised,
    "parametrized": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Tanh(), weight_norm(nn.Linear(3, 2))),
    "double": lambda: nn.Linear(4, 2, dtype=torch.float64),
    "eval mode": lambda: Normalised().eval(),
}


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def leaves(tree):
    return [leaf.detach().clone() for leaf in optree.tree_leaves(tree)]


def same_member(state, i, other, j):
    return identical(hfta.take(state, i), hfta.take(other, j))


@pytest.mark.parametrize("name", FACTORIES)
def test_round_trip(name):
    models = [FACTORIES[name]() for _ in range(NUM_MODELS)]
    stacked = hfta.stack_params(models)
    assert hfta.num_models(stacked) == NUM_MODELS
    assert not any(leaf.requires_grad for leaf in optree.tree_leaves(stacked))
    for i, model in enumerate(models):
        assert stacked.params.keys() == dict(model.named_parameters()).keys()
        assert stacked.buffers.keys() == dict(model.named_buffers()).keys()
        for path, tensor in tensors(model).items():
            assert torch.equal({**stacked.params, **stacked.buffers}[path][i], tensor)
    back = hfta.unstack_params(models[-1], *stacked)
    assert len(back) == NUM_MODELS
    for model, own in zip(back, models, strict=True):
        assert model.training == own.training
        assert model.state_dict().keys() == own.state_dict().keys()
        for path, tensor in tensors(own).items():
            assert torch.equal(tensors(model)[path], tensor)
            assert tensors(model)[path].requires_grad == tensor.requires_grad
            assert isinstance(tensors(model)[path], nn.Parameter) == isinstance(tensor, nn.Parameter)
        x = torch.randn(5, 4, dtype=next(own.parameters()).dtype)
        assert torch.equal(copy.deepcopy(model).eval()(x), copy.deepcopy(own).eval()(x))


@pytest.mark.parametrize("name", FACTORIES)
def test_array_and_modules_share_no_storage(name):
    models = [FACTORIES[name]() for _ in range(NUM_MODELS)]
    originals = [leaves(tensors(model)) for model in models]
    stacked = hfta.stack_params(models)
    before = leaves(stacked)
    back = hfta.unstack_params(models[0], *stacked)
    for model in models:
        for tensor in tensors(model).values():
            tensor.data.zero_()
    assert identical(stacked, before)
    assert all(identical(tensors(model), own) for model, own in zip(back, originals, strict=True))
    for tensor in tensors(back[0]).values():
        tensor.data.fill_(7)
    assert identical(stacked, before)
    assert all(identical(tensors(model), own) for model, own in zip(back[1:], originals[1:], strict=True))
    for leaf in optree.tree_leaves(stacked):
        leaf.fill_(5)
    assert all(identical(tensors(model), own) for model, own in zip(back[1:], originals[1:], strict=True))


def test_ties_stay_ties():
    models = [Tied() for _ in range(NUM_MODELS)]
    stacked = hfta.stack_params(models)
    assert "decoder.weight" not in stacked.params
    assert hfta.stack_params([Twice()]).buffers.keys() == {
        f"first.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    for model in hfta.unstack_params(models[0], *stacked):
        assert model.decoder.weight is model.encoder.weight
    for model in hfta.unstack_params(Whitened(), *hfta.stack_params([Whitened() for _ in range(NUM_MODELS)])):
        assert model.scale_again is model.scale
        assert model.again is model.linear
        assert "mean" not in model.state_dict()


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_new_models_from_seeds(name, kind):
    seeds = [11, -3, 7]
    before = torch.get_rng_state()
    stacked = hfta.init_params(FACTORIES[name], kind(seeds))
    assert torch.equal(torch.get_rng_state(), before)
    assert identical(stacked, hfta.stack_params(seeded(FACTORIES[name], seeds)))


def loss_fn(model, batch, hparams):
    loss = F.mse_loss(model(batch[0]), batch[1]) * hparams["weight"]
    return loss, {"mean": model(batch[0]).mean()}


@pytest.fixture
def state():
    """Of five members after some steps, each with values, a seed and hyperparameters of its own."""
    knobs = {"lr": torch.linspace(0.01, 0.1, 5), "weight_decay": torch.linspace(0.0, 0.3, 5)}
    adamw = hfta.adamw(betas=(torch.linspace(0.8, 0.95, 5), 0.99), **knobs)
    optimizer = hfta.chain(hfta.clip_grad_norm(torch.linspace(0.2, 2.0, 5)), adamw)
    step = hfta.make_train_step(Normalised().double(), loss_fn, optimizer)
    stacked = hfta.init_params(lambda: Normalised().double(), seeds=range(10, 15))
    state = step.init(*stacked, seeds=range(20, 25), hparams={"weight": torch.linspace(0.5, 1.5, 5)})
    batch = torch.randn(5, 8, 4, dtype=torch.float64), torch.randn(5, 8, 2, dtype=torch.float64)
    for _ in range(4):
        state, _ = step(state, batch)
    return state


def test_take(state):
    assert hfta.num_models(state) == 5
    for index, members in (
        (2, [2]),
        (-1, [4]),
        ([3, 0, 3], [3, 0, 3]),
        ([-2, 1], [3, 1]),
        (slice(1, None, 2), [1, 3]),
        (slice(None, None), [0, 1, 2, 3, 4]),
        (torch.tensor([4, 2]), [4, 2]),
        (torch.tensor([True, False, False, True, True]), [0, 3, 4]),
        ([False, True, False, False, False], [1]),
    ):
        taken = hfta.take(state, index)
        assert type(taken) is hfta.step.TrainState
        assert hfta.num_models(taken) == len(members)
        for leaf, own in zip(optree.tree_leaves(taken), optree.tree_leaves(state), strict=True):
            assert torch.equal(leaf, torch.stack([own[member] for member in members]))


def test_concat_restores_what_take_split(state):
    parts = [hfta.take(state, [0, 1]), hfta.take(state, 2), hfta.take(state, slice(3, 5))]
    joined = hfta.concat(parts)
    assert type(joined) is hfta.step.TrainState
    assert identical(joined, state)
    stacked = hfta.models.Stacked(state.params, state.buffers)
    assert identical(hfta.concat([hfta.take(stacked, slice(2)), hfta.take(stacked, slice(2, 5))]), stacked)
    before = leaves(state)
    for leaf in optree.tree_leaves(joined):
        leaf.zero_()
    assert identical(state, before)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_step_writes_nothing_of_the_callers(chunk_size):
    template = Normalised().double()
    step = hfta.make_train_step(template, loss_fn, hfta.sgd(lr=[0.1, 0.2, 0.3], momentum=0.9), chunk_size=chunk_size)
    models = [Normalised().double() for _ in range(NUM_MODELS)]
    stacked = hfta.stack_params(models)
    state = step.init(*stacked, seeds=[2, 0, 1], hparams={"weight": [0.5, 1.0, 1.5]})
    batch = torch.randn(3, 8, 4).double(), torch.randn(3, 8, 2).double()
    # A member that is not finite and one that has stopped take the paths that keep old values.
    batch[0][1, 0, 0] = float("nan")
    state = state._replace(active=torch.tensor([True, True, False]))
    held = [*map(tensors, models), tensors(template), stacked, state, batch]
    before, versions = leaves(held), [leaf._version for leaf in optree.tree_leaves(held)]
    new = state
    for _ in range(2):
        new, metrics = step(new, batch)
    assert metrics["finite"].tolist() == [True, False, True]
    # The batch holds a NaN, which equals itself here.
    for leaf, value in zip(optree.tree_leaves(held), before, strict=True):
        torch.testing.assert_close(leaf, value, rtol=0, atol=0, equal_nan=True)
    assert [leaf._version for leaf in optree.tree_leaves(held)] == versions
    assert not same_member(new.params, 0, state.params, 0)
    assert same_member(new.params, 1, state.params, 1)
    assert same_member(new.params, 2, state.params, 2)
    assert all(parameter.grad is None for model in (*models, template) for parameter in model.parameters())


class Twice(nn.Module):
    """Runs one layer, with parameters and running statistics, at two paths."""

    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.first = nn.Sequential(layer, nn.ReLU())
        self.second = nn.Sequential(layer, nn.Linear(4, 2))

    def forward(self, x):
        return self.second(self.first(x))


class Helper:
    """Holds a cache of its own, as helpers of PyTorch Geometric do."""

    def __init__(self):
        self.source, self.lock = {f"text {random.random()}": random.random()}, threading.Lock()


class Called(nn.Module):
    """Keeps what calls have left: a number, a map of attention without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2).double()
        self.helper, self.helpers, self.calls, self.map = Helper(), {"first": Helper()}, 0, None

    def forward(self, x):
        self.calls, self.map = self.calls + 1, x.detach().softmax(-1)
        return self.linear(x)


def test_helpers_and_what_calls_have_left_may_differ():
    models = [Called() for _ in range(3)]
    expected = [nn.Parameter(model.linear.weight.detach().clone()) for model in models]
    for model in models[1:]:
        model(torch.randn(2, 4).double())
    params, _ = hfta.stack_params(models)
    assert torch.equal(params["linear.weight"], torch.stack([*expected]))


class Filled(nn.Module):
    """Keeps its last output in a buffer that starts empty."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2).double()
        self.register_buffer("last", torch.zeros(0, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x)
        z = y + self.last.sum()
        self.last = y.detach()
        return z


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.parametrize(
    ("make", "way"), [*itertools.product([Tied, Twice], ["together", "one by one", "compiled"]), (Filled, "together")]
)
def test_members_train_as_alone(make, way):
    """With tied and frozen parameters, a module at two paths, and a buffer that starts empty."""
    assert_as_alone(lambda: make().double(), torch.randn(3, 8, 4).double(), way)


def test_the_model_of_a_step_says_which_parts_train():
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    models[1].eval()
    models[2][1].eval()
    step = hfta.make_train_step(models[0], lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1), batch_dims=None)
    state, _ = step(step.init(*hfta.stack_params(models), seeds=[0, 1, 2]), torch.randn(8, 4))
    assert state.buffers["1.num_batches_tracked"].tolist() == [1, 1, 1]
