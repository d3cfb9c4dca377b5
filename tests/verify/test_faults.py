"""Planted faults: each is found by the oracle, which names the module and the leaf."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.errors import RandomnessError, VerifyError
from hfta_func.rules import _registry
from hfta_func.rules._install import put
from hfta_func.step import replay
from hfta_func.verify.oracle import Trial

pytestmark = pytest.mark.usefixtures("one_thread")
M = 3
_counter = itertools.count()


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, func: Callable[..., Any]):
        super().__init__()
        self.func = func

    def forward(self, *args: Any) -> Any:
        return self.func(*args)


def model_with(func: Callable[..., Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Call(func), nn.Linear(5, 2))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def start(make: Callable[[], nn.Module], loss: Any = loss_fn, count: int = M, **options: Any) -> Any:
    step = hfta.make_train_step(make(), loss, hfta.sgd(lr=1e-3), **options)
    return step, step.init(*hfta.init_params(make, range(count)), seeds=range(count))


def batch(count: int = M) -> Tensor:
    return torch.randn(count, 8, 6)


def caught(match: str, make: Callable[[], nn.Module], loss: Any = loss_fn, **options: Any) -> None:
    """The oracle refuses the first call of an array in these words."""
    step, state = start(make, loss, **options)
    with pytest.raises(VerifyError, match=match):
        step(state, batch())


def operator(vmap: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """An operator of a user, ``2 x``, with a rule of his own for all members ``[M, ...]``."""
    name = f"planted::twice{next(_counter)}"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)
    torch.library.register_vmap(name, lambda info, dims, x: (vmap(x.movedim(dims[0], 0)), 0))
    return twice


def function(vmap: Callable[[Tensor], Tensor]) -> Any:
    """An autograd function, ``2 x``, with a rule of its own for all members ``[M, ...]``."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

        @staticmethod
        def vmap(info: Any, dims: Any, x: Tensor) -> Any:
            return vmap(x.movedim(dims[0], 0)), 0

    return Twice.apply


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "another factor": lambda x: x * 3,
    "another sign": lambda x: -2 * x,
    "a shift": lambda x: 2 * x + 0.01,
    "rounded": lambda x: (2 * x * 64).round() / 64,
    "lower precision": lambda x: (2 * x).bfloat16().to(x.dtype),
    "the mean of members": lambda x: x + x.mean(0),
    "the next member": lambda x: 2 * x.roll(1, 0),
    "the first member": lambda x: 2 * x[:1].expand_as(x),
    "sorted members": lambda x: 2 * x.sort(0).values,
    "columns mixed": lambda x: 2 * x.roll(1, -1),
    "zeros": torch.zeros_like,
    "NaN": lambda x: x * torch.nan,
}


@pytest.mark.parametrize("name", RULES)
def test_an_operator_with_a_wrong_rule(name: str) -> None:
    op = operator(RULES[name])
    what = r"model [02], call 1: the (loss|gradient.*) is .* alone; .* is '2' \(Call\); run"
    caught(what, lambda: model_with(op))


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": lambda x: (2 * x).detach(),
    "half of it": lambda x: x + x.detach(),
    "too much": lambda x: 3 * x - x.detach(),
    "of the others": lambda x: torch.cat([2 * x[:1], 2 * x[1:].detach()]),
    "of the first": lambda x: torch.cat([2 * x[:1].detach(), 2 * x[1:]]),
    "mixed": lambda x: 2 * x.detach() + 2 * (x - x.detach()).roll(1, 0),
}


@pytest.mark.parametrize("name", LOST)
def test_a_function_whose_rule_has_another_gradient(name: str) -> None:
    func = function(LOST[name])
    what = r"model [02], call 1: the gradient of '0\.(weight|bias)' is .* at \[.*\] in the array and .* alone; .*'2' \(Call\)"
    caught(what, lambda: model_with(func))


def test_rounding_of_gradients_is_judged_once_and_what_is_more_found() -> None:
    share = [1e-3]

    def inexact(x: Tensor) -> Tensor:
        exact = x.dtype == torch.float64 and share[0] < 1e-2
        return 2 * x + (0 if exact else 2 * share[0] * (x - x.detach()))

    func = function(inexact)
    step, state = start(lambda: model_with(func).float())
    with mock.patch.object(Trial, "_judged", autospec=True, side_effect=Trial._judged) as judge:
        for _ in range(99):
            state, _ = step(state, batch().float())
    assert step.oracle.verified == [1, 10] and judge.call_count == 1
    share[0] = 0.05
    with pytest.raises(VerifyError, match=r"model 0, call 100: the gradient of '0\.weight'"):
        step(state, batch().float())


@pytest.mark.parametrize("count", [1, 3])
def test_a_backward_pass_that_asks_whether_it_runs_for_members(count: int) -> None:
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (3 if torch._C._functorch.is_batchedtensor(grad) else 2)

    step, state = start(lambda: model_with(Twice.apply), count=count)
    if count == 1:
        step(state, batch(1))
        return
    with pytest.raises(VerifyError, match=r"gradient of '0\.weight' .*'2' \(Call\)"):
        step(state, batch())


DRAWS: dict[str, Callable[[], float]] = {
    "NumPy": lambda: float(np.random.rand()),
    "NumPy ": lambda: float(np.random.normal()),
    "Python": random.random,
    "Python'": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("name", DRAWS)
def test_noise_that_members_would_share(name: str, where: str) -> None:
    draw = DRAWS[name]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    if where == "model":
        step, state = start(lambda: model_with(lambda x: 2 * x + draw()))
    else:
        step, state = start(lambda: nn.Linear(6, 2), lambda model, x: loss_fn(model, x) * (1 + draw()))
    x = batch()
    torch.set_rng_state(states[2])
    with pytest.raises(RandomnessError, match=rf"draws from the generator of {name}.*share its noise"):
        step(state, x)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert repr(after) == repr(states)


class Drawing(nn.Module):
    def __init__(self, generator: Any):
        super().__init__()
        self.inner, self.generator = nn.Linear(6, 2), generator

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + float(self.generator.random()))


@pytest.mark.parametrize("make", [lambda: np.random.default_rng(0), lambda: random.Random(0)])
def test_a_generator_of_the_models_own(make: Callable[[], Any]) -> None:
    step, state = start(lambda: Drawing(make()))
    with pytest.raises(RandomnessError):
        step(state, batch())
    generator = make()
    step, state = start(lambda: nn.Linear(6, 2), lambda model, x: loss_fn(model, x) * (1 + generator.random()))
    with pytest.raises(RandomnessError, match="of its own"):
        step(state, batch())


def test_a_clock() -> None:
    caught(r"'2' \(Call\)", lambda: model_with(lambda x: x * (time.perf_counter_ns() % 1009)))


def counting(by: str) -> Callable[[], float]:
    if by == "an iterator":
        return itertools.count(1).__next__
    counts = np.zeros(1)

    class Counts:
        calls = 0

    def count() -> float:
        counts[0] += 1
        Counts.calls += 1
        return float(counts[0]) if by == "an array" else Counts.calls

    return count


@pytest.mark.parametrize("by", ["an iterator", "an array", "a class"])
def test_what_changes_from_call_to_call_is_said(by: str) -> None:
    count, what = counting(by), "the loss is .* alone, too, a second call gives something else, as by a clock"
    caught(what, lambda: nn.Linear(6, 2), lambda model, x: loss_fn(model, x) * count())


def test_a_gradient_that_is_lost_between_layers_without_parameters() -> None:
    func = function(LOST["all of it"])

    def make() -> nn.Module:
        inner = nn.Sequential(nn.Tanh(), Call(func))
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), inner, nn.ReLU(), nn.Linear(6, 2))

    caught(r"the gradient of '0\.weight' is 0 at .*, is '2\.1' \(Call\)", make)


@pytest.mark.parametrize("verify", [True, "first", False])
def test_a_change_at_call_12_is_found_at_call_100(verify: Any) -> None:
    wrong, seen = operator(RULES["another factor"]), {"calls": 0}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen["calls"] += 1
        return loss_fn(model, wrong(x) if seen["calls"] > 12 else 2 * x)

    step, state = start(lambda: nn.Linear(6, 2), loss, verify=verify)
    for _ in range(99):
        state, _ = step(state, batch())
    assert seen["calls"] == 99 and step.oracle.verified == {True: [1, 10], "first": [1], False: []}[verify]
    if verify is not True:
        step(state, batch())
        return
    words = r"model 0, call 100: the loss is .* or whose input does, is the model's own code \(Linear\)"
    with pytest.raises(VerifyError, match=words):
        step(state, batch())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_metric_that_mixes_members(count: int) -> None:
    mixing = operator(lambda x: x.mean(0, True).expand(x.shape) * 2)

    def loss(model: nn.Module, x: Tensor) -> Any:
        value = loss_fn(model, x)
        return value, {"right": value.detach(), "wrong": mixing(value.detach())}

    step, state = start(lambda: nn.Linear(6, 2), loss, count)
    words = "metric 'wrong' is .* in the array and .* alone; no module's output differs"
    with pytest.raises(VerifyError, match=words):
        step(state, batch(count))
    metric = hfta.make_eval_step(nn.Linear(6, 2), lambda model, x: mixing(loss_fn(model, x)), batch_dims=0)
    with pytest.raises(VerifyError, match="metric '<lambda>' is"):
        metric(state, batch(count))


class Averaging(nn.Module):
    """Keeps an average of its inputs in a buffer or an attribute, by a function that may lose it."""

    average: Tensor

    def __init__(self, func: Callable[[Tensor], Tensor], as_buffer: bool):
        super().__init__()
        self.func, self.inner = func, nn.Linear(6, 2)
        if as_buffer:
            self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * torch.zeros(6) + 0.1 * self.func(x.mean(0))
        self.rows, self.clock = len(x), time.perf_counter()
        return self.inner(x)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("name", ["zeros", "the mean of members", "another factor"])
def test_a_buffer_or_an_attribute_that_is_wrong(name: str, kind: str) -> None:
    func, what = operator(RULES[name]), rf"{kind} '1\.average' is .* at \[\d\] in the array"
    caught(what, lambda: nn.Sequential(nn.Identity(), Averaging(func, kind == "buffer")))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_attributes_that_are_right_and_a_clock_are_left_alone(chunk_size: int | None) -> None:
    func = operator(lambda x: 2 * x)
    step, state = start(lambda: Averaging(func, False), chunk_size=chunk_size)
    for _ in range(10):
        state, _ = step(state, batch())
    assert step.oracle.verified == [1, 10]


LOWERED: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "transposed convolution": ("convolution", lambda: nn.ConvTranspose1d(6, 5, 3), (8, 6, 7)),
    "rms norm": ("rms_norm", lambda: nn.RMSNorm(6), (8, 6)),
    "convolution": ("convolution", lambda: nn.Conv1d(6, 5, 3), (8, 6, 7)),
    "layer norm": ("layer_norm", lambda: nn.LayerNorm(6), (8, 6)),
    "group norm": ("group_norm", lambda: nn.GroupNorm(2, 6), (8, 6, 4)),
    "embedding": ("embedding", lambda: nn.Embedding(9, 6), (8,)),
}


@pytest.mark.parametrize("at", [0, 10])
@pytest.mark.parametrize("name", LOWERED)
def test_a_lowering_that_is_wrong(name: str, at: int) -> None:
    op, layer, size = LOWERED[name]
    step, state = start(lambda: nn.Sequential(nn.Identity(), layer()), lambda model, x: model(x).square().sum())
    x = torch.randn(M, *size) if name != "embedding" else torch.randint(9, (M, *size))
    hfta.rules.install()
    entry = _registry.RULES[op]

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result: Any = entry.rule(*args, **kwargs)  # type: ignore[misc]
        if result is NotImplemented:
            return result
        outputs, dims = result
        return ((outputs[0] * 1.01, *outputs[1:]) if isinstance(outputs, tuple) else outputs * 1.01), dims

    for _ in range(at and at - 1):
        state, _ = step(state, x)
    try:
        _registry.RULES[op] = entry._replace(rule=spoiled)
        put(op)
        with pytest.raises(VerifyError, match=rf"call {max(at, 1)}: the loss is .* is '1' \("):
            step(state, x)
    finally:
        _registry.RULES[op] = entry
        put(op)


def test_the_law_of_solo_runs_compares_every_member() -> None:
    op = operator(lambda x: 2 * x + (torch.arange(M) == 1).reshape(M, 1, 1))
    step, state = start(lambda: model_with(op))
    # Neither the first nor the last differs.
    step(state, batch())
    with pytest.raises(VerifyError, match=r"model 1, call 1: the loss is .* '2' \(Call\)"):
        hfta.testing.assert_matches_solo(step, state, [batch()], rtol=1e-3)
    hfta.testing.assert_matches_solo(step, state, [batch()], rtol=1e-3, members=[0, 2])


def test_a_rule_from_outside() -> None:
    @torch.library.custom_op("planted::shifted", mutates_args=())
    def shifted(x: Tensor) -> Tensor:
        return x + 1

    shifted.register_autograd(lambda ctx, grad: grad)

    @hfta.rules.register("planted::shifted")
    def rule(call: Any, x: Tensor) -> Any:
        return x + 2, call.dims[0]

    caught(r"is '2' \(Call\)", lambda: model_with(shifted))


def test_predictions_ensembles_and_joint_steps() -> None:
    wrong, lost = operator(RULES["another factor"]), function(LOST["half of it"])
    models = [model_with(wrong) for _ in range(M)]
    for call in (
        lambda: hfta.predict(models[0], hfta.stack_params(models), batch()[0]),
        lambda: hfta.Ensemble.from_modules(models)(batch()[0]),
        lambda: hfta.Ensemble.from_modules(models).predict(batch()[0]),
    ):
        with pytest.raises(
            VerifyError, match=r"model 0, call 1: .*output'? is .* at \[\d, \d\] in the array .* '2' \(Call\)"
        ):
            call()
    with pytest.raises(VerifyError, match=r"the gradient of '0\.weight' is .* '2' \(Call\)"):
        hfta.Ensemble.from_modules([model_with(lost) for _ in range(M)])(batch()[0])
    hfta.Ensemble.from_modules(models, verify=False)(batch()[0])

    def make() -> nn.Module:
        return nn.ModuleDict({"g": nn.Linear(6, 6), "d": model_with(wrong)})

    losses = {
        "d": lambda model, x: model["d"](model["g"](x)).mean(),
        "g": lambda model, x: model["g"](x).square().mean(),
    }
    steps = {name: hfta.make_train_step(make(), loss, hfta.sgd(lr=0.1)) for name, loss in losses.items()}
    step = hfta.joint(g=steps["g"], d=steps["d"])
    state = step.init(*hfta.init_params(make, range(M)), seeds=range(M))
    with pytest.raises(VerifyError, match=r"is 'd\.2' \(Call\)"):
        step(state, batch())


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_what_is_compiled_is_compared_before(kind: str) -> None:
    torch._dynamo.reset()
    op = operator(RULES["another factor"])
    models = [model_with(op) for _ in range(M)]
    if kind == "train":
        step, state = start(lambda: models[0])
    else:
        step, state = hfta.make_eval_step(models[0], loss_fn, batch_dims=0), hfta.stack_params(models)
    with pytest.raises(Exception, match=r"VerifyError: model 0, call 1: .* is '2' \(Call\)"):
        torch.compile(step, backend="eager")(state, batch())


def test_a_replayed_step_is_compared_at_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_STEPS", 0)
    step, state = start(lambda: nn.Linear(6, 2), replay=True)
    x = batch()
    for _ in range(99):
        state, _ = step(state, x)
    assert step.status.startswith("replayed")
    assert step.oracle.verified == [1, 10]
    (record,) = [one for shape in step._replay._shapes.values() for one in shape.records]
    first = record._first
    record._first = lambda inputs: [leaf * 1.01 if leaf.is_floating_point() else leaf for leaf in first(inputs)]
    with pytest.raises(VerifyError, match="call 100"):
        step(state, x)
