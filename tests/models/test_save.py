"""``save="less"``: what cheap functions can make again is not kept for the backward pass, and nothing else changes."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfta_func as hfta
from hfta_func.calls.recompute import Recalls, cheap
from hfta_func.run.memory import peak_bytes
from ways import start

DIM = 8


class Encoder(nn.Module):
    """Normalisation, attention with dropout, and GELU."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.2, "gelu", batch_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, 2), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


class Convolutions(nn.Module):
    """One normalisation used twice, ReLU in place and not, dropout of channels, and the largest elements."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a normalisation has rounding as its gradient.
        self.first, self.second = (nn.Conv1d(DIM, DIM, 1, bias=False) for _ in range(2))
        self.norm, self.relu, self.drop = nn.BatchNorm1d(DIM), nn.ReLU(inplace=True), nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.mT)).relu()
        x = self.drop(self.relu(self.norm(self.second(x))))
        return F.silu(x).amax(-1)


class Largest(nn.Module):
    """The largest of normalised elements, whose derivative looks for them in what is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(DIM, 4 * DIM, 1, bias=False), nn.BatchNorm1d(4 * DIM)
        self.last = nn.Linear(4 * DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.mT)).relu().amax(-1))


class Views(nn.Module):
    """Results that are read in other shapes than they were made in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        heads = hidden.unflatten(-1, (4, DIM)).transpose(-2, -3)
        return self.second(F.dropout(heads, 0.1).tanh()) + hidden.mean() * hidden.sigmoid().sum()


def blocks() -> nn.Module:
    """Normalised and activated four times."""
    parts = [(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*(module for part in parts for module in part))


def convolutional_blocks() -> nn.Module:
    """The same with batch normalisation."""
    parts = [(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(module for part in parts for module in part))


def dropping() -> nn.Module:
    """Dropout before and after a layer."""
    parts = nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * DIM, DIM), nn.Dropout(0.2)
    return nn.Sequential(*parts)


MODELS = {"encoder": Encoder, "convolutions": Convolutions, "largest": Largest, "views": Views, "dropping": dropping}


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(factory: Any, num_models: int, dtype: Any = torch.float64, loss: Any = loss_fn, **options: Any) -> Any:
    seeds = [*range(num_models)]
    params, buffers = optree.tree_map(
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, hfta.init_params(factory, seeds)
    )
    step = hfta.make_train_step(factory(), loss, hfta.sgd(lr=0.1, momentum=0.9), **options)
    state, batch = step.init(params, buffers, seeds=seeds), torch.linspace(-1, 1, num_models * 120).to(dtype)
    for _ in range(3):
        state, metrics = step(state, batch.reshape(num_models, 3, 5, DIM))
    return state, metrics


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_size": 2}, {"chunk_size": 1}, {"checkpoint": True}, {"donate": True}, {"autocast": torch.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same(name, num_models, options):
    expected, found = (train(MODELS[name], num_models, save=save, **options) for save in ("all", "less"))
    close = {"rtol": 1e-2, "atol": 1e-2} if "autocast" in options else {"rtol": 1e-10, "atol": 1e-12}
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, **close), found, expected)


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=str)
@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_the_same(name, num_models, options):
    expected, found = (
        train(MODELS[name], num_models, dtype=torch.float32, save=save, **options) for save in ("all", "less")
    )
    if name not in ("views", "dropping") and num_models > 1:
        # Gradients of normalisations are computed in other ways, which round in other places.
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5), found, expected)
    else:
        assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))


@pytest.mark.parametrize("num_models", [1, 3])
def test_no_mask_of_dropout_is_kept(num_models, monkeypatch):
    pack, dtypes = Recalls._pack, set()

    def noted(self: Recalls, tensor: Tensor) -> Any:
        dtypes.add(tensor.dtype)
        return pack(self, tensor)

    monkeypatch.setattr(Recalls, "_pack", noted)
    train(dropping, num_models, dtype=torch.float32, save="less")
    assert torch.float32 in dtypes and torch.bool not in dtypes


@pytest.mark.parametrize(
    ("factory", "most", "num_models"), [(Encoder, 0.85, 1), (blocks, 0.75, 4), (convolutional_blocks, 0.9, 4)]
)
def test_less_memory(factory, most, num_models):
    seeds, peaks = [*range(num_models)], []
    for save in ("all", "less"):
        step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=0.01), save=save, donate=True)
        state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
        batch = torch.randn(num_models, 32, 16, DIM)
        # Hooks come from the second step on.
        state, _ = step(state, batch)
        peaks.append(peak_bytes(lambda step=step, state=state, batch=batch: step(state, batch), torch.device("cpu")))
    assert peaks[1] < most * peaks[0]


CLASSES = 50


class Words(nn.Module):
    """Scores of classes for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x)))


def classes(batch: Tensor) -> Tensor:
    """A class for every token, of which one in three is not counted."""
    tokens = torch.arange(batch[..., 0].numel()).reshape(batch.shape[:-1])
    return torch.where(tokens % 3 == 0, -100, tokens * 7 % CLASSES)


def entropy(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), classes(batch).flatten())


def entropy_of_one(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[0, 1], classes(batch)[0, 1], reduction="sum")


def with_scores(model: nn.Module, batch: Tensor) -> Any:
    scores = model(batch).flatten(0, 1)
    losses = F.cross_entropy(scores, classes(batch).flatten(), reduction="none")
    return losses.sum() + scores.sin().mean(), {"scores": scores}


def with_a_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    loss = entropy(model, batch)
    (slope,) = torch.autograd.grad(loss, [batch], create_graph=True)
    return loss + slope.square().sum()


def entropy_with_options(model: nn.Module, batch: Tensor) -> Tensor:
    scores, weight = model(batch).flatten(0, 1), torch.linspace(0, 1, CLASSES, dtype=batch.dtype)
    target = classes(batch).flatten()
    return F.cross_entropy(scores, target, weight) + F.cross_entropy(scores, target, label_smoothing=0.1)


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("loss", [entropy, entropy_of_one, with_scores, with_a_penalty, entropy_with_options])
def test_cross_entropy_in_the_memory_of_its_logits_gives_the_same_bits(loss, num_models):
    for dtype in (torch.float64, torch.float32):
        expected, found = (
            train(Words, num_models, dtype=dtype, loss=loss, save=save, donate=True) for save in ("all", "less")
        )
        if loss is with_a_penalty:
            # A second derivative sums in another order.
            optree.tree_map(torch.testing.assert_close, found, expected)
        else:
            assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))


def gelu(x: Tensor) -> Tensor:
    return cheap(F.gelu, x)


def test_an_argument_that_is_written_later_is_noticed():
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    recalls = Recalls()
    with recalls():
        kept = x * 2
        result = (gelu(kept) @ weight).sum()
        with torch.no_grad():
            kept.add_(1)
    with pytest.raises(hfta.errors.StateError, match="written in place after it was used"):
        torch.autograd.grad(result, [x, weight])


def test_a_result_that_is_written_is_kept_as_it_is_then():
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run() -> Tensor:
        made = gelu(x * 2)
        made.add_(1)
        return (made @ weight).sum()

    with Recalls()():
        result = run()
    assert all(map(torch.equal, torch.autograd.grad(result, [x, weight]), torch.autograd.grad(run(), [x, weight])))


def test_results_inside_of_checkpoints_are_noted(monkeypatch):
    noted, note = [], Recalls.note
    monkeypatch.setattr(Recalls, "note", lambda self, *given: (noted.append(given), note(self, *given)))
    step, state = start([nn.Linear(3, 4) for _ in range(2)], checkpointed, hfta.sgd(lr=0.1), save="less", verify=False)
    step(state, torch.randn(2, 5, 3))
    assert noted


def checkpointed(model: nn.Module, batch: Tensor) -> Tensor:
    return checkpoint(F.gelu, model(batch), use_reentrant=False).square().sum()
