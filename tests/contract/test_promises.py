"""What trains alone trains in an array and comes out the same, or is refused in the same words for every number of members.

Each case stands for a promise that users of earlier versions could break without a word.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from cases import FUNCTIONS
from comparisons import identical
from hfta_func.step.commit import Failure, diagnose
from ways import assert_as_alone, start, train_solo

M, N, FEATURES = 3, 4, 3


class WritesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return self.linear(x)


def relu_first() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, 2))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() + self.bias


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    inputs: Tensor
    targets: Tensor


def linear() -> nn.Module:
    return nn.Linear(FEATURES, 2)


def hooked(register: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, 2))
        register(model)
        return model

    return build


def squares(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Record):
        inputs, targets = batch.inputs, batch.targets
    else:
        assert type(batch) in (tuple, list, Pair, collections.UserDict)
        inputs, targets = batch.values() if isinstance(batch, collections.UserDict) else batch
    return (model(inputs) - targets).square().mean()


class Promise(NamedTuple):
    """A case: right where ``refused`` is empty, else an error whose text holds it."""

    name: str
    build: Callable[[], nn.Module] = linear
    wrap: Callable[[Tensor, Tensor], Any] = lambda inputs, targets: (inputs, targets)
    refused: str = ""


PROMISES = [
    Promise("a model that writes its input", relu_first),
    Promise("a model that writes its weight", WritesItsWeight, refused="writes its parameter 'linear.weight'"),
    Promise(
        "a hook on a parameter", hooked(lambda m: m[0].weight.register_hook(lambda g: 2 * g)), refused="'0.weight'"
    ),
    Promise("a hook on the output", hooked(lambda m: m[0].register_forward_hook(lambda m, a, y: 2 * y))),
    Promise("a batch that is a NamedTuple", wrap=Pair),
    Promise("a batch that is a list", wrap=lambda *pair: list(pair)),
    Promise("a batch that is a mapping", wrap=lambda x, y: collections.UserDict(inputs=x, targets=y)),
    Promise("a batch that is a dataclass", wrap=Record),
]


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_hooks_of_the_backward_pass_are_called_for_each_member(way: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(linear(), nn.Linear(2, 2)).double()
        model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] / grads[0].norm(),))
        return model

    assert_as_alone(build, torch.randn(M, N, FEATURES).double(), way)


PLACES = {"array": {}, "one by one": {"chunk_size": 1}, "in pairs": {"chunk_size": 2}}


CASES = [
    pytest.param(
        promise, count, place, shared, id=f"{promise.name}-{count}-{place}-{'shared' if shared else 'own'} batch"
    )
    for promise in PROMISES
    for place in [*PLACES, "compiled"]
    # Compiling takes long, and one member is compiled as many are.
    for count in ([1, M] if place != "compiled" else [M])
    for shared in ([False, True] if place != "compiled" else [False])
]


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("promise", "num_models", "place", "shared"), CASES)
def test_promise(promise: Promise, num_models: int, place: str, shared: bool) -> None:
    torch.manual_seed(0)
    models = [promise.build().double() for _ in range(num_models)]
    dims, lead = (None, ()) if shared else (0, (num_models,))
    inputs, targets = torch.randn(*lead, N, FEATURES).double(), torch.randn(*lead, N, 2).double()
    kept = inputs.clone()
    batch = promise.wrap(inputs, targets)

    def train(steps: int) -> tuple[hfta.step.TrainState, dict[str, Tensor]]:
        options = PLACES.get(place, {})
        step: Any = hfta.make_train_step(models[0], squares, hfta.sgd(lr=0.1), batch_dims=dims, **options)
        evaluate: Any = hfta.make_eval_step(models[0], squares, batch_dims=dims, **options)
        state = step.init(*hfta.stack_params(models), seeds=range(num_models))
        if place == "compiled":
            torch._dynamo.reset()
            step, evaluate = (torch.compile(one, backend="aot_eager", fullgraph=True) for one in (step, evaluate))
        for _ in range(steps):
            state, _ = step(state, batch)
        return state, evaluate(state, batch)

    if promise.refused:
        params = hfta.stack_params(models).params
        # The compiler raises an error of its own with the same words.
        with pytest.raises(Exception if place == "compiled" else hfta.HFTAError, match=promise.refused):
            train(1)
        assert identical(params, hfta.stack_params(models).params)
        return
    state, metrics = train(3)
    assert torch.equal(inputs, kept)
    for member in range(num_models):
        alone, own = copy.deepcopy(models[member]), [x if shared else x[member] for x in (inputs, targets)]
        descent = torch.optim.SGD(alone.parameters(), lr=0.1)
        train_solo(alone, squares, descent, ((own[0].clone(), own[1]) for _ in range(3)))
        trained = hfta.export_model(models[0], state, member)
        torch.testing.assert_close(dict(trained.named_parameters()), dict(alone.named_parameters()))
        expected = squares(alone, (own[0].clone(), own[1])).detach()
        torch.testing.assert_close(metrics["squares"][member], expected)


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("batch", [None, ()])
def test_a_batch_may_be_empty(batch: Any, chunk_size: int | None) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones(2, FEATURES)).sum()

    step = hfta.make_train_step(linear(), loss_fn, hfta.sgd(lr=0.1), chunk_size=chunk_size)
    state = step.init(*hfta.init_params(linear, [0, 1, 2]), seeds=[0, 1, 2])
    torch.testing.assert_close(step(state, batch)[0].params["bias"], state.params["bias"] - 0.2)


@pytest.mark.exhaustive
def test_steps_run_in_several_threads_at_once() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 8))

    for options in ({}, {"checkpoint": ["0"]}, {"chunk_size": 1}):
        step = hfta.make_train_step(build(), lambda model, x: model(x).square().mean(), hfta.adam(lr=0.01), **options)
        x = torch.randn(2, 64, 8)
        starts = [step.init(*hfta.init_params(build, [i, i + 1]), seeds=[i, i + 1]) for i in range(4)]

        def train(start: hfta.step.TrainState, step: Any = step, x: Tensor = x) -> hfta.step.TrainState:
            for _ in range(20):
                start, _ = step(start, x)
            return start

        expected = [train(start).params for start in starts]
        with concurrent.futures.ThreadPoolExecutor(len(starts)) as threads:
            found = [state.params for state in threads.map(train, starts)]
        assert identical(found, expected), options


def test_numbers_of_the_loss_are_copies_and_keep_their_bits() -> None:
    def loss_fn(model: nn.Module, x: Tensor, hparams: dict[str, Tensor]) -> Tensor:
        return model(x).sum() * hparams["alpha"].mul_(2)

    step = hfta.make_train_step(linear(), loss_fn, hfta.rmsprop(lr=0.1))
    params = {path: param.bfloat16() for path, param in hfta.init_params(linear, [0, 1]).params.items()}
    state = step.init(params, seeds=[0, 1], hparams={"alpha": [0.999, 2.0]})
    after, _ = step(state, torch.ones(2, N, FEATURES, dtype=torch.bfloat16))
    assert after.hparams["alpha"].tolist() == torch.tensor([0.999, 2.0]).tolist()


def test_names_that_optimizer_and_loss_share() -> None:
    step = hfta.make_train_step(linear(), lambda model, x, hparams: model(x).sum() * hparams["lr"], hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(linear, [0, 1]), seeds=[0, 1], hparams={"lr": 5.0, "other": 1.0})
    changed = hfta.with_hyperparams(state, lr=0.2, other=3.0)
    assert changed.opt_state.hyperparams["lr"].tolist() == [0.2, 0.2]
    assert (changed.hparams["lr"].tolist(), changed.hparams["other"].tolist()) == ([5.0, 5.0], [3.0, 3.0])
    changed = hfta.with_hyperparams(state, **{"hparams.lr": [7.0, 8.0]})
    assert changed.opt_state.hyperparams["lr"].tolist() == [0.1, 0.1]
    assert changed.hparams["lr"].tolist() == [7.0, 8.0]
    with pytest.raises(
        hfta.errors.HyperparameterError, match=r"unknown hyperparameter 'hparams.momentum'; this state has lr, other"
    ):
        hfta.with_hyperparams(state, **{"hparams.momentum": 1.0})


def test_a_metric_that_is_a_parameter_is_that_of_before_the_update() -> None:
    step = hfta.make_train_step(
        linear(), lambda model, x: (model(x).sum(), {"weight": model.weight}), hfta.sgd(lr=0.1), donate=True
    )
    state = step.init(*hfta.init_params(linear, [0, 1]), seeds=[0, 1])
    before = state.params["weight"].clone()
    state, metrics = step(state, torch.ones(2, N, FEATURES))
    assert torch.equal(metrics["weight"], before)
    assert not torch.equal(state.params["weight"], before)


# PyTorch's NAdam and Adafactor refuse complex parameters.
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in FUNCTIONS.items()
        if case.theirs.__module__.startswith("torch.") and name not in ("nadam", "adafactor")
    ],
)
@pytest.mark.parametrize("donate", [False, True])
# PyTorch keeps the step size of ASGD in the default dtype.
@pytest.mark.usefixtures("double")
def test_complex_parameters_are_updated_as_in_torch(name: str, donate: bool) -> None:
    torch.manual_seed(0)
    models = [Complex() for _ in range(2)]
    theirs = FUNCTIONS[name].theirs
    options = {"lr": 0.01} if name == "rprop" else {"lr": 0.01, "weight_decay": 0.1}
    x = torch.randn(2, N, FEATURES, dtype=torch.float64)
    step, state = start(models, _mean_square, getattr(hfta, name)(**options), donate=donate)
    for _ in range(3):
        state, metrics = step(state, x)
    assert metrics["finite"].all()
    for member, model in enumerate(models):
        train_solo(model, _mean_square, theirs(model.parameters(), **options), [x[member]] * 3)
        for path, param in model.named_parameters():
            torch.testing.assert_close(state.params[path][member], param.detach(), rtol=1e-11, atol=1e-12)


def test_a_gradient_whose_imaginary_part_is_not_finite() -> None:
    imaginary = torch.tensor([[0.0, 1.0], [float("inf"), 1.0]])
    found = diagnose(torch.zeros(2), [torch.complex(torch.zeros(2, 2), imaginary)])
    assert found.tolist() == [Failure.NONE, Failure.GRADIENT]


def test_accumulated_means_in_float64() -> None:
    optimizer, params = hfta.accumulate(hfta.sgd(lr=1.0), every=3), {"w": torch.zeros(1, 1, dtype=torch.float64)}
    state = optimizer.init(params)
    for value in (0.1, 0.2, 0.7):
        updates, state = optimizer.update({"w": torch.full((1, 1), value, dtype=torch.float64)}, state, params)
    torch.testing.assert_close(updates["w"], torch.full((1, 1), -1.0 / 3, dtype=torch.float64), rtol=1e-15, atol=0)


def test_plain_vmap_runs_beside_a_step() -> None:
    step = hfta.make_train_step(linear(), lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(linear, [0, 1]), seeds=[0, 1])
    ended, errors = threading.Event(), []

    def plain() -> None:
        try:
            while not ended.is_set():
                # One of them has no batching rule.
                torch.func.vmap(lambda x: torch.special.bessel_j0(x) + F.relu(x))(torch.ones(3, 2))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=plain)
    thread.start()
    for _ in range(30):
        state, _ = step(state, torch.ones(2, N, FEATURES))
    ended.set()
    thread.join()
    assert not errors


def averaging() -> nn.Module:
    """Of a kind that steps change before they run it."""
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_steps_are_pickled_and_copied(again: Callable[[Any], Any]) -> None:
    rates = hfta.schedules.chain(hfta.schedules.warmup(0.1, 2), hfta.schedules.cosine([0.1, 0.2], 5))
    optimizer = hfta.chain(hfta.clip_grad_norm(1.0), hfta.adamw(lr=rates, weight_decay=[0.1, 0.0]))
    step = hfta.make_train_step(averaging(), _mean_square, optimizer, batch_dims=None, chunk_size=1)
    evaluate, x = hfta.make_eval_step(averaging(), _mean_square), torch.randn(N, FEATURES)
    states = [one.init(*hfta.init_params(averaging, [0, 1]), seeds=[0, 1]) for one in (step, again(step))]
    for _ in range(4):
        states = [one(state, x)[0] for one, state in zip((step, again(step)), states, strict=True)]
    for path, param in states[0].params.items():
        assert torch.equal(states[1].params[path], param)
    assert again(step).options.chunk_size == 1
    found = [one(states[0], x)["_mean_square"] for one in (evaluate, again(evaluate))]
    assert torch.equal(*found)


def test_what_was_called_is_sent_to_other_processes() -> None:
    models = [nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2)) for _ in range(M)]
    stacked, x = hfta.stack_params(models), torch.randn(N, FEATURES)
    function = hfta.functional(models[0])
    mapped = hfta.vmap(function, (0, 0, None))
    expected = mapped(*stacked, x)
    sent = pickle.loads(cloudpickle.dumps((mapped, function)))
    for found in (sent[0], hfta.vmap(sent[1], (0, 0, None))):
        assert torch.equal(found(*stacked, x)[0], expected[0])


def test_optimizers_and_schedules_are_pickled() -> None:
    grads, params = {"w": torch.ones(2, 3, 3)}, {"w": torch.ones(2, 3, 3)}
    for name, case in FUNCTIONS.items():
        optimizer = case.ours(lr=hfta.schedules.exponential([0.1, 0.2], 0.9))
        again = pickle.loads(pickle.dumps(optimizer))
        (first, _), (second, _) = (one.update(grads, one.init(params), params) for one in (optimizer, again))
        assert torch.equal(first["w"], second["w"]), name
