"""What tensors of a model say about their history, and what only one model alone can do with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hfta_func as hfta
from ways import WAYS, assert_as_alone, loss


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.first(x), x))

    def use(self, y: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class History(Layers):
    """Every answer is another factor."""

    def use(self, y, x):
        with torch.no_grad():
            constant = self.first(x)
        weight = 1
        for bit, tensor in enumerate((y, x, y.detach(), constant)):
            weight += 4**bit * tensor.requires_grad + 2 * 4**bit * tensor.is_leaf
        return y * weight


class Data(Layers):
    def use(self, y, x):
        return y * y.data.abs() + self.last.weight.data.sum()


class SameDtype(Layers):
    def use(self, y, x):
        self.last.to(x.dtype)
        return y


class Derivatives(Layers):
    def use(self, y, x):
        functional = torch.autograd.functional
        inner: Callable[..., Tensor] = lambda v: self.first(v).tanh()  # noqa: E731
        ones = torch.ones_like(x)
        _, jvp = functional.jvp(inner, x, ones, create_graph=True)
        _, vjp = functional.vjp(inner, x, ones, create_graph=True)
        _, hvp = functional.hvp(lambda v: inner(v).sum(), x, ones, create_graph=True)
        return y + jvp + vjp + hvp + functional.jacobian(inner, x[0], create_graph=True).sum()


KINDS = [History, Data, SameDtype, Derivatives]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_model(kind: type[Layers], way: str, count: int) -> None:
    assert_as_alone(lambda: kind().double(), torch.randn(3, 5, 4).double(), way, count)


class Reversed(Layers):
    """Reverses gradients by a hook, which may change each member's alone."""

    def use(self, y, x):
        y.register_hook(lambda grad: -0.5 * grad / grad.norm())
        y.register_hook(lambda grad: None)
        return y


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "in pairs"])
def test_hooks_on_gradients(way: str, count: int) -> None:
    assert_as_alone(lambda: Reversed().double(), torch.randn(3, 5, 4).double(), way, count)


@pytest.mark.parametrize("count", [1, 3])
def test_a_counter_of_operations_around_an_evaluation_counts_those_of_the_loop(count):
    models, x = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) for _ in range(count)], torch.randn(5, 4)

    def counted(model, x):
        with FlopCounterMode(display=False) as counter:
            model(x)
        return torch.tensor(float(counter.get_total_flops()))

    stacked, evaluate = hfta.stack_params(models), hfta.make_eval_step(models[0], loss)
    evaluate(stacked, x)
    with FlopCounterMode(display=False) as counter:
        evaluate(stacked, x)
    # Two for each product of a layer.
    assert counter.get_total_flops() == count * 480
    inside = hfta.make_eval_step(models[0], counted, verify=False)
    assert inside(stacked, x)["counted"].tolist() == [count * 480.0] * count
