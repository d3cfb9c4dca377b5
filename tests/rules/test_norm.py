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


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.LazyBatchNorm1d, nn.SyncBatchNorm])
def test_cumulative_average_over_many_batches(make: Any, compiled: bool) -> None:
    modules = [make(*(() if make is nn.LazyBatchNorm1d else (4,)), momentum=None).double() for _ in range(M)]
    for i, module in enumerate(modules):
        for _ in range(i + 1):
            module(torch.randn(5, 4, dtype=torch.float64))
    params, buffers = hfta.stack_params(modules)
    apply = hfta.vmap(hfta.functional(modules[0]))
    if compiled:
        torch._dynamo.reset()
        apply = torch.compile(apply, fullgraph=True, backend="aot_eager")
    evaluate = hfta.vmap(hfta.functional(modules[0].eval()))
    modules[0].train()
    for _ in range(4):
        x = torch.randn(M, 5, 4, dtype=torch.float64)
        output, buffers = apply(params, buffers, x)
        _close(output, torch.stack([module(one) for module, one in zip(modules, x, strict=True)]))
    _close(buffers, dict(hfta.stack_params(modules).buffers))
    output, unchanged = evaluate(params, buffers, x)
    _close(output, torch.stack([module.eval()(one) for module, one in zip(modules, x, strict=True)]))
    _close(unchanged, buffers, 0)


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
