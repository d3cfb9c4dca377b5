"""Numbers of the members' own, where they meet tensors of another kind: results are those of Python numbers."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import hfta_func as hfta
from ways import Calls, assert_as_alone, assert_as_arrays_of_one, loss, seeded, start

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = [0.1, 0.3, 0.7]


class Meets(nn.Module):
    """A function of the module, with a number and buffers without axes, and of features."""

    def __init__(self, func, number):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.func, self.number = func, number
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.drop(self.func(self, self.body(x))))


def writes_total(module, x):
    module.total.add_(x.detach().mean())
    return x * module.number * module.total.to(x.dtype)


def replaces_total(module, x):
    module.total = module.total + x.detach().mean() * module.number
    return x * module.number


def counts(module, x):
    module.seen += 1
    return x * (module.seen * module.number)


KINDS = {
    "mask": lambda module, x: x * ((x > 0) * module.number),
    "range": lambda module, x: x + torch.arange(4) * module.number,
    "where": lambda module, x: x * torch.where(x > 0, 1, module.number),
    "smoothed": lambda module, x: x + F.one_hot(x.argmax(-1), 4) * (1 - module.number) + module.number / 4,
    "writes": writes_total,
    "replaces": replaces_total,
    "counts": counts,
}


def assert_members_are_solo_runs(func, **options):
    members = seeded(Meets, range(3), [func] * 3, NUMBERS)
    xs = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    assert_as_arrays_of_one(loss, members, [1, 3, 7], xs, 1e-5, **options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_python_numbers(kind):
    assert_members_are_solo_runs(KINDS[kind])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mask", "writes"])
def test_they_are_so_compiled(kind):
    assert_members_are_solo_runs(KINDS[kind], compiled=True)


@pytest.mark.parametrize("kind", ["writes", "replaces"])
def test_they_are_so_when_run_again(kind):
    assert_members_are_solo_runs(KINDS[kind], checkpoint=True)


def test_a_loss_has_them_in_its_precision():
    members = [Meets(KINDS["mask"], number) for number in NUMBERS]

    def loss_fn(model, x, hparams):
        return model(x).mean() * hparams["number"]

    step, state = start(members, loss_fn, hfta.sgd(lr=0.1))
    _, metrics = step(state, torch.ones(3, 5, 4))
    assert metrics["loss"].dtype == torch.float32


class Layers(nn.Module):
    """Every way in which PyTorch's modules hand over a rate."""

    def __init__(self, rate):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, rate, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, rate, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, 2, dropout=rate, batch_first=True)
        self.drop = nn.Sequential(
            nn.Dropout1d(rate), nn.AlphaDropout(rate), nn.FeatureAlphaDropout(rate), nn.Dropout(rate)
        )

    def forward(self, x):
        x = self.encoder(x)
        return self.drop(self.recurrent(self.attention(x, x, x)[0])[0])


def test_rates_outside_of_training_need_no_key():
    members = [Layers(rate).double().eval() for rate in NUMBERS]
    params, buffers = hfta.stack_params(members)
    apply, x = hfta.functional(members[0]), torch.randn(2, 3, 4, dtype=torch.float64)
    found = hfta.vmap(lambda *given: apply(*given, x)[0])(params, buffers)
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bad", [1.5, -0.1])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout])
def test_the_member_of_a_rate_that_goes_out_of_range_fails(layer, bad):
    model = nn.Sequential(nn.Linear(4, 4), layer(0.1))
    step, state = start([model] * 2, lambda model, x: model(x).sum(), hfta.sgd(lr=0.1), hparams={"1.p": [0.1, 1.0]})
    _, metrics = step(hfta.with_hyperparams(state, **{"1.p": [1.0, bad]}), torch.ones(2, 3, 4))
    assert metrics["finite"].tolist() == [True, False]


PROMOTED = {
    "where of whole numbers": lambda fc, x: fc(x) * torch.where(x > 0, torch.arange(4), torch.tensor(2.5)),
    "where as a method": lambda fc, x: fc(x).float().where(x > 0, other=torch.tensor(2.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "evaluated"])
@pytest.mark.parametrize("name", PROMOTED)
def test_numbers_count_less_than_tensors_with_axes(name, way, count):
    batch = torch.randn(3, 5, 4, dtype=torch.float64)
    assert_as_alone(lambda: Calls(nn.Linear(4, 4, dtype=torch.float64), PROMOTED[name]), batch, way, count)
