"""Bytes that kernels on a CPU allocate besides their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func.run.memory import peak_bytes
from hfta_func.run.predict import Predictor, find_device, measured, walk

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        reason="oneDNN's blocks are as wide as vectors of AVX-512",
    ),
]


def images(count: int) -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 5, 2, 2, groups=16), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(16, 32, 1), nn.Flatten(), nn.Linear(2048, 4)), torch.randn(
        count, 8, 3, 32, 32
    )


def points(count: int) -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128)
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(128, 4)), torch.randn(
        count, 8, 3, 256
    )


@pytest.mark.parametrize("make", [images, points])
@pytest.mark.parametrize("count", [1, 4])
def test_the_memory_of_a_step_with_convolutions(make: Any, count: int) -> None:
    make_model, x = (lambda: make(count)[0]), make(count)[1]
    loss: Any = lambda model, x: model(x).square().mean()  # noqa: E731
    step = hfta.make_train_step(make_model(), loss, hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(make_model, seeds=range(count)), seeds=range(count))
    walk(step, state, x)
    for _ in range(2):
        step(state, x)
    held = sum(leaf.nbytes for leaf in hfta._tree.leaves(state))
    said = Predictor(find_device("EPYC 9755"), measured("cpu"), 1).step(walk(step, state, x))[1]
    taken = peak_bytes(lambda: step(state, x), torch.device("cpu"))
    assert held + said == pytest.approx(held + taken, rel=0.05)
