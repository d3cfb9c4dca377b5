"""An array of five members, its loader, and whether two runs of it are the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from comparisons import assert_tensors_close, assert_trees_close
from hfta_func.run.trainers import ExecutorTrainer
from hfta_func.workers.pool import Inline, Pool

M = 5


class Two(Inline):
    """An executor of two workers that are this process."""

    count = 2


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def loss_fn(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    outputs = model(inputs)
    return (outputs - targets).square().mean(), {"size": outputs.detach().abs().mean()}


def data(rows: int = 24) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return inputs, inputs.sum(-1, keepdim=True)


def arrayed(lr: Any = None, loss: Any = loss_fn, **options: Any) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    lr = [0.01 / (i + 1) for i in range(M)] if lr is None else lr
    step = hfta.make_train_step(make(), loss, hfta.sgd(lr=lr, momentum=0.5), **options)
    return step, step.init(*hfta.init_params(make, range(M)), seeds=range(M))


def loader(seeds: Any = range(M), **options: Any) -> hfta.ArrayLoader:
    return hfta.ArrayLoader(data(), 5, seeds=seeds, **options)


def trained(array: tuple[Any, Any], epochs: int = 1, **options: Any) -> hfta.run.Result:
    """A run of a step and its state."""
    return hfta.fit(*array, loader(), epochs=epochs, progress=False, **options)


def assert_same(one: hfta.run.Result, other: hfta.run.Result) -> None:
    assert_trees_close(one.state, other.state, 1e-10, "state")
    assert [*one.history.epochs[0]] == [*other.history.epochs[0]]
    for name in one.history.epochs[0]:
        assert_tensors_close(one.history[name], other.history[name], 1e-10, f"history[{name!r}]", member_dim=1)
    assert one.history.failures == other.history.failures


def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools that are made from now on."""
    found, init = list[Any](), Pool.__init__

    def noted(self: Pool, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(Pool, "__init__", noted)
    return found


def waits(self: ExecutorTrainer) -> bool:
    """Wait for workers to start."""
    return self._owned is None or self._owned.ready(120, everyone=True)


def function_sizes(pool: Any) -> list[int]:
    """Bytes in shared memory of each function that a pool keeps."""
    return [os.stat(content.path).st_size for _, _, content in pool._functions.values()]
