"""An optimizer: SGD along a slow average, as in heavy-ball momentum with a rate of its own."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

import hfta_func as hfta
from hfta_func.optim.extend import FIELDS, Hyperparams, Range, decay_mean, leafwise, recorded, restrict

SlowState = namedtuple("SlowState", [*FIELDS, "average"])
restrict(SlowState, alpha=Range.DECAY, mix=Range.NONNEGATIVE)


@recorded
def slow(
    lr: hfta.schedules.PerModel = 0.1, alpha: hfta.schedules.PerModel = 0.9, mix: hfta.schedules.PerModel = 1.0
) -> hfta.GradientTransformation:
    """``a = alpha * a + (1 - alpha) * g``; ``p -= lr * (g + mix * a)``."""

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], average: Tensor) -> Tensor:
        decay_mean(average, grad, k["1-alpha"])
        return grad + k["mix"] * average

    return leafwise(SlowState, Hyperparams(SlowState, lr=lr, alpha=alpha, mix=mix), rule)


class Slow(torch.optim.Optimizer):
    """The same for one model."""

    def __init__(self, params: Any, lr: float, alpha: float, mix: float) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "mix": mix})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                a = self.state[p].get("a", torch.zeros_like(p))
                a = self.state[p]["a"] = group["alpha"] * a + (1 - group["alpha"]) * p.grad
                p -= group["lr"] * (p.grad + group["mix"] * a)
