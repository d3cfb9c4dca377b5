"""Hooks of all modules, and parameters whose requires_grad a call sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from ways import assert_as_alone


class Model(nn.Module):
    """A layer and a function of it."""

    def __init__(self, use: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 4).double(), nn.Linear(4, 4).double().requires_grad_(False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "evaluated", "mapped"])
def test_hooks_of_all_modules_are_called_for_those_of_the_model(way: str, count: int) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 1.5 * output)
    try:
        assert_as_alone(lambda: Model(lambda m, x: m.layer(x)), torch.randn(3, 5, 4).double(), way, count)
    finally:
        handle.remove()


def _frozen(m: Model, x: Tensor) -> Tensor:
    m.layer.weight.requires_grad_(False)
    return m.layer(x)


def _frozen_for_a_while(m: Model, x: Tensor) -> Tensor:
    m.layer.requires_grad_(False)
    y = m.layer(x)
    m.layer.requires_grad_(True)
    return y + m.layer(x)


def _frozen_by_the_list(m: Model, x: Tensor) -> Tensor:
    held = list(m.layer.parameters())
    for param in held:
        param.requires_grad = False
    y = m.layer(x)
    assert not any(param.requires_grad for param in m.layer.parameters())
    for param in held:
        param.requires_grad = True
    return y + m.layer(x).square()


def _unchanged(m: Model, x: Tensor) -> Tensor:
    m.layer.requires_grad_(True)
    m.extra.requires_grad_(False)
    return m.layer(x) + m.extra(x)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "in pairs", "evaluated"])
@pytest.mark.parametrize("use", [_frozen_for_a_while, _frozen_by_the_list])
def test_a_call_freezes_parameters_for_a_while(use: Any, way: str, count: int) -> None:
    assert_as_alone(lambda: Model(use), torch.randn(3, 5, 4).double(), way, count)


def test_what_a_call_freezes_gets_no_gradient() -> None:
    models = [Model(_frozen) for _ in range(3)]
    step = hfta.make_train_step(models[0], lambda m, x: m(x).square().mean(), hfta.sgd(lr=0.1))
    state, _ = step(step.init(*hfta.stack_params(models), seeds=range(3)), torch.randn(3, 5, 4).double())
    is_changed = {path: not torch.equal(x[0], models[0].get_parameter(path)) for path, x in state.params.items()}
    assert is_changed == {"layer.weight": False, "layer.bias": True, "extra.weight": False, "extra.bias": False}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "evaluated", "ensemble"])
def test_where_it_changes_nothing_it_may(way: str, count: int) -> None:
    assert_as_alone(lambda: Model(_unchanged), torch.randn(3, 5, 4).double(), way, count)


def test_a_loss_of_a_joint_step_may_freeze_the_other_network() -> None:
    def loss_g(model: Any, x: Tensor) -> Tensor:
        model.d.requires_grad_(False)
        return -model.d(model.g(x)).mean()

    def loss_d(model: Any, x: Tensor) -> Tensor:
        model.d.requires_grad_(True)
        return (model.d(model.g(x).detach()) - model.d(x)).square().mean()

    models = [nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)}).double() for _ in range(3)]
    losses: dict[str, Any] = {"g": loss_g, "d": loss_d}
    steps: dict[str, Any] = {
        name: hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1)) for name, loss in losses.items()
    }
    step, batch = hfta.joint(**steps), torch.randn(3, 5, 4).double()
    state = step.init(*hfta.stack_params(models), seeds=range(3))
    for _ in range(2):
        state, _ = step(state, batch)
    for member, model in enumerate(models):
        optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in losses}
        for _ in range(2):
            for name, loss in losses.items():
                value = loss(model, batch[member])
                optimizers[name].zero_grad()
                value.backward()
                optimizers[name].step()
        for path, param in model.named_parameters():
            torch.testing.assert_close(state.params[path][member], param.detach(), rtol=1e-10, atol=1e-12)
