"""Normalisation beyond the contracts of rules and modules: cumulative averages, over many batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta

M = 3


def _close(got: Any, expected: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("first", [0, 1])
def test_cumulative_average_in_a_step(first: int) -> None:
    modules = [nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=None)).double() for _ in range(M)]
    for i, module in enumerate(modules):
        for _ in range(i * first):
            module(torch.randn(5, 2, dtype=torch.float64))
    loss_fn = lambda model, x: model(x).pow(3).mean()  # noqa: E731
    step: Any = hfta.make_train_step(modules[0], loss_fn, hfta.sgd(lr=[0.1, 0.2, 0.3]))
    state = step.init(*hfta.stack_params(modules), seeds=range(M))
    optimizers = [torch.optim.SGD(m.parameters(), lr) for m, lr in zip(modules, (0.1, 0.2, 0.3), strict=True)]
    for _ in range(4):
        x = torch.randn(M, 5, 2, dtype=torch.float64)
        state, _ = step(state, x)
        for module, optimizer, one in zip(modules, optimizers, x, strict=True):
            optimizer.zero_grad()
            loss_fn(module, one).backward()
            optimizer.step()
    params, buffers = hfta.stack_params(modules)
    _close((state.params, state.buffers), (dict(params), dict(buffers)))


SHARED = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm(2),
    "rms": lambda: nn.RMSNorm(2),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", SHARED)
def test_weights_and_statistics_of_members_that_share_a_batch(name: str) -> None:
    modules = [SHARED[name]().double() for _ in range(M)]
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        module(torch.randn(5, 4, 3, 2, dtype=torch.float64))
    (params, buffers), x = hfta.stack_params(modules), torch.randn(5, 4, 3, 2, dtype=torch.float64)
    for training in (True, False):
        apply = hfta.functional(modules[0].train(training))
        output, buffers = hfta.vmap(apply, in_dims=(0, 0, None))(params, buffers, x)
        _close(output, torch.stack([module.train(training)(x) for module in modules]))
    _close(buffers, dict(hfta.stack_params(modules).buffers))
