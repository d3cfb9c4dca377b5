"""Functions of PyTorch that a user has replaced, hooks of all modules, and parameters whose requires_grad a call sets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func._torch import replaced
from ways import WAYS, assert_as_alone

# An ensemble is a module itself, so hooks of all modules see its calls, too.
EAGER = [way for way in WAYS if way not in ("compiled", "ensemble")]


class Model(nn.Module):
    """A layer and a function of it."""

    def __init__(self, use: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 4).double(), nn.Linear(4, 4).double().requires_grad_(False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Twice:
    """A function whose results are doubled."""

    def __init__(self, func: Callable[..., Tensor]) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * self.func(*args, **kwargs)


def twice(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 2 * func(*args, **kwargs)


def mocked(func: Callable[..., Tensor]) -> Any:
    return mock.MagicMock(side_effect=twice(func))


REPLACED: dict[str, tuple[Any, str, Callable[..., Any], Callable[[Model, Tensor], Tensor]]] = {
    "method in C": (Tensor, "square", twice, lambda m, x: m.layer(x).square()),
    "method in Python": (Tensor, "norm", twice, lambda m, x: m.layer(x).norm(dim=-1)),
    "function": (F, "relu", twice, lambda m, x: F.relu(m.layer(x))),
    "function twice": (F, "relu", lambda func: twice(twice(func)), lambda m, x: F.relu(m.layer(x))),
    "object": (F, "relu", Twice, lambda m, x: F.relu(m.layer(x))),
    "partial": (F, "relu", lambda func: functools.partial(twice(func)), lambda m, x: F.relu(m.layer(x))),
    "mock": (F, "relu", mocked, lambda m, x: F.relu(m.layer(x))),
    "function with a rewrite": (F, "cross_entropy", twice, lambda m, x: F.cross_entropy(m.layer(x), x.softmax(1))),
    "function that draws": (F, "dropout", twice, lambda m, x: F.dropout(m.layer(x), 0.0)),
    "function in C": (torch, "tanh", twice, lambda m, x: torch.tanh(m.layer(x))),
    "call of modules": (nn.Module, "__call__", twice, lambda m, x: m.layer(x)),
}


@contextlib.contextmanager
def put(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """A block in which a function of PyTorch is wrapped."""
    is_inherited = isinstance(owner, type) and name not in vars(owner)
    with replaced(owner, name, wrap(getattr(owner, name))):
        yield
    if is_inherited:
        delattr(owner, name)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize("name", REPLACED)
def test_what_replaces_a_function_acts_once(name: str, way: str, count: int) -> None:
    owner, attribute, wrap, use = REPLACED[name]
    with put(owner, attribute, wrap):
        assert_as_alone(lambda: Model(use), torch.randn(3, 5, 4).double(), way, count)


def test_it_may_be_replaced_within_a_call_and_is_replayed() -> None:
    def use(m: Model, x: Tensor) -> Tensor:
        with put(Tensor, "square", twice):
            return m.layer(x).square()

    models, batch = [Model(use) for _ in range(3)], torch.randn(3, 5, 4).double()
    step = hfta.make_train_step(models[0], lambda m, x: m(x).mean(), hfta.sgd(lr=0.1)).replayed()
    state = step.init(*hfta.stack_params(models), seeds=range(3))
    expected = [2 * model.layer(x).square().mean() for model, x in zip(models, batch, strict=True)]
    torch.testing.assert_close(step(state, batch)[1]["loss"], torch.stack(expected).detach())


@pytest.mark.parametrize("name", ["function", "call of modules"])
def test_a_compiler_refuses_it(name: str) -> None:
    owner, attribute, wrap, use = REPLACED[name]
    with put(owner, attribute, wrap), pytest.raises(Exception, match=r"has been replaced.* leave the step uncompiled"):
        assert_as_alone(lambda: Model(use), torch.randn(3, 5, 4).double(), "compiled")


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


def _frozen_by_name(m: Model, x: Tensor) -> Tensor:
    m.layer.weight.requires_grad = False
    return m.layer(x)


def _frozen_for_a_while(m: Model, x: Tensor) -> Tensor:
    m.layer.requires_grad_(False)
    y = m.layer(x)
    m.layer.requires_grad_(True)
    return y + m.layer(x)


def _thawed(m: Model, x: Tensor) -> Tensor:
    m.extra.requires_grad_(True)
    return m.layer(x) + m.extra(x)


def _unchanged(m: Model, x: Tensor) -> Tensor:
    m.layer.requires_grad_(True)
    m.extra.requires_grad_(False)
    return m.layer(x) + m.extra(x)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "in pairs", "compiled", "evaluated"])
@pytest.mark.parametrize("use", [_frozen, _frozen_by_name, _frozen_for_a_while, _thawed])
def test_a_call_sets_no_requires_grad_of_parameters(use: Any, way: str, count: int) -> None:
    with pytest.raises(Exception, match=r"sets requires_grad of a parameter in a call.* weight\.detach\(\)"):
        assert_as_alone(lambda: Model(use), torch.randn(3, 5, 4).double(), way, count)


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
