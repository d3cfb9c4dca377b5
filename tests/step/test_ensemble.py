"""An array as a module: its outputs and gradients are the members' own, whatever holds, trains, saves or exports it."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.errors import BatchError, StackError, StateError
from hfta_func.step import Prediction

M = 3
SEEDS = [11, 7, 1002]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4)).double()


class Recurrent(nn.Module):
    """A layer whose ``.to`` packs weights, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 5, batch_first=True)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Any:
        output, last = self.layer(x[:, None])
        return {"output": output * scale, "last": last}


class Tied(nn.Module):
    """A tied and a frozen weight, a buffer that is not saved, and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.randn(4), persistent=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.frozen(self.b(torch.tanh(self.a(x)))) + self.offset
        return x if y is None else x * y


MODELS = {
    "mlp": mlp,
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    ).double(),
    # Of results that lie apart in memory.
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 2)).double(),
    "gru": lambda: Recurrent().double(),
    "tied": lambda: Tied().double(),
}


def models(name: str = "mlp") -> list[nn.Module]:
    torch.manual_seed(1)
    found = [MODELS[name]() for _ in range(M)]
    if name == "mlp":
        for number, model in enumerate(found, start=1):
            # Statistics that differ from those of any batch.
            model(number * torch.randn(20, 4).double() + 1)
    return found


def ensemble(name: str = "mlp", **options: Any) -> hfta.Ensemble:
    return hfta.Ensemble.from_modules(models(name), **({"seeds": SEEDS} | options))


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def loop(members: list[nn.Module], inputs: Any) -> Any:
    outputs = [member(*x) if isinstance(x, tuple) else member(x) for member, x in zip(members, inputs, strict=True)]
    if isinstance(outputs[0], dict):
        return {name: torch.stack([output[name] for output in outputs]) for name in outputs[0]}
    return torch.stack(outputs)


X = torch.randn(M, 5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.exhaustive(ids="gru|tied")
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_members_own(name):
    whole = ensemble(name).eval()
    members = [model.eval() for model in models(name)]
    assert_same(whole(X[0]), loop(members, [X[0]] * M))
    assert_same(whole(X, batch_dims=0), loop(members, X))
    assert_same(loop(whole.members(), X), loop(members, X))
    alone = hfta.Ensemble.from_modules(members[:1])
    assert_same(alone(X[0]), loop(members[:1], [X[0]]))


def test_arguments_may_be_shared_one_by_one():
    whole, members = ensemble("tied"), models("tied")
    y = torch.randn(5, 4).double()
    assert_same(whole(X, y, batch_dims=(0, None)), loop(members, [(x, y) for x in X]))
    assert_same(whole(y, X, batch_dims=[None, 0]), loop(members, [(y, x) for x in X]))
    assert_same(whole(X, batch_dims=(0,), y=y), loop(members, [(x, y) for x in X]))
    assert_same(whole(X, batch_dims=0, y=X), loop(members, [(x, x) for x in X]))
    assert_same(whole(X, None, batch_dims=0), loop(members, X))
    recurrent = ensemble("gru")
    assert_same(recurrent(X[0], 2.0)["last"], recurrent(X[0])["last"])
    assert_same(recurrent(X[0], scale=2.0)["output"], 2 * recurrent(X[0])["output"])


@pytest.mark.exhaustive(ids="gru")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_flow_through_it_twice(name):
    whole, members = ensemble(name).eval(), [model.eval() for model in models(name)]

    def second(run: Any, x: Tensor) -> Tensor:
        output = run(x)
        output = torch.cat([part.flatten() for part in output.values()]) if isinstance(output, dict) else output
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        first.square().sum().backward()
        return again

    x, y = X[0].clone().requires_grad_(), X[0].clone().requires_grad_()
    assert_same(second(whole, x), second(lambda y: loop(members, [y] * M), y))
    assert_same(x.grad, y.grad)
    expected = [dict(member.named_parameters()) for member in members]
    for path, parameter in whole.stacked().params.items():
        grads = [own[path].grad for own in expected]
        assert parameter.requires_grad == expected[0][path].requires_grad
        if all(grad is not None for grad in grads):
            assert_same(parameter.grad, torch.stack(grads))


def test_trained_by_torch_it_is_the_array_that_steps_train():
    """Noise, running statistics and gradients are those of make_train_step, for 50 steps."""
    whole = ensemble()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    step = hfta.make_train_step(
        models()[0], lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), hfta.sgd(lr=0.1, momentum=0.9)
    )
    state = step.init(*hfta.stack_params(models()), seeds=SEEDS)
    torch.manual_seed(5)
    for _ in range(50):
        batch = torch.randn(2, M, 8, 4).double()
        state, _ = step(state, (batch[0], batch[1]))
        optimizer.zero_grad()
        (whole(batch[0], batch_dims=0) - batch[1]).square().mean((1, 2)).sum().backward()
        optimizer.step()
    assert_same(dict(whole.stacked().params), state.params)
    assert_same(dict(whole.stacked().buffers), state.buffers)
    assert whole.calls.tolist() == state.step.tolist()


def test_noise_is_the_members_own():
    whole = ensemble()
    first, second = whole(X, batch_dims=0), whole(X, batch_dims=0)
    assert not torch.equal(first, second)
    # Whoever else is there, and in whatever order.
    alone = hfta.Ensemble.from_modules(models()[2:], seeds=SEEDS[2:])
    assert_same(alone(X[2]), first[2:])
    other = ensemble().take([2, 0])
    assert_same(other(X[[2, 0]], batch_dims=0), first[[2, 0]])
    # It goes on as it would have.
    assert_same(other.take(1)(X[:1], batch_dims=0), second[:1])
    whole.eval()
    assert torch.equal(whole(X[0]), whole(X[0])) and whole.calls.tolist() == [2] * M


def test_modes_are_those_of_the_model_until_they_are_set():
    given = models()
    for model in given:
        model[1].eval()
    whole = hfta.Ensemble.from_modules(given)
    before = whole.stacked().buffers["1.running_mean"].clone()
    whole(X[0])
    assert torch.equal(whole.stacked().buffers["1.running_mean"], before)
    assert [member[1].training for member in whole.members()] == [False] * M
    whole.train()(X[0])
    assert not torch.equal(whole.stacked().buffers["1.running_mean"], before)
    assert not whole.eval().members()[0].training


@pytest.mark.parametrize("name", MODELS)
def test_it_is_saved_copied_moved_and_pickled(name):
    whole = ensemble(name)
    whole(X[0])
    held = {key: value.clone() for key, value in whole.state_dict().items()}
    assert "offset" not in "".join(held)
    twins = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), ensemble(name, seeds=[0, 0, 0])]
    twins[2].load_state_dict(held)
    expected = whole(X[0])
    for twin in twins:
        assert_same(twin(X[0]), expected, 1e-12)
    low = copy.deepcopy(whole).float().eval()
    assert {p.dtype for p in low.parameters()} == {torch.float32} and low.keys.dtype == torch.int64
    found, wanted = low(X[0].float()), whole.eval()(X[0])
    found, wanted = (list(each.values()) if isinstance(each, dict) else [each] for each in (found, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one.double(), other, 1e-4)


def test_what_it_is_made_of_is_never_written():
    stacked = hfta.stack_params(models())
    before = [leaf.clone() for tree in stacked for leaf in tree.values()]
    whole = hfta.Ensemble(models()[0], *stacked, seeds=SEEDS)
    whole(X[0]).sum().backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    assert all(map(torch.equal, before, [leaf for tree in stacked for leaf in tree.values()]))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["cnn", "convolution"])
def test_torch_exports_it(name):
    whole = ensemble(name).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    handler = importlib.import_module("torch._dynamo.callback").callback_handler
    before = list(handler.end_callbacks)
    program = torch.export.export(whole, (X[0],), dynamic_shapes={"args": ({0: batch},)})
    assert handler.end_callbacks == before, "settings wait for the end of a compilation that is none"
    inputs = torch.randn(7, 4).double()
    assert_same(program.module()(inputs), whole(inputs))
    found = {str(node.target) for node in program.graph.nodes}
    assert "aten.copy_.default" not in found and not [name for name in found if "hfta" in name]


def test_predictions_are_those_of_the_members():
    whole = ensemble("mlp")
    x, members = X.reshape(15, 4), [model.eval() for model in models()]
    with torch.no_grad():
        expected = loop(members, [x] * M)
    found = whole.predict(x)
    assert whole.training and whole.calls.tolist() == [0] * M and not found.outputs.requires_grad
    assert_same(found.outputs, expected)
    assert_same(found.mean, expected.mean(0))
    assert_same(found.std, expected.std(0))
    levels = torch.tensor([0.0, 0.1, 0.77, 1.0]).double()
    assert_same(found.quantiles(levels.tolist()), torch.quantile(expected, levels, dim=0))
    assert_same(found.quantiles(0.5), expected.median(0).values)
    assert type(found)(found.outputs.bfloat16()).quantiles([0.5]).dtype == torch.bfloat16
    spoilt = expected.clone()
    spoilt[1, 2] = torch.nan
    quantiles = type(found)(spoilt).quantiles(levels[:2].tolist())
    torch.testing.assert_close(quantiles, torch.quantile(spoilt, levels[:2], dim=0), equal_nan=True)
    assert_same(found.probabilities, expected.softmax(-1).mean(0))
    classes = expected.argmax(-1)
    pairs = [(classes[i] != classes[j]).double() for i, j in itertools.combinations(range(M), 2)]
    assert_same(found.disagreement, torch.stack(pairs).mean(0))
    assert found.disagreement.dtype == expected.dtype and 0 < found.disagreement.mean() < 1
    # Every spelling of batches, and of states.
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    for batches in (x.split(4), loader, ({"input": part} for part in x.split(6)), [(x,)]):
        assert_same(whole.predict(batches).outputs, expected)
    assert_same(whole.predict(X, batch_dims=0).outputs, loop(members, X))
    step = hfta.make_train_step(models()[0], lambda model, x: model(x).mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.stack_params(models()), seeds=SEEDS)
    for held in (state, hfta.stack_params(models())):
        assert_same(hfta.predict(models()[0], held, x).outputs, expected)
    one = whole.take(0).predict(x)
    assert not one.std.any() and not one.disagreement.any()


def test_bad_input_is_refused_with_a_cure():
    whole, tied, stacked = ensemble(), models("tied")[0], hfta.stack_params(models())
    with pytest.raises(BatchError, match=r"\[0\] is \[5, 4\] but the array .* share one batch by batch_dims=None"):
        whole(X[0], batch_dims=0)
    with pytest.raises(BatchError, match=r"input\['args'\] is a .* of \[0\] but batch_dims has a tuple of \[0, 1\]"):
        whole(X, batch_dims=(0, 0))
    for call, error, words in (
        (lambda: whole.predict(X[:2], batch_dims=0), BatchError, r"\[2, 5, 4\] but the array has 3 models"),
        (lambda: hfta.Ensemble(tied, *stacked), StackError, "pass the model that the array was stacked from"),
        (lambda: hfta.Ensemble.from_modules(nn.Linear(2, 2)), StackError, r"pass \[model\]"),
        (lambda: hfta.Ensemble.from_modules([]), StackError, "no models"),
        (lambda: hfta.predict(tied, stacked, X[0]), StateError, "must be of the same model"),
        (lambda: whole.predict(X[0]).quantiles([0.5, 1.5]), RuntimeError, r"in the range \[0, 1\]"),
        (lambda: Prediction(torch.zeros(3, 5, 1)).probabilities, ValueError, r"scores are .* of two classes or more"),
    ):
        with pytest.raises(error, match=words):
            call()
    table = hfta.Ensemble.from_modules([nn.Embedding(5, 2, max_norm=1.0) for _ in range(M)])
    with pytest.raises(StateError, match="train with make_train_step"):
        table(torch.tensor([0, 1]))
    assert table.eval()(torch.tensor([0, 1])).norm(dim=-1).max() <= 1 + 1e-6


class _Normalised(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).square().sum())(x),
    "vjp": lambda call, x: (lambda output, vjp: vjp(2 * output)[0])(*torch.func.vjp(call, x)),
    "jacrev": lambda call, x: torch.func.jacrev(lambda x: call(x).square().sum())(x),
    "jacfwd": lambda call, x: torch.func.jacfwd(lambda x: call(x).square().sum())(x),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_an_ensemble_in_train_mode(name, momentum, count):
    models = [_Normalised(momentum).double() for _ in range(count)]
    ensemble = hfta.Ensemble.from_modules(models).train()
    x = torch.randn(6, 4, dtype=torch.float64)
    found = TRANSFORMS[name](ensemble, x)
    inputs = x.clone().requires_grad_()
    total = sum(model(inputs).square().sum() for model in models)
    torch.testing.assert_close(found, *torch.autograd.grad(total, inputs), rtol=1e-10, atol=1e-12)
    # Each call counts, and its statistics are kept without derivatives.
    assert ensemble.calls.tolist() == [1] * count
    for path, buffer in hfta.stack_params(models).buffers.items():
        torch.testing.assert_close(ensemble.stacked().buffers[path], buffer, rtol=1e-10, atol=1e-12)
