"""The dtypes of results are those of one model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ways import assert_as_alone

Func = Callable[[nn.Linear, Tensor], Tensor]

PROMOTED: dict[str, Func] = {
    "where of whole numbers": lambda fc, x: fc(x) * torch.where(x > 0, torch.arange(4), torch.tensor(2.5)),
    "where as a method": lambda fc, x: fc(x).float().where(x > 0, other=torch.tensor(2.0, dtype=torch.float64)),
}


class Applies(nn.Module):
    """A function of a linear layer."""

    def __init__(self, func: Func) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.func = func

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self.fc, x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "evaluated"])
@pytest.mark.parametrize("name", PROMOTED)
def test_numbers_count_less_than_tensors_with_axes(name, way, count):
    assert_as_alone(lambda: Applies(PROMOTED[name]), torch.randn(3, 5, 4, dtype=torch.float64), way, count)
