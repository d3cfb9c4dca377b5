"""Members' values that a model writes into a tensor that it has just made, which alone is a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfta_func as hfta
from ways import WAYS, Calls, assert_as_alone, loss, seeded, start

pytestmark = pytest.mark.usefixtures("one_thread", "double")


def writing(write: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return Calls(nn.Linear(4, 4), write)


def zeros(linear, x):
    out = torch.zeros(5, 8)
    out[:, :4] = linear(x)
    return out


def views(linear, x):
    out = torch.ones(5, 2, 4)
    out[:, 0].mul_(linear(x))
    second = out.select(1, 1)
    second += linear(x).tanh()
    out[2].view(-1)[3:5] = linear(x)[0, :2]
    return out * out


def by_out(linear, x):
    out, other = torch.empty(5, 4), torch.zeros(5, 4)
    torch.add(linear(x).detach(), 1.0, out=out)
    torch.matmul(linear(x).detach(), torch.eye(4), out=other)
    return (out + other) * linear(x)


def whole_numbers(linear, x):
    counts = torch.zeros(4, dtype=torch.long)
    counts += (linear(x) > 0).sum(0)
    flags = torch.zeros(4, dtype=torch.bool)
    flags |= linear(x).sum(0) > 0
    order = torch.arange(4)
    order[:] = linear(x)[0].argsort()
    return linear(x) * counts * flags + linear(x)[:, order]


def complex_numbers(linear, x):
    out = torch.zeros(5, 3, dtype=torch.complex128)
    out[:, :2] = torch.fft.rfft(linear(x))[:, :2]
    return torch.fft.irfft(out, n=4) + torch.view_as_real(torch.zeros(5, 4, dtype=torch.complex128)).add_(
        linear(x)[..., None]
    ).sum(-1)


def in_a_function_of_torch(linear, x):
    out = torch.zeros(5, 4)
    nn.init.ones_(out)
    with torch.no_grad():
        out.addmm_(linear(x), torch.eye(4)).clamp_(max=linear(x).max())
        torch.relu_(out)
    return F.relu(out + linear(x), inplace=True)


def with_gradient(linear, x):
    out = torch.zeros(4, requires_grad=True)
    y = linear(x) * (out + 1)
    (slope,) = torch.autograd.grad(y.sum(), out, create_graph=True)
    total = torch.zeros(4)
    total += slope
    return total + y


def inner(linear, x):
    def one(row):
        out = torch.zeros(4)
        return out + row

    rows = torch.vmap(one)(linear(x))
    out = torch.zeros(5, 4)
    out += rows
    return out


def differentiated(linear, x):
    def energy(row):
        out = torch.zeros(4)
        out += linear(row)
        return out.square().sum()

    return torch.stack([torch.func.grad(energy)(row) for row in x])


@torch.library.custom_op("hfta_test_made::add_squares", mutates_args={"out"})
def add_squares(x: Tensor, out: Tensor) -> None:
    out.add_(x * x)


def by_operators(linear, x):
    y = linear(x)
    out, other = torch.zeros(5, 4), torch.ones(5, 4)
    add_squares(y.detach(), out)
    torch.ops.aten.add_.Tensor(out, y)
    torch.ops.aten.index_put_.default(other, [torch.tensor([0, 2])], y[:2])
    return out * other


def running_statistics(linear, x):
    mean, var = torch.zeros(4), torch.ones(4)
    y = F.batch_norm(linear(x), mean, var, training=True)
    layer = nn.BatchNorm1d(4, affine=False)
    z = layer(linear(x)) + F.instance_norm(y[..., None] * torch.arange(3), torch.zeros(4), torch.ones(4)).sum(-1)
    return y * mean + var + z * layer.running_var


def recomputed(linear, x):
    def part(x):
        out = torch.zeros(5, 4).add_(linear(x).detach())
        return F.batch_norm(linear(x), torch.zeros(4), torch.ones(4), training=True) * (out + linear(x)).sin()

    return checkpoint(part, x, use_reentrant=False)


CASES = [
    zeros, views, by_out, whole_numbers,
    complex_numbers, in_a_function_of_torch, with_gradient, inner, differentiated,
    by_operators, running_statistics, recomputed,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning", "ignore:index_reduce")
@pytest.mark.exhaustive(ids="compiled", unless="^zeros-each-3")
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_alone(case, shared, count, way):
    if case is with_gradient and way not in ("together", "one by one", "in pairs"):
        pytest.skip("needs a gradient inside the model")
    torch.manual_seed(7)
    batch = torch.randn(5, 4) if shared else torch.randn(3, 5, 4)
    assert_as_alone(lambda: writing(case), batch, way, count, shared)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # It keeps tensors for the backward pass behind the write, so that it is computed again as far as that.
        self.inner, self.outer = writing(lambda linear, x: zeros(linear, x).sin()), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


@pytest.mark.parametrize(
    "options", [{"checkpoint": True}, {"checkpoint": ["inner"], "chunk_size": 2}, {"save": "less"}]
)
def test_computed_again_for_the_backward_pass(options):
    assert_as_alone(Checkpointed, torch.randn(3, 5, 4), "together", **options)


def test_noise_goes_on_as_before():
    def noisy(linear, x):
        first = F.dropout(linear(x))
        out = torch.zeros(5, 4)
        out += first + torch.randn(5, 4)
        return out * torch.rand(4)

    def plain(linear, x):
        first = F.dropout(linear(x))
        return (first + torch.randn(5, 4)) * torch.rand(4)

    batch, losses = torch.randn(3, 5, 4), []
    for write in (noisy, plain):
        step, state = start(seeded(writing, range(3), [write] * 3), loss, hfta.sgd(lr=0.1), seeds=[4, 5, 6])
        losses.append(step(state, batch)[1]["loss"])
    assert torch.equal(*losses)


def into_unknown(linear, x):
    out = torch.Tensor(4)
    out.copy_(linear(x)[0])
    return out


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_made_otherwise(count):
    assert_as_alone(lambda: writing(into_unknown), torch.randn(3, 5, 4), "together", count)


def test_what_a_function_under_vmap_has_written_is_not_written_twice():
    def write(x, out):
        out += 1
        total = torch.zeros(2)
        total += x
        return total

    x, out = torch.randn(3, 2), torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="broadcast shape"):
        hfta.vmap(write)(x, out)
    assert torch.equal(out, torch.ones(3, 2))
