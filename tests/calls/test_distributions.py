"""PyTorch's distributions inside a step: with noise by key, and the same alone, in an array, in chunks and compiled."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func import random
from hfta_func.calls.routing import routed
from hfta_func.step import replay
from ways import start

M, SIZE = 3, 4
PRIOR = D.Normal(0.0, 1.0, validate_args=True)


def scored(build: Callable[[Tensor], Any], shape: tuple[int, ...] = (2,)) -> Callable[[Tensor], Tensor]:
    """The log-likelihood of a sample, through which gradients flow where they can."""

    def loss(w: Tensor) -> Tensor:
        found = build(w)
        return found.log_prob(found.rsample(shape) if found.has_rsample else found.sample(shape)).sum() + w.sum()

    return loss


LOSSES = {
    "variational": lambda w: (
        D.kl_divergence(D.Normal(w, w.exp()), D.Normal(torch.zeros(SIZE), 1.0)).sum()
        + PRIOR.log_prob(D.Normal(w, w.exp(), validate_args=True).rsample()).sum()
    ),
    "Normal": scored(lambda w: D.Normal(w, w.exp())),
    "Exponential": scored(lambda w: D.Exponential(w.exp())),
    "Uniform": scored(lambda w: D.Uniform(w, w + 1)),
    "Gumbel": scored(lambda w: D.Gumbel(w, w.exp())),
    "LogNormal": scored(lambda w: D.LogNormal(w, w.exp())),
    "MultivariateNormal": scored(lambda w: D.MultivariateNormal(w, torch.outer(w, w) + torch.eye(SIZE))),
    "Bernoulli": scored(lambda w: D.Bernoulli(logits=w)),
    "Categorical": scored(lambda w: D.Categorical(logits=w)),
    "OneHotCategorical": scored(lambda w: D.OneHotCategorical(logits=w)),
    "OneHotCategoricalStraightThrough": lambda w: (
        D.OneHotCategoricalStraightThrough(logits=w).rsample((2,)) * torch.arange(1.0, SIZE + 1)
    ).sum(),
    "RelaxedBernoulli": scored(lambda w: D.RelaxedBernoulli(torch.tensor(0.5), logits=w)),
    "MixtureSameFamily": scored(lambda w: D.MixtureSameFamily(D.Categorical(logits=w), D.Normal(w, w.exp()))),
    "Independent": scored(lambda w: D.Independent(D.Normal(w, w.exp()), 1)),
    "F.gumbel_softmax hard": lambda w: (F.gumbel_softmax(w, hard=True) * torch.arange(1.0, SIZE + 1)).sum(),
    "torch.multinomial": lambda w: w[torch.multinomial(w.exp(), 3)].square().sum(),
    "log_prob of Gamma": lambda w: D.Gamma(w.exp(), w.exp()).log_prob(torch.arange(1.0, SIZE + 1)).sum(),
    "log_prob of Poisson": lambda w: D.Poisson(w.exp()).log_prob(torch.arange(SIZE).float()).sum(),
}
PLACES = {"array": {}, "one by one": {"chunk_size": 1}, "in pairs": {"chunk_size": 2}, "compiled": {}}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def two_steps(loss: Callable[[Tensor], Tensor], weights: Tensor, seeds: list[int], place: str) -> Tensor:
    step: Any = hfta.make_train_step(
        Weights(), lambda model, batch: loss(model.weight), hfta.sgd(lr=0.01), **PLACES[place]
    )
    state = step.init({"weight": weights}, {}, seeds=seeds)
    if place == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        state, metrics = step(state, None)
        assert metrics["finite"].all()
    return state.params["weight"]


@pytest.fixture(autouse=True)
def validating() -> Any:
    # The compiler switches validation off for good.
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(True)


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_distribution(name: str, place: str) -> None:
    torch.manual_seed(0)
    weights, seeds = torch.randn(M, SIZE), [7, 5, 6]
    before = torch.get_rng_state()
    expected = two_steps(LOSSES[name], weights, seeds, place)
    D.Distribution.set_default_validate_args(True)
    for member in range(M):
        own = slice(member, member + 1)
        found = two_steps(LOSSES[name], weights[own], seeds[own], "array")
        torch.testing.assert_close(found[0], expected[member], rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_distribution_is_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_STEPS", 0)
    step, plain = (
        hfta.make_train_step(Weights(), lambda model, batch: LOSSES[name](model.weight), hfta.sgd(lr=0.01), replay=on)
        for on in (True, None)
    )
    torch.manual_seed(0)
    state = expected = step.init({"weight": torch.randn(M, SIZE)}, {}, seeds=range(M))
    for _ in range(6):
        (state, _), (expected, _) = step(state, None), plain(expected, None)
        assert torch.equal(state.params["weight"], expected.params["weight"]), step.status
    assert step.status.startswith("replayed")
    # Who reads the functions switches no check off: outside of arrays an argument is still refused.
    with pytest.raises(ValueError, match="Expected parameter scale"):
        D.Normal(0.0, -1.0)


@pytest.mark.parametrize("num_models", [1, M])
def test_bad_arguments_of_one_member_end_no_other(num_models: int) -> None:
    weights = torch.ones(num_models, SIZE)
    weights[0, 0] = float("nan")
    step = hfta.make_train_step(Weights(), lambda model, batch: LOSSES["Normal"](model.weight), hfta.sgd(lr=0.01))
    _, metrics = step(step.init({"weight": weights}, {}, seeds=range(num_models)), None)
    assert metrics["finite"].tolist() == [False] + [True] * (num_models - 1)


@pytest.mark.parametrize("num_models", [1, M])
@pytest.mark.parametrize("build", [lambda w: D.Gamma(w.exp(), w.exp()), lambda w: D.Poisson(w.exp())])
def test_what_cannot_be_drawn_exactly_is_refused(build: Callable[[Tensor], Any], num_models: int) -> None:
    with pytest.raises(hfta.errors.RandomnessError, match="draws from"):
        two_steps(scored(build), torch.ones(num_models, SIZE), [*range(num_models)], "array")


def test_distributions_check_their_arguments_outside_of_arrays() -> None:
    hfta.rules.install()
    inside, outside = threading.Event(), threading.Event()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        D.Normal(0.0, -1.0)
        D.Normal(0.0, 1.0).log_prob(torch.tensor(float("nan")))
        inside.set()
        assert outside.wait(30)
        return model.weight.sum()

    step = hfta.make_train_step(Weights(), loss, hfta.sgd(lr=0.1), verify=False)
    state = step.init({"weight": torch.ones(M, SIZE)}, {}, seeds=range(M))
    thread = threading.Thread(target=step, args=(state, None))
    thread.start()
    assert inside.wait(30)
    try:
        for kind in ({}, {"validate_args": True}):
            with pytest.raises(ValueError, match="Expected parameter scale"):
                D.Normal(0.0, -1.0, **kind)
        with pytest.raises(ValueError, match="Expected value argument"):
            D.Normal(0.0, 1.0).log_prob(torch.tensor(float("nan")))
    finally:
        outside.set()
        thread.join()
    own = D.Distribution.__init__
    hfta.rules.uninstall()
    assert D.Distribution.__init__ is not own and D.Distribution.__init__.__module__.startswith("torch.")
    hfta.rules.install()


WEIGHTS = torch.tensor([0.0, 3.0, 1.0, 0.5, 0.0, 5.5], dtype=torch.float64)


def draws(call: Callable[[Tensor], Tensor], seeds: tuple[int, ...] = (5, 6)) -> Tensor:
    def draw(key: Tensor, weights: Tensor) -> Tensor:
        with routed(key):
            return call(weights)

    return hfta.vmap(draw)(random.keys(seeds), WEIGHTS.expand(len(seeds), -1))


COUNT = 1 << 14
CLASSES = {
    "with replacement": lambda w: torch.multinomial(w, COUNT, True),
    "rows": lambda w: torch.multinomial(w.expand(COUNT, -1), 1)[:, 0],
    "first without replacement": lambda w: torch.multinomial(w.expand(COUNT, -1), 2)[:, 0],
    "Categorical": lambda w: D.Categorical(w).sample((COUNT,)),
    "Categorical of logits": lambda w: D.Categorical(logits=w.log()).sample((COUNT,)),
    "gumbel_softmax": lambda w: F.gumbel_softmax(w.log().clamp(min=-1e9).expand(COUNT, -1), hard=True).argmax(-1),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_drawn_in_proportion(name: str) -> None:
    possible = WEIGHTS > 0
    for member in draws(CLASSES[name]):
        counts = torch.bincount(member, minlength=len(WEIGHTS))
        assert counts[~possible].sum() == 0
        expected = WEIGHTS[possible] / WEIGHTS.sum() * COUNT
        assert stats.chisquare(counts[possible].double(), expected).pvalue > 1e-3


def test_pairs_without_replacement_are_drawn_in_proportion() -> None:
    possible, total = WEIGHTS.nonzero().flatten().tolist(), WEIGHTS.sum().item()
    pairs = [(a, b) for a in possible for b in possible if a != b]
    weight = WEIGHTS.tolist()
    expected = [COUNT * weight[a] / total * weight[b] / (total - weight[a]) for a, b in pairs]
    for member in draws(lambda w: torch.multinomial(w.expand(COUNT, -1), 2)):
        found = [tuple(row) for row in member.tolist()]
        assert set(found) <= {*pairs}
        assert stats.chisquare([found.count(pair) for pair in pairs], expected).pvalue > 1e-3


def test_classes_never_change() -> None:
    keys, weights = random.keys([3, -5, 7]), torch.tensor([1.0, 2.0, 0.0, 4.0])
    drawn = random.categorical(keys, weights, (8,))
    for member in range(3):
        # The class is where a uniform draw falls.
        uniform = random.uniform(keys[member], (8,), dtype=torch.float64)
        edges = weights.double().cumsum(0) / weights.sum()
        assert torch.equal(torch.searchsorted(edges, uniform, right=True), drawn[member])
    torch._dynamo.reset()
    compiled = torch.compile(random.categorical, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(keys, weights, (8,)), drawn)
    own = random.categorical(keys, weights * torch.tensor([[1.0], [2.0], [0.5]]))
    assert torch.equal(own, random.categorical(keys, weights))


def test_classes_of_bad_weights_are_classes() -> None:
    for bad in ([0.0, 0.0], [float("nan")] * 2, [-1.0, -2.0], [math.inf, 1.0]):
        drawn = random.categorical(random.keys([1, 2]), torch.tensor(bad), (50,))
        assert ((drawn >= 0) & (drawn < 2)).all()


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_models", [1, M])
@pytest.mark.parametrize("options", [{}, {"weight": torch.tensor([0.5, 1.0, 2.0, 1.5])}, {"reduction": "sum"}])
def test_label_smoothing_of_each_member(options: dict[str, Any], num_models: int, place: str) -> None:
    rates = [0.0, 0.1, 0.3][:num_models]
    torch.manual_seed(0)
    inputs, targets = torch.randn(num_models, 8, 3), torch.randint(0, 4, (num_models, 8))
    targets[:, 0] = -100
    models = [nn.Linear(3, 4) for _ in range(num_models)]

    def loss(model: nn.Module, batch: Any, hparams: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=hparams["smoothing"], **options)

    hparams, compiled = {"smoothing": rates}, place == "compiled"
    step, state = start(models, loss, hfta.sgd(lr=0.1), hparams=hparams, compiled=compiled, **PLACES[place])
    state, metrics = step(state, (inputs, targets))
    for member, (model, rate) in enumerate(zip(models, rates, strict=True)):
        expected = F.cross_entropy(model(inputs[member]), targets[member], label_smoothing=rate, **options)
        torch.testing.assert_close(metrics["loss"][member], expected.detach())
        grad = torch.autograd.grad(expected, model.weight)[0]
        torch.testing.assert_close(state.params["weight"][member], model.weight.detach() - 0.1 * grad)
