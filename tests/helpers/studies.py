"""Studies of a small network, for tests of studies in this process and in others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta

optuna = pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")
from optuna.distributions import CategoricalDistribution, FloatDistribution  # noqa: E402

from hfta_func import tune  # noqa: E402

X = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(-1, keepdim=True).sin()
SPACE = {
    "lr": FloatDistribution(1e-3, 0.2, log=True),
    "momentum": FloatDistribution(0.0, 0.9),
    "width": CategoricalDistribution([4, 6]),
}
STUDY = dict(nonfusible=("width",), metric="error", direction="minimize", trials=11, epochs=9, progress=False)


class Net(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": loss_fn(model, batch)}


def build(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
    seeds = members["seed"]

    def factory() -> nn.Module:
        return Net(fixed.get("width", 4)).double()

    step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"], momentum=members["momentum"]))
    evaluate = hfta.make_eval_step(factory(), error, batch_dims=None)
    state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
    loader = hfta.ArrayLoader((X, Y), 16, seeds=seeds)
    return tune.Array(step, state, loader, lambda state: evaluate(state, (X, Y)), factory())


def after(first: Callable[..., Any], call: Any) -> Callable[..., Any]:
    """A step or an evaluation before which something else is done with the same arguments."""

    def both(*args: Any) -> Any:
        first(*args)
        return call(*args)

    return both


def told(study: tune.Study) -> list[Any]:
    return [(trial.params, trial.status, [f"{value:.8g}" for (value,) in trial.values]) for trial in study.trials]


SCHEDULERS = {
    "none": None,
    "halving": tune.halving(),
    "hyperband": tune.hyperband(),
    "asynchronous": tune.asynchronous_halving(),
    "median": tune.median_stopping(every=2, startup=3),
    "population": tune.population_based(every=3, share=0.4),
}
