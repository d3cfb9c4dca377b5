"""The tables that contract tests run over: operators, optimizers, workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta


class RuleCase(NamedTuple):
    """A function of one member's tensors; ``make`` draws one member's inputs."""

    name: str
    func: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]


def _randn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def _with_targets(make: Callable[[], tuple[Tensor, ...]], *size: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (*make(), torch.randint(classes, size))


def _batch_norm(training: bool) -> Callable[..., Any]:
    def func(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # What x is mapped over decides whether running statistics are per member; adding it in makes them follow.
        mean, var = mean.detach() + 0 * x.detach().sum(), var.detach().square() + 1 + 0 * x.detach().sum()
        return F.batch_norm(x, mean, var, weight, bias, training, 0.3, 1e-3), mean, var

    return func


def _attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


_QKV = ((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))

RULE_CASES = [
    RuleCase("linear", F.linear, _randn((2, 4, 3), (5, 3), (5,))),
    RuleCase("linear of one row", F.linear, _randn((3,), (5, 3), (5,))),
    RuleCase("linear without bias", F.linear, _randn((4, 3), (5, 3))),
    RuleCase("mm", torch.mm, _randn((4, 3), (3, 5))),
    RuleCase("addmm", lambda *a: torch.addmm(*a, beta=0.5, alpha=2.0), _randn((5,), (4, 3), (3, 5))),
    RuleCase("addmm of a matrix", torch.addmm, _randn((4, 5), (4, 3), (3, 5))),
    RuleCase("conv1d", lambda *a: F.conv1d(*a, stride=2, padding=1), _randn((2, 3, 9), (4, 3, 3), (4,))),
    RuleCase("conv2d", lambda *a: F.conv2d(*a, padding=1), _randn((2, 3, 5, 6), (4, 3, 3, 3), (4,))),
    RuleCase("conv2d grouped", lambda *a: F.conv2d(*a, dilation=2, groups=2), _randn((2, 4, 6, 6), (6, 2, 2, 2), (6,))),
    RuleCase("conv2d depthwise", lambda *a: F.conv2d(*a, groups=3), _randn((2, 3, 4, 4), (6, 1, 2, 2))),
    RuleCase("conv2d of one image", lambda *a: F.conv2d(*a, stride=2), _randn((3, 5, 5), (4, 3, 2, 2), (4,))),
    RuleCase("conv3d", F.conv3d, _randn((2, 2, 3, 4, 4), (3, 2, 2, 2, 2), (3,))),
    RuleCase(
        "conv_transpose1d",
        lambda *a: F.conv_transpose1d(*a, stride=2, output_padding=1),
        _randn((2, 3, 5), (3, 4, 3), (4,)),
    ),
    RuleCase(
        "conv_transpose2d grouped",
        lambda *a: F.conv_transpose2d(*a, stride=2, groups=2),
        _randn((2, 4, 4, 4), (4, 3, 2, 2), (6,)),
    ),
    RuleCase("batch_norm in training", _batch_norm(True), _randn((4, 3, 2, 2), (3,), (3,), (3,), (3,))),
    RuleCase("batch_norm in evaluation", _batch_norm(False), _randn((4, 3, 5), (3,), (3,), (3,), (3,))),
    RuleCase("batch_norm without anything", lambda x: F.batch_norm(x, None, None, training=True), _randn((4, 3))),
    RuleCase("max_pool2d", lambda x: F.max_pool2d(x * 1, 2, return_indices=True), _randn((2, 3, 4, 6))),
    RuleCase(
        "max_pool2d after conv2d", lambda x, w: F.max_pool2d(F.conv2d(x, w), 2), _randn((2, 3, 5, 5), (4, 3, 2, 2))
    ),
    RuleCase("max_pool2d of one image", lambda x: F.max_pool2d(x, 2), _randn((3, 4, 4))),
    RuleCase("cross_entropy", F.cross_entropy, _with_targets(_randn((6, 5)), 6, classes=5)),
    RuleCase(
        "cross_entropy ignoring a class",
        lambda x, y: F.cross_entropy(x, y, ignore_index=1),
        _with_targets(_randn((9, 5)), 9, classes=5),
    ),
    RuleCase(
        "cross_entropy with label smoothing",
        lambda x, y: F.cross_entropy(x + 0 * y.sum(), y, ignore_index=1, label_smoothing=0.1),
        _with_targets(_randn((9, 5)), 9, classes=5),
    ),
    RuleCase(
        "cross_entropy with class weights",
        lambda x, w, y: F.cross_entropy(x, y, w.detach().square()),
        _with_targets(_randn((6, 5), (5,)), 6, classes=5),
    ),
    RuleCase(
        "nll_loss without reduction",
        lambda x, y: F.nll_loss(x, y, reduction="none"),
        _with_targets(_randn((6, 5)), 6, classes=5),
    ),
    RuleCase(
        "nll_loss summed", lambda x, y: F.nll_loss(x, y, reduction="sum"), _with_targets(_randn((6, 5)), 6, classes=5)
    ),
    RuleCase("nll_loss of one sample", F.nll_loss, _with_targets(_randn((5,)), classes=5)),
    RuleCase("cross_entropy of images", F.cross_entropy, _with_targets(_randn((2, 4, 3, 3)), 2, 3, 3, classes=4)),
    RuleCase("attention", _attention(), _randn(*_QKV)),
    RuleCase("attention, causal", _attention(is_causal=True), _randn(*_QKV)),
    RuleCase("attention with a mask", _attention(scale=0.3), _randn(*_QKV, (5, 6))),
    RuleCase("attention with a mask per sample", _attention(), _randn(*_QKV, (2, 1, 5, 6))),
    RuleCase("attention with a mask per head", _attention(), _randn(*_QKV, (1, 2, 5, 6))),
]


class OptimizerCase(NamedTuple):
    """Ours and torch's, from the same keyword arguments; ``knobs`` holds three members' worth of each."""

    name: str
    ours: Callable[..., hfta.GradientTransformation]
    theirs: Callable[..., torch.optim.Optimizer]
    knobs: dict[str, list[Any]]
    options: dict[str, Any]


_ADAM = {
    "lr": [3e-3, 1e-3, 5e-3],
    "betas": [(0.9, 0.999), (0.8, 0.99), (0.5, 0.9)],
    "eps": [1e-8, 1e-6, 1e-4],
    "weight_decay": [0.0, 1e-2, 0.1],
}

OPTIMIZERS = [
    OptimizerCase("sgd", hfta.sgd, torch.optim.SGD, {"lr": [0.1, 0.03, 0.2]}, {}),
    OptimizerCase(
        "sgd with momentum",
        hfta.sgd,
        torch.optim.SGD,
        {
            "lr": [0.05, 0.02, 0.1],
            "momentum": [0.9, 0.0, 0.5],
            "weight_decay": [0.0, 1e-2, 1e-3],
            "dampening": [0.1, 0.5, 0.0],
        },
        {},
    ),
    OptimizerCase(
        "sgd with nesterov",
        hfta.sgd,
        torch.optim.SGD,
        {"lr": [0.05, 0.02, 0.1], "momentum": [0.9, 0.7, 0.5], "weight_decay": [0.0, 1e-2, 1e-3]},
        {"nesterov": True},
    ),
    OptimizerCase("adam", hfta.adam, torch.optim.Adam, _ADAM, {}),
    OptimizerCase("adam with amsgrad", hfta.adam, torch.optim.Adam, _ADAM, {"amsgrad": True}),
    OptimizerCase("adamw", hfta.adamw, torch.optim.AdamW, _ADAM, {}),
    OptimizerCase("adamw with amsgrad", hfta.adamw, torch.optim.AdamW, _ADAM, {"amsgrad": True}),
]


def ours(case: OptimizerCase, members: list[int] | None = None) -> hfta.GradientTransformation:
    """Our optimizer for the given members of three."""
    chosen = range(3) if members is None else members
    knobs: dict[str, Any] = {name: [values[member] for member in chosen] for name, values in case.knobs.items()}
    if "betas" in knobs:
        knobs["betas"] = tuple(zip(*knobs["betas"], strict=True))
    return case.ours(**knobs, **case.options)


def theirs(case: OptimizerCase, member: int, parameters: Any) -> torch.optim.Optimizer:
    """Torch's optimizer for one member."""
    return case.theirs(parameters, **{name: values[member] for name, values in case.knobs.items()}, **case.options)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class CNN(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(dropout),
            nn.Conv2d(4, 6, 2, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x.unsqueeze(1)).flatten(1)))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


WORKLOADS: dict[str, Callable[[float], nn.Module]] = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}
"""Models over inputs ``[N, 4, 3]`` and five classes; the argument is the dropout rate."""


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def batches(
    num_models: int, steps: int, rows: int = 6, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Batches ``[M, N, ...]`` that differ between members and steps."""
    return [
        (torch.randn(num_models, rows, 4, 3, dtype=dtype), torch.randint(5, (num_models, rows))) for _ in range(steps)
    ]


def models(name: str, num_models: int, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [WORKLOADS[name](dropout).to(dtype) for _ in range(num_models)]
