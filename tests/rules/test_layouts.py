"""Views of tensors, which lie apart in an array: as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ways import WAYS, assert_as_alone

pytestmark = pytest.mark.usefixtures("one_thread", "double")


class Model(nn.Module):
    def __init__(self, ask: Callable[[Any], Any]):
        super().__init__()
        self.conv, self.ask = nn.Conv2d(1, 3, 2), ask

    def forward(self, x: Tensor) -> Tensor:
        # An array puts its members between samples and channels.
        return self.ask(self.conv(x[None, None].expand(2, 1, 5, 4)))


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "write into a view": lambda y: y * y.view(2, -1).mul_(2).sum(),
    "write beside a view": lambda y: [flat := y.view(2, -1), y.mul_(2)][1] + flat.sum(),
    "view": lambda y: y.view(2, -1) * y.relu().view(-1)[0],
}


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("question", QUESTIONS)
def test_as_alone(question: str, count: int, way: str) -> None:
    assert_as_alone(lambda: Model(QUESTIONS[question]), torch.randn(3, 5, 4), way, count)
