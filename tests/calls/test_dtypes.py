"""The dtypes of results are those of one model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from ways import loss

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
@pytest.mark.parametrize("name", PROMOTED)
def test_numbers_count_less_than_tensors_with_axes(name, count):
    torch.manual_seed(0)
    models, x = [Applies(PROMOTED[name]) for _ in range(count)], torch.randn(count, 5, 4, dtype=torch.float64)
    stacked, expected = hfta.stack_params(models), loss(models[0], x[0].clone()).detach()
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1))
    for metrics in (
        hfta.make_eval_step(models[0], loss, batch_dims=0)(stacked, x),
        step(step.init(*stacked, seeds=range(count)), x)[1],
    ):
        assert metrics["loss"].dtype == expected.dtype
        torch.testing.assert_close(metrics["loss"][0], expected)
