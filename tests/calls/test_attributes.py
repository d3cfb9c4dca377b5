"""Plain attributes of models: same-call communication works, and nothing outlives a call."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.step import replay
from ways import WAYS, assert_as_alone, seeded, start, train_solo

LRS = [0.1, 0.05, 0.02]


class Keeps(nn.Module):
    """A layer that uses attributes in one way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x))

    def use(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Hidden(Keeps):
    h = None

    def use(self, y):
        y = y if self.h is None else y + self.h
        self.h = y.detach().mean(0)
        return y


class Counter(Keeps):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def use(self, y):
        self.calls += 1
        return y / self.calls


class UnusedCounter(Counter):
    def use(self, y):
        self.calls += 1
        return y


class History(Keeps):
    def __init__(self):
        super().__init__()
        self.history = []

    def use(self, y):
        self.history.append(y.detach().mean())
        return y


class Nested(Keeps):
    def __init__(self):
        super().__init__()
        self.memory = {"seen": collections.deque(maxlen=2)}

    def use(self, y):
        self.memory["seen"].append(y.shape[0])
        return y


class Meter:
    total = 0.0


class Meters(Keeps):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def use(self, y):
        self.meter.total = self.meter.total + y.detach().mean()
        return y - self.meter.total


class FirstBatch(Keeps):
    """Normalises by the first batch that it has seen."""

    scale = None

    def use(self, y):
        if self.scale is None:
            self.scale = y.detach().abs().mean()
        return y / self.scale


class WritesTensor(Keeps):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def use(self, y):
        self.count += 1
        return y / self.count


CARRYING = {Hidden: "h", Meters: "meter", FirstBatch: "scale", WritesTensor: "count"}


class Table(Keeps):
    """A table that is the same for every call, kept as rotary embeddings keep theirs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.arange(1, 3).double())
        self.cached, self.length = None, 0

    def use(self, y):
        if self.cached is None or self.length < y.shape[0]:
            self.cached = torch.outer(torch.arange(y.shape[0]), self.rates).cos()
            self.length = y.shape[0]
        return y * self.cached[: y.shape[0]]


class Auxiliary(Keeps):
    """A loss of its own, which the loss function reads, and what a debugger would look at."""

    def use(self, y):
        self.auxiliary = y.square().mean()
        self.outputs = {"last": y, "noise": torch.rand_like(y)}
        return y


class Filled(Table):
    """A table in a buffer, of which an attribute says how much is there, as rotary embeddings keep it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filled", torch.zeros(8, 2).double(), persistent=False)

    def use(self, y):
        if y.shape[0] > self.length:
            self.filled[: y.shape[0]] = torch.outer(torch.arange(y.shape[0]), self.rates).cos()
            self.length = y.shape[0]
        return y * self.filled[: y.shape[0]]


class Annealed(Keeps):
    """A weight that grows from call to call, as of a divergence in an autoencoder, beside a counter of samples."""

    def __init__(self):
        super().__init__()
        self.beta, self.calls, self.samples = 0.25, 0, 0

    def use(self, y):
        self.calls, self.samples = self.calls + 1, self.samples + len(y)
        self.beta = min(1.0, self.beta + 0.25)
        return y * self.beta


class LeavesHooks(Keeps):
    """Registers a hook in its first call, as models of transformers do to report the scores of their routers."""

    is_ready = False

    def __init__(self):
        super().__init__()
        self.scores = []

    def use(self, y):
        if not self.is_ready:
            self.layer.register_forward_hook(lambda module, args, output: self.scores.append(output))
            self.is_ready = True
        self.scores.clear()
        return y * self.layer(y.new_ones(4)) + self.scores[0]


COUNTING = [Counter, UnusedCounter, Annealed]
ALLOWED = [Table, Auxiliary, Filled, History, Nested, LeavesHooks, *COUNTING]


class CachesWeights(Keeps):
    """What a weight gives is kept for evaluation until the modes are set, as LeViT of timm keeps its biases."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)

    def use(self, y):
        if self.training:
            return y + self.layer.weight.sum(1)
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.layer.weight.sum(1)
        return y + self.cache["cpu"]


class CachesInputs(CachesWeights):
    def use(self, y):
        return y + self.cache.setdefault("first", y.mean(0))


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.mse_loss(model(batch[0]), batch[1])
    return loss + model[0].auxiliary if isinstance(model[0], Auxiliary) else loss


def members(kind: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    return seeded(lambda: nn.Sequential(kind(), nn.Linear(2, 2)).double(), range(count))


def batches(count: int, number: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(count, 5, 4).double(), torch.randn(count, 5, 2).double()) for _ in range(number)]


def made(models: list[nn.Module], chunk_size: int | None = None, compiled: bool = False) -> tuple[Any, Any]:
    return start(models, loss_fn, hfta.sgd(lr=LRS[: len(models)]), chunk_size=chunk_size, compiled=compiled)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("count", "chunk_size"), [(1, None), (3, None), (3, 1), (3, 2)])
@pytest.mark.parametrize("kind", CARRYING)
def test_what_is_carried_is_refused(kind: type[Keeps], count: int, chunk_size: int | None) -> None:
    step, state = made(members(kind, count), chunk_size)
    message = rf"the model carries '0.{CARRYING[kind]}'.* outside its buffers.* self\.register_buffer"
    for _ in range(2):
        with pytest.raises(hfta.errors.StateError, match=message):
            step(state, batches(count)[0])


class Hooked(Keeps):
    def forward(self, x):
        self.layer.register_forward_hook(lambda module, args, output: output * 2)
        return self.layer(x)


@pytest.mark.parametrize("count", [1, 3])
def test_hooks_that_accumulate_are_refused(count: int) -> None:
    step, state = made(members(Hooked, count))
    with pytest.raises(hfta.errors.StateError, match=r"carries '0\.layer\._forward_hooks' from one call to the next"):
        step(state, batches(count)[0])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", [Hidden, WritesTensor])
def test_compiled_it_is_refused_in_the_same_words(kind: type[Keeps]) -> None:
    step, state = made(members(kind, 3), compiled=True)
    for _ in range(2):
        with pytest.raises(Exception, match=r"the model carries '0\..* outside its buffers.* self\.register_buffer"):
            step(state, batches(3)[0])


@pytest.mark.sampled(every=16)
@pytest.mark.exhaustive(ids="compiled", unless="Auxiliary-3")
@pytest.mark.parametrize(
    ("count", "way"),
    [(1, "together"), (1, "compiled"), *((3, way) for way in WAYS[:4])],
)
@pytest.mark.parametrize("kind", ALLOWED)
def test_attributes_of_one_call_are_those_of_the_loop(kind: type[Keeps], count: int, way: str) -> None:
    if way == "compiled" and kind is LeavesHooks:
        pytest.skip("a compiled step refuses it: Dynamo does not trace the number that a hook gets")
    message = r"each call of the model changes '0\..* make it a buffer, or leave the step"
    is_refused = way == "compiled" and kind in (Counter, Annealed)
    with pytest.raises(Exception, match=message) if is_refused else contextlib.nullcontext():
        assert_as_alone(
            lambda: nn.Sequential(kind(), nn.Linear(2, 2)).double(), batches(3)[0], way, count, loss_fn=loss_fn
        )


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_counters_go_on_through_evaluations_whoever_holds_the_model(count: int, is_held: bool) -> None:
    models, data = members(Annealed, count), batches(count, 2)
    for model in models:
        model[0].beta = 0.01
    template = copy.deepcopy(models[0])
    step = hfta.make_train_step(template if is_held else copy.deepcopy(template), loss_fn, hfta.sgd(lr=LRS[:count]))
    state = step.init(*hfta.stack_params(models), seeds=range(count))
    held_out = batches(1, 3)[2]
    state, history = hfta.fit(
        step, state, data, epochs=2, evaluate=(loss_fn, tuple(x[0] for x in held_out)), progress=False
    )
    for member, model in enumerate(models):
        optimizer, values = torch.optim.SGD(model.parameters(), lr=LRS[member]), []
        for _ in range(2):
            train_solo(model.train(), loss_fn, optimizer, [(x[member], y[member]) for x, y in data])
            values.append(loss_fn(model.eval(), (held_out[0][0], held_out[1][0])).item())
        torch.testing.assert_close(history["loss_fn"][:, member].double(), torch.tensor(values).double())
        for path, param in model.named_parameters():
            torch.testing.assert_close(state.params[path][member], param.detach(), rtol=1e-10, atol=1e-12)
    assert template[0].calls == (6 if is_held else 0)


@pytest.mark.parametrize("kind", [UnusedCounter, Annealed])
def test_replayed_steps_count_too(kind: type[Keeps], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_STEPS", 0)
    models = members(kind, 3)
    step, state = start(models, loss_fn, hfta.sgd(lr=LRS), replay=True)
    for _ in range(8):
        state, _ = step(state, batches(3)[0])
    assert models[0][0].calls == 8 and step.status.startswith("eager")


def test_evaluation_may_cache_what_training_drops() -> None:
    models, data = members(CachesWeights, 3), batches(3)
    step, state = made(models)
    evaluate = hfta.make_eval_step(models[0], loss_fn, batch_dims=0)
    for batch in data:
        state, _ = step(state, batch)
        for member, model in enumerate(hfta.unstack_params(models[0], state.params, state.buffers)):
            expected = loss_fn(model.eval(), (batch[0][member], batch[1][member]))
            torch.testing.assert_close(evaluate(state, batch)["loss_fn"][member], expected, rtol=1e-10, atol=1e-12)
    evaluate = hfta.make_eval_step(members(CachesInputs, 1)[0], loss_fn, batch_dims=0)
    with pytest.raises(hfta.errors.StateError, match=r"carries '0\.cache'"):
        evaluate(hfta.stack_params(members(CachesInputs, 3)), data[0])


def test_no_tensor_of_a_call_outlives_it() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Kept(Auxiliary):
        def use(self, y):
            seen.append(weakref.ref(y))
            return super().use(y)

    step, state = made(members(Kept, 3))
    step(state, batches(3)[0])
    gc.collect()
    assert seen and not [ref for ref in seen if ref() is not None]


def test_noise_and_the_global_generator_stay_as_they_were() -> None:
    class Silent(Auxiliary):
        def use(self, y):
            return y + 0.1 * torch.rand_like(y)

    class Noisy(Silent):
        def use(self, y):
            self.kept = y
            return super().use(y)

    results = []
    for kind in (Silent, Noisy):
        models = members(kind, 3)
        apply = hfta.functional(models[0])
        torch.manual_seed(3)
        first = hfta.vmap(apply, randomness="different")(*hfta.stack_params(models), batches(3)[0][0])[0]
        results.append((first, torch.rand(2)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
