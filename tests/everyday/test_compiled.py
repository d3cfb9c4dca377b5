"""Models of everyday, whose step is compiled as one graph, beside the loop of a script."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import hfta_func as hfta

X = torch.randn(24, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum((1, 2)).unsqueeze(1)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]


def depthwise():
    """A depthwise convolution before a batch norm."""
    layers = nn.Conv1d(4, 4, 3, groups=4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)
    return nn.Sequential(*layers)


def parametrized():
    first = parametrizations.spectral_norm(nn.Linear(24, 8))
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 1)))


def pruned():
    """Masks of each member's own."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 1))
    prune.l1_unstructured(model[1], "weight", amount=0.3)
    prune.custom_from_mask(model[3], "weight", torch.rand(1, 8) > 0.3)
    return model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("make", [depthwise, parametrized, pruned, Attention], ids=lambda make: make.__name__)
def test_a_compiled_step_is_the_loop(make, members):
    models, expected = [], []
    for seed in range(members):
        for each in (models, expected):
            torch.manual_seed(seed)
            each.append(make().double())
    step = hfta.make_train_step(models[0], mse, hfta.sgd(lr=0.05, momentum=0.9), batch_dims=None)
    state = step.init(*hfta.stack_params(models), seeds=range(members))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in BATCHES * 2:
        state, _ = compiled(state, batch)
    for model in expected:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch in BATCHES * 2:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
    for found, model in zip(hfta.unstack_params(models[0], *hfta.step.stacked(state)), expected, strict=True):
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9)
