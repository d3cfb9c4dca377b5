"""Pruned models, and models with hooks, as an array beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfta_func as hfta
from ways import assert_as_alone


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


def make(change: Callable[[Any, int], None]) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    change(model, torch.initial_seed())
    return model


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "ensemble"])
@pytest.mark.parametrize("pruning", PRUNINGS, ids=lambda pruning: pruning.__name__)
def test_each_member_has_its_own_mask(pruning, way, count):
    assert_as_alone(lambda: make(pruning), torch.randn(3, 16, 6).double(), way, count)


class Scale:
    """A hook that holds a number, and notes what it has met."""

    def __init__(self, factor: float):
        self.factor, self.seen = factor, []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.seen.append(len(output))
        return output * self.factor


def test_hooks_that_hold_one_number():
    def scaled(model: Any, member: int) -> None:
        hook = Scale(0.5)
        hook.seen += [member] * member
        model[0].register_forward_hook(hook)

    assert_as_alone(lambda: make(scaled), torch.randn(3, 16, 6).double(), "together")


def by_object(model: Any, member: int) -> None:
    model[0].register_forward_hook(Scale(0.5 + member))


def by_closure(model: Any, member: int) -> None:
    model[0].register_forward_hook(lambda module, args, output: output * (0.5 + member))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (by_object, r"'0\._forward_hooks\[0\]\['factor'\]' is 1.5 but in model 0 it is 0.5"),
        (by_closure, r"'0\._forward_hooks\[0\]\.member' is 1 but in model 0 it is 0"),
    ],
)
def test_hooks_that_differ_are_named(change, message):
    with pytest.raises(hfta.errors.StackError, match=rf"model 1: {message}"):
        hfta.init_params(lambda: make(change), range(3))
