"""Hooks of all modules, and parameters whose requires_grad a call sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from ways import Calls, assert_as_alone, loss, start, train_solo


def model_with(use: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A layer, a frozen one, and a function of them."""
    layers = {"layer": nn.Linear(4, 4), "extra": nn.Linear(4, 4).requires_grad_(False)}
    return Calls(nn.ModuleDict(layers), use).double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "evaluated", "mapped"])
def test_hooks_of_all_modules_are_called_for_those_of_the_model(way: str, count: int) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 1.5 * output)
    try:
        assert_as_alone(lambda: model_with(lambda m, x: m.layer(x)), torch.randn(3, 5, 4).double(), way, count)
    finally:
        handle.remove()


def _frozen(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.requires_grad_(False)
    return m.layer(x)


def _frozen_for_a_while(m: Any, x: Tensor) -> Tensor:
    m.layer.requires_grad_(False)
    y = m.layer(x)
    m.layer.requires_grad_(True)
    return y + m.layer(x)


def _frozen_by_the_list(m: Any, x: Tensor) -> Tensor:
    held = list(m.layer.parameters())
    for param in held:
        param.requires_grad = False
    y = m.layer(x)
    assert not any(param.requires_grad for param in m.layer.parameters())
    for param in held:
        param.requires_grad = True
    return y + m.layer(x).square()


def _unchanged(m: Any, x: Tensor) -> Tensor:
    m.layer.requires_grad_(True)
    m.extra.requires_grad_(False)
    return m.layer(x) + m.extra(x)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "in pairs", "evaluated"])
@pytest.mark.parametrize("use", [_frozen_for_a_while, _frozen_by_the_list])
def test_a_call_freezes_parameters_for_a_while(use: Any, way: str, count: int) -> None:
    assert_as_alone(lambda: model_with(use), torch.randn(3, 5, 4).double(), way, count)


def test_what_a_call_freezes_gets_no_gradient() -> None:
    models = [model_with(_frozen) for _ in range(3)]
    step, state = start(models, loss, hfta.sgd(lr=0.1))
    state, _ = step(state, torch.randn(3, 5, 4).double())
    changed = [path for path, x in state.params.items() if not torch.equal(x[0], models[0].get_parameter(path))]
    assert len(state.params) == 4 and changed == ["module.layer.bias"]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "evaluated", "ensemble"])
def test_where_it_changes_nothing_it_may(way: str, count: int) -> None:
    assert_as_alone(lambda: model_with(_unchanged), torch.randn(3, 5, 4).double(), way, count)


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
            for name, own in losses.items():
                train_solo(model, own, optimizers[name], [batch[member]])
        for path, param in model.named_parameters():
            torch.testing.assert_close(state.params[path][member], param.detach(), rtol=1e-10, atol=1e-12)
