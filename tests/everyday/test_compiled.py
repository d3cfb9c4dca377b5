"""Models of everyday, whose step is compiled as one graph, beside the loop of a script."""

import pytest
import torch
from torch import nn

from ways import assert_as_alone


def depthwise():
    """A depthwise convolution before a batch norm."""
    layers = nn.Conv1d(4, 4, 3, groups=4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    return nn.Sequential(*layers)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("make", [depthwise, Attention], ids=lambda make: make.__name__)
def test_a_compiled_step_is_the_loop(make, members):
    x = torch.randn(8, 4, 6, dtype=torch.float64)
    assert_as_alone(lambda: make().double(), x, "compiled", members, shared=True, tolerance=1e-9)
