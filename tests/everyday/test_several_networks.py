"""Scripts with several networks, one optimizer after another, as an array beside their loop: parameters and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import seeded

pytestmark = pytest.mark.usefixtures("one_thread")
LR = [0.05, 0.02, 0.01]
LATENT = 3
counts = pytest.mark.parametrize("count", [1, 3])


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs))


def make_models(make: Any, count: int) -> list[Any]:
    return seeded(lambda: nn.ModuleDict(make()).double(), range(count))


def make_rows(count: int, rows: int, columns: int, batches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [*torch.randn(batches, count, rows, columns, generator=generator, dtype=torch.float64)]


def train(models: Any, batches: Any, losses: dict[str, Any], optimizers: Any, **how: Any) -> Any:
    """The members after an epoch of ``fit``."""
    steps = {name: hfta.make_train_step(models[0], losses[name], optimizers[name]) for name in losses}
    step = hfta.joint(**steps, **how)
    state = step.init(*hfta.stack_params(models), seeds=range(len(models)))
    state, _ = hfta.fit(step, state, batches, epochs=1, progress=False)
    return hfta.unstack_params(models[0], state.params, state.buffers)


def assert_same(members: Any, loops: Any) -> None:
    for member, alone in zip(members, loops, strict=True):
        assert_trees_close(dict(member.state_dict()), dict(alone.state_dict()), 1e-7)


def assert_as_scripts(make: Any, count: int, batches: Any, losses: dict[str, Any], ours: Any, theirs: Any) -> None:
    """Members whose networks step one after another, each by its loss, are models that do so alone."""
    loops = make_models(make, count)
    for i, model in enumerate(loops):
        optimizers = {name: theirs(model[name].parameters(), lr=LR[i]) for name in losses}
        for batch in batches:
            for name, loss in losses.items():
                model.zero_grad()
                loss(model, batch[i]).backward()
                optimizers[name].step()
    optimizers = dict.fromkeys(losses, ours(lr=LR[:count]))
    assert_same(train(make_models(make, count), batches, losses, optimizers), loops)


def make_gan() -> dict[str, nn.Module]:
    return {"d": net(2, 1), "g": net(LATENT, 2)}


def loss_d(model: Any, batch: Tensor) -> Tensor:
    real, latent = batch.split([2, LATENT], 1)
    return F.softplus(-model.d(real)).mean() + F.softplus(model.d(model.g(latent).detach())).mean()


def loss_g(model: Any, batch: Tensor) -> Tensor:
    return F.softplus(-model.d(model.g(batch[:, 2:]))).mean()


@counts
def test_a_gan_makes_its_samples_once(count):
    batches, loops = make_rows(count, 8, 2 + LATENT), make_models(make_gan, count)
    for i, model in enumerate(loops):
        of_d = torch.optim.Adam(model.d.parameters(), lr=LR[i], betas=(0.5, 0.9))
        of_g = torch.optim.Adam(model.g.parameters(), lr=LR[i], betas=(0.5, 0.9))
        for batch in batches:
            real, latent = batch[i].split([2, LATENT], 1)
            model.zero_grad()
            F.softplus(-model.d(real)).mean().backward()
            fake = model.g(latent)
            F.softplus(model.d(fake.detach())).mean().backward()
            of_d.step()
            model.zero_grad()
            F.softplus(-model.d(fake)).mean().backward()
            of_g.step()
    adam = hfta.adam(lr=LR[:count], betas=(0.5, 0.9))
    losses = {"d": loss_d, "g": loss_g}
    members = train(make_models(make_gan, count), batches, losses, {"d": adam, "g": adam}, once=True)
    assert_same(members, loops)
    anew = train(make_models(make_gan, count), batches, losses, {"d": adam, "g": adam})
    assert not torch.allclose(anew[0].g[1].running_mean, loops[0].g[1].running_mean)


def test_losses_that_make_samples_once_draw_the_same_noise():
    def drawing(loss: Any) -> Any:
        def noisy(model: Any, batch: Tensor) -> Any:
            latent = torch.randn(len(batch), LATENT, dtype=torch.float64)
            return loss(model, torch.cat([batch[:, :2], latent], 1)), {"latent": latent}

        return noisy

    models = make_models(make_gan, 3)
    steps = [hfta.make_train_step(models[0], drawing(loss), hfta.adam(lr=LR)) for loss in (loss_d, loss_g)]
    drawn = {}
    for once in (True, False):
        step = hfta.joint(d=steps[0], g=steps[1], once=once)
        state = step.init(*hfta.stack_params(models), seeds=[0, 1, 2])
        for number, batch in enumerate(make_rows(3, 8, 2)):
            state, metrics = step(state, batch)
            drawn[once, number] = metrics["d.latent"], metrics["g.latent"]
            assert torch.equal(*drawn[once, number]) is once
    assert not torch.equal(drawn[True, 0][0], drawn[True, 1][0])


@pytest.mark.parametrize("how", ["donated", "compiled"])
def test_samples_made_once_are_the_same_in_every_mode(how):
    models, batches = make_models(make_gan, 3), make_rows(3, 8, 2 + LATENT)

    def make(**options: Any) -> Any:
        steps = [hfta.make_train_step(models[0], loss, hfta.adam(lr=LR), **options) for loss in (loss_d, loss_g)]
        return hfta.joint(d=steps[0], g=steps[1], once=True)

    plain, other = make(), make(donate=how == "donated")
    call: Any = torch.compile(other, backend="eager", fullgraph=True) if how == "compiled" else other
    states = [step.init(*hfta.stack_params(models), seeds=[0, 1, 2]) for step in (plain, other)]
    for batch in batches:
        states = [step(state, batch)[0] for step, state in zip((plain, call), states, strict=True)]
    assert_trees_close(states[1].params, states[0].params, 1e-7)
    assert_trees_close(states[1].buffers, states[0].buffers, 1e-7)


@counts
def test_forward_forward_trains_each_layer_on_what_those_below_return(count):
    names = ["first", "second", "third"]

    def goodness(layer: nn.Module, x: Tensor) -> Tensor:
        good, bad = (layer(part).square().mean(1) for part in x.chunk(2))
        return F.softplus(torch.cat([1 - good, bad - 1])).mean()

    def loss_of(name: str) -> Any:
        def loss(model: Any, x: Tensor) -> Tensor:
            for below in names[: names.index(name)]:
                x = model[below](x)
            return goodness(model[name], x.detach())

        return loss

    def make() -> dict[str, nn.Module]:
        return {name: nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()) for name in names}

    losses = {name: loss_of(name) for name in names}
    assert_as_scripts(make, count, make_rows(count, 8, 4), losses, hfta.adam, torch.optim.Adam)


@counts
def test_an_encoder_that_two_losses_call_moves_once(count):
    def loss_of(head: str) -> Any:
        return lambda model, x: model[head](model.encoder(x)).square().mean()

    def make() -> dict[str, nn.Module]:
        return {"encoder": net(4, 3), "one": net(3, 1), "other": net(3, 2)}

    batches, loops = make_rows(count, 8, 4), make_models(make, count)
    for i, model in enumerate(loops):
        optimizers = [torch.optim.SGD(model[name].parameters(), lr=LR[i]) for name in ("one", "other")]
        for batch in batches:
            features = model.encoder(batch[i]).detach()
            for name, optimizer in zip(("one", "other"), optimizers, strict=True):
                optimizer.zero_grad()
                model[name](features).square().mean().backward()
                optimizer.step()
    sgd, losses = hfta.sgd(lr=LR[:count]), {name: loss_of(name) for name in ("one", "other")}
    assert_same(train(make_models(make, count), batches, losses, {"one": sgd, "other": sgd}, once=True), loops)


class Warmed(nn.Module):
    """Its outputs grow with the number of its calls."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = net(3, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) * self.calls / 20


@counts
def test_a_counter_of_a_network_that_two_losses_call(count):
    def make():
        return {"d": Warmed(), "g": net(3, 3)}

    losses = {
        "d": lambda model, batch: model["d"](model["g"](batch)).square().mean(),
        "g": lambda model, batch: (1 - model["d"](model["g"](batch))).square().mean(),
    }
    assert_as_scripts(make, count, make_rows(count, 5, 3), losses, hfta.sgd, torch.optim.SGD)
