"""Losses that ask autograd for gradients of their own, such as gradient penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hfta_func as hfta
from ways import assert_as_alone, seeded, start

LRS = [0.1, 0.05, 0.02]

Batch = tuple[Tensor, Tensor]


def critic() -> nn.Module:
    convolutions = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3, padding=1), nn.LeakyReLU(0.2))
    return nn.Sequential(convolutions, nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1))


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """That of WGAN-GP."""
    real, fake = batch
    mixed = (0.25 * real + 0.75 * fake).requires_grad_()
    scores = model(mixed)
    (grads,) = torch.autograd.grad(
        outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return model(fake).mean() - model(real).mean() + 10 * (grads.norm(dim=1) - 1).square().mean()


def input_in_place(model: nn.Module, batch: Batch) -> Tensor:
    """R1, of the batch itself."""
    batch[0].requires_grad = True
    assert batch[0].requires_grad and not batch[1].requires_grad
    scores = model(batch[0])
    grads = torch.autograd.grad(scores.sum(), {"x": batch[0]}, create_graph=True)["x"]
    return F.softplus(-scores).mean() + grads.square().sum(1).mean()


def by_parameters(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(batch[0]).square().mean()
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + 0.1 * sum((grad.square().sum() for grad in grads), torch.zeros(()))


def unused(model: nn.Module, batch: Batch) -> Tensor:
    """Several outputs, some of one entry, starts that members share or not, and an input that no output depends on."""
    first, second = batch[0].clone().requires_grad_(), batch[1].clone().requires_grad_()
    outputs = [model(first), model(first).mean(), model(first).square().mean(0)]
    starts = [torch.linspace(0, 1, 5, dtype=torch.float64)[:, None], None, None]
    grad, none = torch.autograd.grad(outputs, [first, second], starts, create_graph=True, allow_unused=True)
    assert none is None
    return grad.square().sum() + outputs[1]


def casts_to_its_own_dtype(model: nn.Module, batch: Batch) -> Tensor:
    """An assignment that changes nothing, as losses of pytorch-metric-learning make it in each call."""
    weight = model[-1].weight
    weight.data = weight.data.to(batch[0].dtype)
    return model(batch[0]).square().mean()


def many_at_once(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of several starts in one call, by autograd itself and by its Jacobians."""
    x, other = batch[0].clone().requires_grad_(), batch[1].clone().requires_grad_()
    starts = torch.stack([torch.ones(5, 1, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]])
    grads, none = torch.autograd.grad(
        model(x), [x, other], starts, create_graph=True, allow_unused=True, is_grads_batched=True
    )
    assert none is None and grads.shape == (2, 5, 4)
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x, create_graph=True, vectorize=True)
    return grads.square().sum() + jacobian.square().mean()


LOSSES = [gradient_penalty, input_in_place, by_parameters, unused, many_at_once]


def members(count: int) -> list[nn.Module]:
    return seeded(lambda: critic().double(), range(count))


@pytest.mark.filterwarnings("ignore:members run one after another.*is_grads_batched:hfta_func.errors.LoopWarning")
@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("count", "way"), [(1, "together"), (3, "together"), (3, "one by one"), (3, "in pairs")])
@pytest.mark.parametrize("loss", [*LOSSES, casts_to_its_own_dtype])
@pytest.mark.parametrize("shared", [False, True])
def test_the_array_equals_the_loop(loss: Any, count: int, way: str, shared: bool) -> None:
    axes = (5, 4) if shared else (count, 5, 4)
    batch = torch.randn(axes).double(), torch.randn(axes).double()
    assert_as_alone(lambda: critic().double(), batch, way, count, shared, loss_fn=loss)


class Score(nn.Module):
    """Takes a gradient also where its caller takes none, as densities of flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = self.energy(x)
        (score,) = torch.autograd.grad(energy, x, torch.ones_like(energy), create_graph=create_graph)
        return score


@pytest.mark.parametrize("way", ["together", "evaluated", "ensemble"])
def test_models_that_take_gradients_also_under_no_grad(way: str) -> None:
    assert_as_alone(Score, torch.randn(3, 5, 4).double(), way)


class Counter(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("made", [False, True])
def test_by_points_that_members_share_all_are_differentiated_at_once(made: bool) -> None:
    def slope(model: nn.Module, points: Tensor) -> Tensor:
        x = torch.linspace(0, 1, 8).reshape(2, 4) if made else points
        x.requires_grad_()
        (grads,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grads - points).square().mean()

    operators = []
    for count in (2, 5):
        step = hfta.make_train_step(critic(), slope, hfta.sgd(lr=0.1), batch_dims=None, verify="first")
        state = step.init(*hfta.init_params(critic, range(count)), seeds=range(count))
        state, _ = step(state, torch.randn(2, 4))
        with Counter() as counter:
            step(state, torch.randn(2, 4))
        operators.append(counter.calls)
    assert operators[0] == operators[1]


def test_noise_mixes_what_each_member_is_differentiated_by() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        real, fake = batch
        share = torch.rand(5, 1, dtype=torch.float64)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (grads,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return grads.square().mean()

    batch, results = (torch.randn(5, 4).double(), torch.randn(5, 4).double()), []
    for chunk_size in (None, 1):
        step, state = start(members(3), loss, hfta.sgd(lr=LRS), batch_dims=None, chunk_size=chunk_size)
        state, metrics = step(state, batch)
        results.append((state.params, metrics["loss"]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_arrays_of_arrays() -> None:
    def func(weight: Tensor, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(torch.tanh(x @ weight).sum(), x, create_graph=True)[0]

    weights, xs = torch.randn(3, 2, 4).double().requires_grad_(), torch.randn(2, 5, 4).double()
    array = hfta.vmap(hfta.vmap(func), in_dims=(0, None))(weights, xs)
    expected = torch.stack([torch.stack([func(own, x) for own, x in zip(row, xs, strict=True)]) for row in weights])
    torch.testing.assert_close(array, expected, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(x.square().sum(), weights) for x in (array, expected))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("loss", [gradient_penalty, by_parameters])
def test_compiled_it_is_refused_with_a_cure(loss: Any, count: int) -> None:
    step, state = start(members(count), loss, hfta.sgd(lr=0.1))
    batch = torch.randn(count, 5, 4).double(), torch.randn(count, 5, 4).double()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"in {loss.__name__} \(.*asks autograd .* torch\.func\.grad\(func\)\(input\)"):
        torch.compile(step, fullgraph=True, backend="eager")(state, batch)
