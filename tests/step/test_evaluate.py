"""Evaluation: eval mode, each member's own noise, groups of members, and the same options as training."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from comparisons import identical
from hfta_func import random

M = 5
SEEDS = [11, 7, 1002, -3, 7]
SIZES = [None, 1, 2, 3, 4, 5, 9]
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Noisy(nn.Module):
    """Batch normalisation and dropout, which compute something else in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.fixture(scope="module")
def members() -> list[nn.Module]:
    torch.manual_seed(1)
    models = [Noisy().double() for _ in range(M)]
    for model in models:
        # Statistics that differ from those of any batch.
        model(3 * torch.randn(20, 4, dtype=torch.float64) + 1)
    return models


@pytest.fixture(scope="module")
def state(members: list[nn.Module]) -> hfta.step.TrainState:
    step = hfta.make_train_step(members[0], lambda model, x: model(x).mean(), hfta.sgd(lr=0.1))
    first = step.init(*hfta.stack_params(members), seeds=SEEDS)
    return first._replace(step=torch.tensor([0, 3, 3, 1, 2**40]), active=torch.tensor([True, False, True, True, False]))


@pytest.mark.parametrize("size", SIZES)
def test_it_runs_in_eval_mode(members: Any, state: hfta.step.TrainState, size: int | None) -> None:
    modes = []

    def watched(model: nn.Module, x: Tensor) -> Tensor:
        modes.append({module.training for module in model.modules()})
        return model(x)

    assert members[0].training
    evaluate = hfta.make_eval_step(members[0], watched, chunk_size=size)
    held = optree.tree_map(torch.clone, state)
    found = evaluate(state, X)["watched"]
    # Calls for groups of members count as one.
    assert modes == [{False}]
    expected = torch.stack([hfta.export_model(members[0], state, i).eval()(X) for i in range(M)])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    assert members[0].training and not found.requires_grad
    assert identical(state, held)


def test_a_model_in_eval_mode_stays_so(members: Any, state: hfta.step.TrainState) -> None:
    model = Noisy().double().eval()
    found = hfta.make_eval_step(model, outputs)(state, X)["outputs"]
    assert torch.equal(found, hfta.make_eval_step(members[0], outputs)(state, X)["outputs"])
    assert not model.training


def drawn(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"uniform": torch.rand(3), "mask": F.dropout(torch.ones(8), 0.5), "normal": torch.randn(2, 2)}


def expected_draws(keys: Tensor) -> dict[str, Tensor]:
    """What members with these keys draw, one after another."""
    found = []
    for key in keys:
        with hfta.calls.routed(key):
            found.append(drawn(nn.Identity(), torch.empty(0)))
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("size", SIZES)
def test_noise_is_that_of_seed_and_inverted_step(members: Any, state: hfta.step.TrainState, size: int | None) -> None:
    evaluate = hfta.make_eval_step(members[0], drawn, chunk_size=size)
    found = evaluate(state, X)
    assert identical(found, expected_draws(random.fold_in(state.keys, ~state.step)))
    # Equal seeds at different steps, and equal steps of different seeds.
    assert len({tuple(row) for row in found["uniform"].tolist()}) == M
    # Without a training state, all draw from seed 0.
    found = evaluate(hfta.models.Stacked(state.params, state.buffers), X)
    assert identical(found, expected_draws(torch.zeros(M, dtype=torch.int64)))


@pytest.mark.parametrize("size", [*SIZES, "auto"])
def test_members_get_their_own_part_of_the_batch(members: Any, state: hfta.step.TrainState, size: Any) -> None:
    batch = {"x": torch.arange(M * 2.0).reshape(M, 2), "shared": torch.tensor([100.0, 200.0])}

    def total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + batch["shared"]

    evaluate = hfta.make_eval_step(members[0], total, batch_dims={"x": 0, "shared": None}, chunk_size=size)
    assert torch.equal(evaluate(state, batch)["total"], batch["x"] + batch["shared"])


@pytest.mark.parametrize("size", [None, 1, 2, "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_groups(size: Any, dtype: torch.dtype) -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    x = torch.randn(7, 4)
    found = hfta.make_eval_step(models[0], outputs, autocast=dtype, chunk_size=size)(hfta.stack_params(models), x)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        expected = torch.stack([model(x) for model in models])
    assert found["outputs"].dtype == expected.dtype == dtype
    torch.testing.assert_close(found["outputs"], expected, rtol=1e-2, atol=1e-2)


def test_one_at_a_time_a_metric_may_look_at_values(members: Any, state: hfta.step.TrainState) -> None:
    def looks(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y if y.sum().item() > 0 else -y

    found = hfta.make_eval_step(members[0], looks, chunk_size=1)(state, X)["looks"]
    plain = hfta.make_eval_step(members[0], outputs)(state, X)["outputs"]
    torch.testing.assert_close(found, plain * plain.sum((1, 2), keepdim=True).sign(), rtol=1e-12, atol=1e-12)
    assert plain.sum((1, 2)).sign().unique().numel() == 2
    with pytest.warns(hfta.errors.LoopWarning, match="members run one after another"):
        apart = hfta.make_eval_step(members[0], looks, chunk_size=2)(state, X)["looks"]
    torch.testing.assert_close(apart, found, rtol=1e-12, atol=1e-12)


def outcomes(batch: Any, **options: Any) -> list[tuple[type, str] | None]:
    """Of training and of evaluation: None, or the class and the words of the error."""
    models, found = [nn.Linear(4, 1) for _ in range(2)], []

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).mean()

    def train() -> None:
        step = hfta.make_train_step(models[0], mean, hfta.sgd(lr=0.1), **options)
        step(step.init(*hfta.stack_params(models), seeds=[0, 1]), batch)

    def evaluate() -> None:
        hfta.make_eval_step(models[0], mean, **options)(hfta.stack_params(models), batch)

    for call in (train, evaluate):
        try:
            call()
            found.append(None)
        except Exception as error:
            found.append((type(error), str(error)))
    return found


PARTS = {"x": torch.randn(2, 3, 4), "y": torch.randn(2, 3)}


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        *(("chunk_size", value, True) for value in (None, 1, 2, 100, "auto")),
        *(("chunk_size", value, False) for value in (0, -1, 1.0, 2.5, "fast", "", [1])),
        *(("autocast", value, True) for value in (None, torch.bfloat16, torch.float16)),
        *(("autocast", value, False) for value in (torch.float32, torch.float64, torch.int8, "bfloat16", True)),
    ],
)
def test_training_and_evaluation_take_the_same_options(option: str, value: Any, accepted: bool) -> None:
    trained, evaluated = outcomes(PARTS, batch_dims=0, **{option: value})
    assert trained == evaluated
    assert (trained is None) == accepted
    if trained is not None:
        assert trained[0] is ValueError and option in trained[1] and repr(value) in trained[1]


BATCH_DIMS: list[tuple[Any, Any, bool]] = [
    (0, PARTS, True),
    (None, PARTS, True),
    ({"x": 0, "y": None}, PARTS, True),
    ({"x": 0, "y": 0}, PARTS, True),
    ({"x": 0}, PARTS, False),
    (0, {**PARTS, "y": torch.randn(3, 3)}, False),
    (0, {**PARTS, "y": torch.tensor(1.0)}, False),
    (0, {**PARTS, "y": 1.0}, False),
    ({"x": 0, "y": (0, None)}, {**PARTS, "y": (torch.zeros(2), torch.zeros(5))}, True),
    ({"x": 0, "y": (0, 0)}, {**PARTS, "y": (torch.zeros(2), torch.zeros(5))}, False),
    ({"x": 0, "y": (0,)}, {**PARTS, "y": (torch.zeros(2), torch.zeros(2))}, False),
    ({"x": 0, "y": [0]}, {**PARTS, "y": (torch.zeros(2),)}, True),
    ({"x": 0, "y": (0,)}, {**PARTS, "y": [torch.zeros(2)]}, True),
    ({"x": 0, "y": (0,)}, PARTS, False),
    ({"x": 0, "y": 0, "z": 0}, PARTS, False),
    ((0, 0), PARTS, False),
    (0, collections.OrderedDict(PARTS), True),
    ({"y": None, "x": 0}, collections.OrderedDict(PARTS), True),
    (None, collections.UserDict(PARTS), True),
    (0, collections.UserDict(PARTS), True),
    ({"x": 0, "y": 0}, collections.UserDict(PARTS), True),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("size", [None, 1, 2, "auto"])
@pytest.mark.parametrize("case", range(len(BATCH_DIMS)))
def test_training_and_evaluation_take_the_same_batches(case: int, size: Any) -> None:
    dims, batch, accepted = BATCH_DIMS[case]
    trained, evaluated = outcomes(batch, batch_dims=dims, chunk_size=size)
    assert trained == evaluated
    assert trained is None if accepted else trained is not None and trained[0] is hfta.errors.BatchError


@pytest.mark.parametrize("make", [hfta.make_train_step, hfta.make_eval_step])
@pytest.mark.parametrize("dims", [1, -1, "x", True, (0, 2), {"inputs": 1}])
def test_the_model_axis_of_a_batch_is_the_first(make: Any, dims: Any) -> None:
    more = (hfta.sgd(),) if make is hfta.make_train_step else ()
    with pytest.raises(ValueError, match=r"batch_dims has .*; it must be 0, None, or a tree of these"):
        make(nn.Linear(4, 1), outputs, *more, batch_dims=dims)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_it_is_the_eager_one(members: Any, state: hfta.step.TrainState, stacked: bool) -> None:
    torch._dynamo.reset()
    evaluate = hfta.make_eval_step(members[0], outputs)
    held: Any = hfta.models.Stacked(state.params, state.buffers) if stacked else state
    compiled = torch.compile(evaluate, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(held, X), evaluate(held, X), rtol=1e-12, atol=1e-12)


class Rewriting(nn.Module):
    """Writes its input and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, max_norm=0.1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x) + self.rows(torch.arange(x.shape[0]))


@pytest.mark.parametrize("size", [None, 1, 2, "auto"])
@pytest.mark.parametrize("dims", [0, None])
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_model_writes_is_its_own_copy(size: Any, dims: Any, count: int) -> None:
    models = [Rewriting() for _ in range(count)]
    stacked = hfta.stack_params(models)
    x = torch.randn(5, 4) if dims is None else torch.randn(count, 5, 4)
    held = optree.tree_map(torch.clone, (stacked, x))
    evaluate = hfta.make_eval_step(models[0], lambda model, x: model(x), batch_dims=dims, chunk_size=size)
    for _ in range(2):
        evaluate(stacked, x)
        assert identical((stacked, x), held)


class Writes(nn.Module):
    """Writes its parameter: a call after another one finds another value, or the same."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.ones(3)), again

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5) if self.again else self.weight.clamp_(max=0.25)
        return (x * self.weight).sum()


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_that_the_model_writes(trains: bool, again: bool) -> None:
    """What differs from call to call is noticed, and the rest is as alone."""
    model, x = Writes(again), torch.ones(2, 3)
    stacked = hfta.stack_params([Writes(again) for _ in range(2)])
    step = hfta.make_train_step(model, lambda model, x: model(x), hfta.sgd(lr=0.1))
    state = step.init(*stacked, seeds=[0, 1])
    evaluate = hfta.make_eval_step(model, lambda model, x: {"loss": model(x)}, batch_dims=0)
    met = (hfta.errors.StateError, hfta.errors.VerifyError)
    with pytest.raises(met, match=r"writes its parameter|in the array and") if again else contextlib.nullcontext():
        state, metrics = step(state, x) if trains else (state, evaluate(state, x))
        assert metrics["loss"].tolist() == [0.75, 0.75]
        torch.testing.assert_close(state.params["weight"], torch.full((2, 3), 0.15 if trains else 0.25))


def _gradient(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    return slope.square().sum()


def _of_activation(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = model(x)
    return y.sum() * (2 if y.requires_grad else 3) * (5 if y.is_leaf else 7)


class _Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (2 if ctx.needs_input_grad[0] else 3)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "metric",
    [
        lambda model, x: model(x).sum(),
        _gradient,
        _of_activation,
        lambda model, x: (x @ _Asking.apply(model.weight).t()).sum(),
        lambda model, x: model(x).sum() * sum(2 if param.requires_grad else 3 for param in model.parameters()),
    ],
    ids=["plain", "gradient", "activation", "function", "parameters"],
)
def test_parameters_require_grad_from_when_it_is_asked(metric: Any, count: int) -> None:
    models, x = [torch.nn.Linear(4, 2).double() for _ in range(count)], torch.randn(5, 4).double()
    evaluate = hfta.make_eval_step(models[0], metric)
    with torch.no_grad():
        expected = torch.stack([metric(model, x) for model in models]).detach()
    for _ in range(2):
        (values,) = evaluate(hfta.stack_params(models), x).values()
        torch.testing.assert_close(values, expected)
        assert not values.requires_grad
