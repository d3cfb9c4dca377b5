"""Checkpointed steps: the same numbers to the last bit, with parts run twice and fewer activations held."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hfta_func as hfta
from cases import WORKLOADS, batches, loss_fn
from comparisons import identical
from hfta_func.models.remat import blocks
from ways import start

M = 3
SEEDS = [11, 7, 1002]


class Block(nn.Module):
    """A residual block with running statistics and noise."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout2d(dropout),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.body(x) + x)


class ResNet(nn.Module):
    def __init__(self, dropout: float = 0.3):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Block(4, dropout), Block(4, dropout))
        self.layer2 = nn.Sequential(nn.AvgPool2d(2), Block(4, dropout))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x.unsqueeze(1))))
        return self.head(self.dropout(x.mean((2, 3))))


class Signal(NamedTuple):
    value: Tensor
    extras: dict[str, Any]


class Parcel:
    """An object that no tree library knows."""

    def __init__(self, value: Tensor):
        self.value = value


class Exchange(nn.Module):
    """Takes and returns trees, draws, reads a tied weight, and keeps two buffers that its result depends on."""

    def __init__(self, tied: nn.Linear):
        super().__init__()
        self.tied = tied
        self.norm = nn.LayerNorm(8)
        self.register_buffer("written", torch.ones(8))
        self.register_buffer("replaced", torch.ones(8))

    def forward(self, signal: Signal, *, scale: float, parcel: Parcel, mask: Tensor | None = None) -> Any:
        x = F.dropout(torch.tanh(self.tied(self.norm(signal.value))), 0.2)
        y = x * self.written.clone() + torch.bernoulli(x.detach().sigmoid()) * self.replaced * scale + parcel.value
        self.written.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        self.replaced = 0.9 * self.replaced + 0.1 * x.detach().square().mean(0)
        return Signal(y, {"mask": mask, "name": "exchange", "shared": [signal.extras["shared"] + 1]}), Parcel(y.sin())


class Exchanges(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 8)
        tied = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Exchange(tied), Exchange(tied)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        signal = Signal(self.embed(x.flatten(1)), {"shared": torch.ones(8, device=x.device)})
        parcel = Parcel(torch.zeros(8, device=x.device))
        for scale, block in zip((0.5, 0.25), self.blocks, strict=True):
            signal, parcel = block(signal, scale=scale, parcel=parcel)
            assert signal.extras["mask"] is None and signal.extras["name"] == "exchange"
            signal = signal._replace(extras={"shared": signal.extras["shared"][0]})
        return self.head(F.dropout(signal.value * signal.extras["shared"], 0.1))


class Tower(nn.Module):
    def __init__(self, depth: int = 4, width: int = 64):
        super().__init__()
        layer = functools.partial(nn.Linear, width, width)
        self.inlet = nn.Linear(12, width)
        self.blocks = nn.Sequential(*(nn.Sequential(*(layer(), nn.Tanh()) * 3) for _ in range(depth)))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inlet(x.flatten(1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(make, 0.3) for name, make in WORKLOADS.items()},
    "resnet": ResNet,
    "exchanges": Exchanges,
}


def _pair(
    make: Callable[[], nn.Module], checkpoint: Any = True, **options: Any
) -> tuple[hfta.step.TrainStep, hfta.step.TrainStep, hfta.step.TrainState]:
    """A step without and one with checkpointing, and a state for both."""
    members, optimizer = [make().double() for _ in range(M)], hfta.sgd(lr=[0.1, 0.05, 0.02], momentum=[0.9, 0.5, 0.0])
    plain, state = start(members, loss_fn, optimizer, SEEDS, **options)
    return plain, hfta.make_train_step(members[0], loss_fn, optimizer, checkpoint=checkpoint, **options), state


def _assert_same_steps(
    plain: Any, checkpointed: Any, state: hfta.step.TrainState, data: list[Any]
) -> hfta.step.TrainState:
    a = b = state
    for batch in data:
        a, expected = plain(a, batch)
        b, metrics = checkpointed(b, batch)
        assert identical(metrics, expected) and identical(b, a)
    return b


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_a_step_without(name: str, options: dict[str, Any]) -> None:
    plain, checkpointed, state = _pair(MODELS[name], **options)
    after = _assert_same_steps(plain, checkpointed, state, batches(M, 4))
    assert all(not torch.equal(after.buffers[path], old) for path, old in state.buffers.items())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("checkpoint", [[""], ["layer1"], ["layer1", "layer1.1", "layer2.1.body"], "stem", []], ids=str)
def test_any_parts_may_be_chosen(checkpoint: Any) -> None:
    plain, checkpointed, state = _pair(ResNet, checkpoint)
    _assert_same_steps(plain, checkpointed, state, batches(M, 3))


class Counter(TorchDispatchMode):
    """Counts operators, and the bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = collections.Counter[str]()
        self.alive = self.peak = 0
        self._known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **kwargs or {})
        self.calls[func.overloadpacket.__name__] += 1
        for leaf in optree.tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, identity: int, size: int) -> None:
        self._known.remove(identity)
        self.alive -= size


def _count(step: hfta.step.TrainStep, state: hfta.step.TrainState, batch: Any) -> Counter:
    step(state, batch)
    with Counter() as counter:
        step(state, batch)
    return counter


def test_the_parts_run_twice_and_hold_less() -> None:
    rows, width, depth = 512, 64, 4
    plain, checkpointed, state = _pair(lambda: Tower(depth, width))
    (batch,) = batches(M, 1, rows)
    for step in (plain, checkpointed):
        # A first step also looks for writes.
        step(state, batch)
    without, with_ = _count(plain, state, batch), _count(checkpointed, state, batch)
    assert without.calls["tanh"] == 3 * depth
    assert with_.calls["tanh"] == 2 * without.calls["tanh"]
    activation = M * rows * width * 8
    # All blocks but one hold one activation instead of those of three layers.
    assert without.peak - with_.peak >= 2 * (depth - 1) * activation
    assert without.alive == with_.alive


def test_the_blocks_of_a_model() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ReLU()
            self.second = nn.ModuleList([nn.ModuleList([Block(2, 0.0), nn.ReLU()]), Block(2, 0.0)])

    assert blocks(ResNet()) == ["layer1.0", "layer1.1", "layer2.1"]
    assert blocks(WORKLOADS["transformer"](0.1)) == ["encoder.layers.0", "encoder.layers.1"]
    assert blocks(WORKLOADS["cnn"](0.1)) == ["features"]
    assert blocks(nn.Linear(2, 3)) == [""]
    assert blocks(nn.Sequential(nn.ReLU(), nn.ReLU())) == [""]
    # A ModuleList is never called, its elements are; what is inside an element is part of it.
    assert blocks(Parts()) == ["second.0.0", "second.1"]


@pytest.mark.parametrize(
    ("make", "path", "first"),
    [(ResNet, "layer3", "layer1.0"), (ResNet, "stem.weight", "layer1.0"), (Exchanges, "blocks", "blocks.0")],
)
def test_parts_that_are_not_called_are_named(make: Callable[[], nn.Module], path: str, first: str) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint names '{path}', which .* its blocks are '{first}', "):
        hfta.make_train_step(make(), loss_fn, hfta.sgd(lr=0.1), checkpoint=[first, path])


def test_a_part_that_writes_its_input_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5)))
    step, state = start([model], loss_fn, hfta.sgd(lr=0.1), checkpoint=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        step(state, batches(1, 1, dtype=torch.float32)[0])
