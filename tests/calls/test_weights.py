"""Weights that are computed before each call: spectral and weight normalisation, old and new, and pruning."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import hfta_func as hfta
from ways import assert_as_alone, seeded, start

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm. is deprecated")


def _called(model: nn.Module) -> nn.Module:
    """A model whose weights have a history already."""
    model(torch.randn(5, 4))
    return model


def _around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2))


def _pruned() -> nn.Linear:
    layer = prune.random_unstructured(nn.Linear(4, 6), "weight", 0.3)
    return prune.l1_unstructured(prune.random_unstructured(layer, "weight", 0.3), "bias", 0.3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.LSTM(4, 3, batch_first=True), "weight_hh_l0")
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[None])[0][0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parametrized spectral norm": lambda: _around(parametrizations.spectral_norm(nn.Linear(4, 6))),
    "parametrized weight norm": lambda: _around(parametrizations.weight_norm(nn.Linear(4, 6))),
    "spectral norm": lambda: _around(spectral_norm(nn.Linear(4, 6))),
    "spectral norm, called": lambda: _called(_around(spectral_norm(nn.Linear(4, 6)))),
    "weight norm": lambda: _around(weight_norm(nn.Linear(4, 6))),
    "weight norm, called": lambda: _called(_around(weight_norm(nn.Linear(4, 6), dim=None))),
    "pruning": lambda: _around(_pruned()),
    "recurrent": Recurrent,
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.mse_loss(model(batch[0]), batch[1])
    # After a call, the weight is what the call has computed.
    return loss + 0.1 * model[0].weight.square().mean() if isinstance(model, nn.Sequential) else loss


def members(name: str, count: int) -> list[nn.Module]:
    return seeded(lambda: MODELS[name]().double(), range(count))


@pytest.mark.sampled(every=8)
@pytest.mark.exhaustive(ids="compiled", unless="^spectral norm-")
@pytest.mark.parametrize(
    ("count", "way"), [(1, "together"), *((3, way) for way in ("together", "one by one", "in pairs", "compiled"))]
)
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_alone(name: str, count: int, way: str) -> None:
    if way == "compiled" and name == "recurrent":
        pytest.skip("the compiler asks recurrent layers for the memory of their weights")
    batch = torch.randn(count, 5, 4).double(), torch.randn(count, 5, 2).double()
    assert_as_alone(lambda: MODELS[name]().double(), batch, way, count, loss_fn=loss_fn)


@pytest.mark.parametrize("name", MODELS)
def test_members_taken_out_compute_their_own_weights(name: str) -> None:
    models = members(name, 3)
    back = hfta.unstack_params(models[0], *hfta.stack_params(models))
    x = torch.randn(5, 4).double()
    for own, model in zip(back, models, strict=True):
        # Buffers of spectral normalisation change in training.
        own.eval(), model.eval()
        if isinstance(own, nn.Sequential) and not name.startswith("spectral"):
            torch.testing.assert_close(own[0].weight.double(), model[0].weight.double(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(own(x), model(x), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            next(own.parameters()).add_(1)
    assert not torch.equal(back[0](x), models[0](x))


@pytest.mark.parametrize("name", ["spectral norm, called", "weight norm, called", "pruning"])
def test_members_go_to_files_and_come_from_them(name: str, tmp_path: pathlib.Path) -> None:
    models = members(name, 3)
    step, state = start(models, loss_fn, hfta.sgd(lr=0.1))
    state, _ = step(state, (torch.randn(3, 5, 4).double(), torch.randn(3, 5, 2).double()))
    hfta.save(state, tmp_path / "state.safetensors")
    loaded = hfta.load(tmp_path / "state.safetensors", like=state)
    member = hfta.export_model(models[0], loaded, 1)
    torch.save(member.state_dict(), tmp_path / "member.pt")
    own = hfta.export_model(models[0], loaded, 0)
    own.load_state_dict(torch.load(tmp_path / "member.pt"))
    params, buffers = hfta.stack_params([own])
    for own, theirs in ((params, state.params), (buffers, state.buffers)):
        assert own.keys() == theirs.keys() and all(torch.equal(own[path][0], theirs[path][1]) for path in own)


class LargestNorm(nn.Module):
    """A parametrisation that limits norms, as EEGNet of braindecode has it; no look-up table, in spite of its attribute."""

    max_norm = 0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1)


def test_a_parametrization_with_a_largest_norm() -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 2).double()
        torch.nn.utils.parametrize.register_parametrization(model, "weight", LargestNorm())
        return model

    assert_as_alone(make, torch.randn(3, 5, 4).double(), "together")
