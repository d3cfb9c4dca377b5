"""Models that call ``torch.utils.checkpoint`` themselves: the numbers of the same model without, in two runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import hfta_func as hfta
from ways import seeded, start

SEEDS = [11, 7, 1002]

Wrap = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
    for option in ("preserve_rng_state", "determinism_check", "early_stop", "context_fn"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)


class Model(nn.Module):
    """A part with noise and running statistics, between others with noise; ``wrap`` is ``checkpoint`` or nothing."""

    def __init__(self, wrap: Wrap):
        super().__init__()
        self.wrap, self.runs = [wrap], Runs()
        self.inlet = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Tanh())
        self.outlet = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.inlet(x), 0.2)
        return self.outlet(F.dropout(self.inner(x, self.wrap[0]), 0.2))

    def inner(self, x: Tensor, wrap: Wrap) -> Tensor:
        raise NotImplementedError


class Runs:
    """Counts for the whole process, so that copies of a model count together."""

    count = 0

    def __call__(self) -> None:
        if not torch.compiler.is_compiling():
            Runs.count += 1


class OfAModule(Model):
    def inner(self, x, wrap):
        return wrap(self.part, x, use_reentrant=False)


class Reentrant(Model):
    """Which runs as one that is not, whose gradients are the same."""

    def inner(self, x, wrap):
        return wrap(self.part, x, use_reentrant=True)


class OfAClosure(Model):
    """Which reads what is outside of it."""

    def inner(self, x, wrap):
        scale = x.detach().abs().mean()

        def function(y, *, offset):
            self.runs()
            return {"y": self.part(self.norm(y)) * scale + offset, "twice": 2 * scale}

        found = wrap(function, x, offset=self.outlet.bias.sum(), use_reentrant=False, determinism_check="none")
        return found["y"] + found["twice"]


class OfAMethod(Model):
    def inner(self, x, wrap):
        return x + wrap(self.method, x, None, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def method(self, x, mask):
        assert mask is None
        return self.part(self.norm(F.dropout(x, 0.1)))


class Nested(Model):
    def inner(self, x, wrap):
        return wrap(lambda x: self.norm(wrap(self.part, F.relu(x), use_reentrant=False)), x, use_reentrant=False)


class Repeated(Model):
    """The same part several times, whose statistics go on."""

    def inner(self, x, wrap):
        for _ in range(3):
            x = wrap(lambda x: self.part(self.norm(x)), x, use_reentrant=False)
        return x


class InSequence(Model):
    def inner(self, x, wrap):
        return checkpoint_sequential(self.part, 2, x, use_reentrant=False) if wrap is checkpoint else self.part(x)


class Selective(Model):
    """Which keeps some results, and meets the operators of the first run again in a model with buffers."""

    def inner(self, x, wrap):
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
        return wrap(lambda x: self.part(self.norm(x)), x, use_reentrant=False, context_fn=contexts)


MODELS = [OfAModule, Reentrant, OfAClosure, OfAMethod, Nested, Repeated, InSequence, Selective]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def run(kind: type[Model], wrap: Wrap, count: int, **options: Any) -> hfta.step.TrainState:
    models = seeded(lambda: kind(wrap).double(), range(count))
    step, state = start(models, loss_fn, hfta.sgd(lr=[0.1, 0.05, 0.02][:count]), SEEDS[:count], **options)
    torch.manual_seed(7)
    for _ in range(3):
        state, _ = step(state, (torch.randn(count, 5, 4).double(), torch.randn(count, 5, 2).double()))
    return state


@pytest.mark.exhaustive(ids="True-{}")
@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(
    ("count", "compiled", "options"),
    [
        (1, False, {}),
        (3, False, {}),
        (3, False, {"chunk_size": 1}),
        (3, False, {"chunk_size": 2}),
        (3, False, {"checkpoint": [""]}),
        (1, True, {}),
        (3, True, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_numbers_are_those_without(kind: type[Model], count: int, compiled: bool, options: Any) -> None:
    if kind is InSequence and compiled:
        pytest.skip("PyTorch's compiler does not take checkpoint_sequential into a graph")
    state, expected = run(kind, checkpoint, count, compiled=compiled, **options), run(kind, plainly, count)
    for path, x, y in zip(optree.tree_paths(state), *map(optree.tree_leaves, (state, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


def test_noise_is_bit_identical_and_parts_run_twice() -> None:
    for wrap, runs in ((plainly, 3), (checkpoint, 6)):
        Runs.count = 0
        state = run(OfAClosure, wrap, 3, verify=False)
        assert Runs.count == runs
    expected = run(OfAClosure, plainly, 3)
    assert all(map(torch.equal, optree.tree_leaves(state), optree.tree_leaves(expected)))


def test_a_function_that_writes_its_input_is_refused() -> None:
    class Writes(Model):
        def inner(self, x, wrap):
            return wrap(lambda x: self.part(x.relu_()), x * 1, use_reentrant=False)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(Writes, checkpoint, 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_outside_of_arrays_it_is_pytorchs_own(reentrant: bool) -> None:
    run(OfAModule, checkpoint, 1)
    calls = []
    weight = torch.randn(3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        calls.append(x)
        return (x * weight).sin()

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(x.grad, (x * weight).cos() * weight)
    compiled = torch.compile(lambda x: checkpoint(torch.sin, x, use_reentrant=False), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x.sin())
