"""Operators under the contract of rules, by family; one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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

LINEAR = [
    RuleCase("linear", F.linear, _randn((2, 4, 3), (5, 3), (5,))),
    RuleCase("linear of one row", F.linear, _randn((3,), (5, 3), (5,))),
    RuleCase("linear without bias", F.linear, _randn((4, 3), (5, 3))),
    RuleCase("mm", torch.mm, _randn((4, 3), (3, 5))),
    RuleCase("addmm", lambda *a: torch.addmm(*a, beta=0.5, alpha=2.0), _randn((5,), (4, 3), (3, 5))),
    RuleCase("addmm of a matrix", torch.addmm, _randn((4, 5), (4, 3), (3, 5))),
]

CONV = [
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
]

NORM = [
    RuleCase("batch_norm in training", _batch_norm(True), _randn((4, 3, 2, 2), (3,), (3,), (3,), (3,))),
    RuleCase("batch_norm in evaluation", _batch_norm(False), _randn((4, 3, 5), (3,), (3,), (3,), (3,))),
    RuleCase("batch_norm without anything", lambda x: F.batch_norm(x, None, None, training=True), _randn((4, 3))),
]

POOLING = [
    RuleCase("max_pool2d", lambda x: F.max_pool2d(x * 1, 2, return_indices=True), _randn((2, 3, 4, 6))),
    RuleCase(
        "max_pool2d after conv2d", lambda x, w: F.max_pool2d(F.conv2d(x, w), 2), _randn((2, 3, 5, 5), (4, 3, 2, 2))
    ),
    RuleCase("max_pool2d of one image", lambda x: F.max_pool2d(x, 2), _randn((3, 4, 4))),
]

LOSS = [
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
]

ATTENTION = [
    RuleCase("attention", _attention(), _randn(*_QKV)),
    RuleCase("attention, causal", _attention(is_causal=True), _randn(*_QKV)),
    RuleCase("attention with a mask", _attention(scale=0.3), _randn(*_QKV, (5, 6))),
    RuleCase("attention with a mask per sample", _attention(), _randn(*_QKV, (2, 1, 5, 6))),
    RuleCase("attention with a mask per head", _attention(), _randn(*_QKV, (1, 2, 5, 6))),
]

EMBEDDING: list[RuleCase] = []

RECURRENT: list[RuleCase] = []

COMPOSITE: list[RuleCase] = []

RULE_CASES = [*LINEAR, *CONV, *NORM, *POOLING, *LOSS, *ATTENTION, *EMBEDDING, *RECURRENT, *COMPOSITE]
