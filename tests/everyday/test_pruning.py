"""Pruned models, and models with hooks, as an array beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfta_func as hfta
from comparisons import assert_trees_close

LR = [0.1, 0.05, 0.2]


def l1(model: Any, member: int) -> None:
    prune.l1_unstructured(model[0], "weight", amount=[0.2, 0.5, 7][member])


def random_and_bias(model: Any, member: int) -> None:
    prune.random_unstructured(model[0], "weight", amount=0.1 + 0.2 * member)
    prune.random_unstructured(model[2], "bias", amount=1)


def structured(model: Any, member: int) -> None:
    prune.ln_structured(model[0], "weight", amount=1 + member, n=1 + member, dim=member % 2)


def everywhere(model: Any, member: int) -> None:
    layers = [(model[0], "weight"), (model[2], "weight")]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.2 + 0.2 * member)


def masked(model: Any, member: int) -> None:
    prune.custom_from_mask(model[0], "weight", mask=torch.rand(8, 6) > 0.3)


PRUNINGS = [l1, random_and_bias, structured, everywhere, masked]


def make(change: Callable[[Any, int], None], count: int) -> list[nn.Module]:
    models = []
    for member in range(count):
        torch.manual_seed(member)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double())
        change(models[-1], member)
    return models


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batch_of(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(count, 16, 6).double(), torch.randn(count, 16, 2).double()


def array(models: list[nn.Module], batch: Any) -> list[nn.Module]:
    step = hfta.make_train_step(models[0], loss_fn, hfta.sgd(lr=LR[: len(models)], momentum=0.9))
    state = step.init(*hfta.stack_params(models), seeds=range(len(models)))
    for _ in range(3):
        state, _ = step(state, batch)
    return hfta.unstack_params(models[0], state.params, state.buffers)


def loop(models: list[nn.Module], batch: Any) -> list[nn.Module]:
    for i, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR[i], momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model, (batch[0][i], batch[1][i])).backward()
            optimizer.step()
    return models


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pruning", PRUNINGS, ids=lambda pruning: pruning.__name__)
def test_each_member_has_its_own_mask(pruning, count):
    batch = batch_of(count)
    found, expected = array(make(pruning, count), batch), loop(make(pruning, count), batch)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_trees_close({**one.state_dict()}, {**other.state_dict()}, 1e-10, f"model {i}")
        torch.testing.assert_close(one(batch[0][i]), other(batch[0][i]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pruning", PRUNINGS, ids=lambda pruning: pruning.__name__)
def test_pruned_members_as_an_ensemble(pruning):
    models, x = make(pruning, 3), batch_of(1)[0][0]
    ensemble = hfta.Ensemble.from_modules(models)
    torch.testing.assert_close(ensemble(x), torch.stack([model(x) for model in models]), rtol=1e-10, atol=1e-10)


class Scale:
    """A hook that holds a number, and notes what it has met."""

    def __init__(self, factor: float):
        self.factor, self.seen = factor, []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.seen.append(len(output))
        return output * self.factor


def test_hooks_that_hold_one_number():
    batch = batch_of(3)

    def scaled(model: Any, member: int) -> None:
        hook = Scale(0.5)
        hook.seen += [member] * member
        model[0].register_forward_hook(hook)

    found, expected = array(make(scaled, 3), batch), loop(make(scaled, 3), batch)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_trees_close({**one.state_dict()}, {**other.state_dict()}, 1e-10, f"model {i}")


def by_object(model: Any, member: int) -> None:
    model[0].register_forward_hook(Scale(0.5 + member))


def by_closure(model: Any, member: int) -> None:
    model[0].register_forward_hook(lambda module, args, output: output * (0.5 + member))


def by_one_model_alone(model: Any, member: int) -> None:
    if member:
        model[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (by_object, r"'0\._forward_hooks\[0\]\['factor'\]' is 1.5 but in model 0 it is 0.5"),
        (by_closure, r"'0\._forward_hooks\[0\]\.member' is 1 but in model 0 it is 0"),
        (by_one_model_alone, r"'0\._forward_hooks' is 1 but in model 0 it is 0"),
    ],
)
def test_hooks_that_differ_are_named(change, message):
    with pytest.raises(hfta.errors.StackError, match=rf"model 1: {message}"):
        hfta.stack_params(make(change, 3))
