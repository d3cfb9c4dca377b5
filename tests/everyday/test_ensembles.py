"""What people do with a module's layers, done with an ensemble's, beside the same on plain models."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import seeded, start, train_solo


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    ).double()


def make(count: int) -> tuple[hfta.Ensemble, list[nn.Module]]:
    models = seeded(make_model, range(count))
    return hfta.Ensemble.from_modules(models), models


def batches(number: int = 3) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(16, 6).double() for _ in range(number)]


def assert_alike(ensemble: hfta.Ensemble, models: list[nn.Module]) -> None:
    for i, (found, expected) in enumerate(zip(ensemble.members(), models, strict=True)):
        assert_trees_close({**found.state_dict()}, {**expected.state_dict()}, 1e-10, f"model {i}")


@pytest.mark.parametrize("count", [1, 3])
def test_statistics_after_averaging_weights(count):
    ensemble, models = make(count)
    update_bn(batches(), ensemble)
    for model in models:
        update_bn(batches(), model)
    assert_alike(ensemble, models)
    assert [m.momentum for m in ensemble.modules() if isinstance(m, nn.BatchNorm1d)] == [0.1]


@pytest.mark.parametrize("count", [1, 3])
def test_dropout_on_and_batch_norms_off(count):
    ensemble, models = make(count)
    x = batches()[0]
    ensemble.eval()
    for layer in ensemble.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()
    draws = torch.stack([ensemble(x) for _ in range(400)]).detach()
    assert not torch.equal(draws[0], draws[1])
    assert_alike(ensemble, models)
    for layer in ensemble.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    expected = torch.stack([model.eval()(x) for model in models])
    torch.testing.assert_close(ensemble(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ensemble.eval()(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [1, 3])
def test_initialised_by_apply(count):
    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    ensemble, models = make(count)
    torch.manual_seed(3)
    ensemble.apply(init)
    torch.manual_seed(3)
    for model in models:
        model.apply(init)
    assert_alike(ensemble, models)


@pytest.mark.parametrize("by_apply", [False, True])
def test_frozen_batch_norms_and_groups_by_class(by_apply):
    def freeze(layer: nn.Module) -> None:
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval().requires_grad_(False)
        if isinstance(layer, nn.Dropout):
            layer.eval()

    def train(model: nn.Module, loss: Any) -> None:
        model.train()
        if by_apply:
            model.apply(freeze)
        else:
            for layer in model.modules():
                freeze(layer)
        norms = [p for layer in model.modules() if isinstance(layer, nn.LayerNorm) for p in layer.parameters()]
        rest = [p for p in model.parameters() if p.requires_grad and all(p is not norm for norm in norms)]
        groups = [{"params": rest, "weight_decay": 0.3}, {"params": norms}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0)
        train_solo(model, lambda model, x: loss(model(x)), optimizer, batches())

    ensemble, models = make(3)
    train(ensemble, lambda outputs: outputs.square().mean((1, 2)).sum())
    for model in models:
        train(model, lambda output: output.square().mean())
    assert_alike(ensemble, models)
    assert [p.requires_grad for p in ensemble.members()[0].parameters()] == [
        p.requires_grad for p in models[0].parameters()
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_a_hook_of_a_layer_is_called_once_with_all_members(count):
    ensemble, models = make(count)
    ensemble.eval()
    x, features, inputs = batches()[0], [], []
    layer: Any = next(layer for layer in ensemble.modules() if isinstance(layer, nn.LayerNorm))
    handle = layer.register_forward_hook(lambda module, args, output: features.append((module, output.detach())))
    scale = ensemble.array[6].register_forward_pre_hook(lambda module, args: (inputs.append(1), (args[0] * 2,))[1])
    doubled = ensemble(x)
    plain = [model.eval()[:6](x) for model in models]
    assert len(features) == len(inputs) == 1 and features[0][0] is layer
    torch.testing.assert_close(features[0][1], torch.stack(plain), rtol=1e-10, atol=1e-10)
    expected = torch.stack([model[6](2 * hidden) for model, hidden in zip(models, plain, strict=True)])
    torch.testing.assert_close(doubled, expected, rtol=1e-10, atol=1e-10)
    handle.remove()
    scale.remove()
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(ensemble(x), expected, rtol=1e-10, atol=1e-10)
    assert len(features) == 1


def test_what_would_take_members_for_an_axis_is_refused():
    ensemble, _ = make(3)
    layer: Any = ensemble.array[0]
    for copied in (ensemble, copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble)), ensemble.float().double()):
        with pytest.raises(hfta.errors.StateError, match=r"the first is the models.*ensemble\.apply\(init\)"):
            [p for p in copied.parameters() if p.dim() >= 2]
    with pytest.raises(hfta.errors.StateError, match=r"ensemble\.apply\(init\)"):
        nn.init.xavier_uniform_(layer.weight)
    with pytest.raises(hfta.errors.StateError, match=r"ensemble\.apply\(init\)"):
        nn.init.orthogonal_(layer.weight)
    with pytest.raises(hfta.errors.StateError, match=r"hfta\.muon"):
        torch.optim.Muon([layer.bias])


@pytest.mark.parametrize("count", [1, 3])
def test_an_activation_is_another_function(count):
    torch.manual_seed(0)
    models = [nn.TransformerEncoderLayer(6, 2, 8, 0.0, norm_first=True).double() for _ in range(count)]
    ensemble, x = hfta.Ensemble.from_modules(models), batches()[0]
    before = ensemble(x)
    for model in (ensemble.array, *models):
        model.activation = nn.functional.silu
    torch.testing.assert_close(ensemble(x), torch.stack([model(x) for model in models]), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(ensemble(x), before)


@pytest.mark.parametrize("change", ["quantize", "prune", "replace", "forward"])
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_layers_are_changed_in_models(change):
    ensemble, _ = make(3)
    ensemble.eval()
    with pytest.raises((hfta.errors.StateError, RuntimeError), match=r"Ensemble\.from_modules|should be 2-dimensional"):
        if change == "quantize":
            ensemble = torch.ao.quantization.quantize_dynamic(ensemble.float(), {nn.Linear})
        elif change == "prune":
            nn.utils.prune.l1_unstructured(ensemble.array[0], "weight", 0.3)
        elif change == "forward":
            ensemble.array[2].forward = torch.tanh
        else:
            ensemble.array[2] = nn.Tanh()
        ensemble(batches()[0].to(next(ensemble.parameters()).dtype))


@dataclasses.dataclass
class Result:
    y: Tensor
    loss: Tensor | None
    count: int


class Returns(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.hold, self.place, self.wrap = nn.Linear(6, 2), nn.Dropout(0.0), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.place(self.hold(x)))


def pair(y):
    return y, None


def numbered(y):
    return {"y": y, "rows": 3, "name": "a"}


def as_dataclass(y):
    return Result(y, None, 2)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wrap", [pair, numbered, as_dataclass])
def test_what_a_model_returns_beside_tensors(wrap, count):
    models = [Returns(wrap).double() for _ in range(count)]
    output = hfta.Ensemble.from_modules(models)(batches()[0])
    expected = torch.stack([model.hold(batches()[0]) for model in models])
    y = output.y if wrap is as_dataclass else output["y"] if wrap is numbered else output[0]
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    rest = wrap(0)
    assert (type(output), output[1] if wrap is pair else None) == (type(rest), None)
    if wrap is numbered:
        assert output["rows"] == 3 and output["name"] == "a"
    if wrap is as_dataclass:
        assert output.loss is None and output.count == 2


def test_half_precision_leaves_the_members_numbers_as_they_are():
    ensemble = hfta.Ensemble.from_modules([nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate)) for rate in (0.1, 0.3)])
    members = ensemble.half().members()
    assert [member[1].p for member in members] == [0.1, 0.3] and members[0][0].weight.dtype == torch.float16


class Binary(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binarised(nn.Linear):
    def forward(self, x):
        return Binary.apply(super().forward(x))


@pytest.mark.parametrize("count", [1, 3])
def test_a_straight_through_estimator_is_exported(count):
    ensemble = hfta.Ensemble.from_modules([Binarised(6, 4).double() for _ in range(count)]).eval()
    (x,) = batches(1)
    program = torch.export.export(ensemble, (x,)).module()
    assert torch.equal(program(x), torch.stack([member(x) for member in ensemble.members()]))


class Gaussian(nn.Linear):
    """It returns a mean and a variance."""

    def __init__(self):
        super().__init__(6, 2, dtype=torch.float64)

    def forward(self, x):
        mean, rho = super().forward(x).chunk(2, -1)
        return mean, rho.exp()


def test_predictions_of_models_that_return_several_tensors():
    models = [Gaussian() for _ in range(3)]
    ensemble, x = hfta.Ensemble.from_modules(models), batches()[0]
    for predict in (ensemble.predict, ensemble.deploy(), lambda x: hfta.predict(models[0], ensemble.stacked(), x)):
        with pytest.raises(
            hfta.errors.BatchError, match=r"returns a tuple, and predictions are of one tensor .*; wrap"
        ):
            predict(x)
    # The cures of the message.
    metrics = hfta.make_eval_step(models[0], lambda model, x: dict(zip(("mean", "variance"), model(x), strict=True)))
    for found in (ensemble(x), [*metrics(ensemble.stacked(), x).values()]):
        assert_trees_close([*found], [torch.stack(part) for part in zip(*(m(x) for m in models), strict=True)], 1e-12)


class Pooled(nn.Module):
    """Sentences of unequal length: an encoder that is told what is padded, and a mean over all places."""

    def __init__(self, normed: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if normed else None)
        if normed:
            nn.init.uniform_(self.encoder.norm.bias)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padded).mean(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("lengths", [[5, 3, 1, 0], [4, 3, 1, 2]])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("as_float", [False, True])
def test_encoders_fill_padding_with_zeros_in_evaluation(lengths, normed, count, as_float):
    torch.manual_seed(0)
    models = [Pooled(normed).double().eval() for _ in range(count)]
    x, padded = torch.randn(4, 5, 8).double(), torch.arange(5) >= torch.tensor(lengths)[:, None]
    if 0 not in lengths:
        padded = padded.flip(1)  # Padded in front, where PyTorch takes the general path.
    padded = torch.zeros_like(padded, dtype=torch.double).masked_fill(padded, -torch.inf) if as_float else padded
    ensemble = hfta.Ensemble.from_modules(models).eval()
    measure = hfta.make_eval_step(models[0], lambda model, batch: {"mean": model(*batch).mean(1)})
    with torch.no_grad():
        expected = torch.stack([model(x, padded) for model in models])
        torch.testing.assert_close(ensemble(x, padded), expected, rtol=1e-10, atol=1e-10)
    _, state = start(models, lambda model, batch: model(*batch).mean(), hfta.sgd(lr=0.1))
    torch.testing.assert_close(measure(state, (x, padded))["mean"], expected.mean(2), rtol=1e-10, atol=1e-10)
