"""A network that predicts a mean and a variance, and what a deep ensemble makes of several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Regressor(nn.Module):
    """Two hidden layers; the outputs are the mean and the logarithm of the variance of a normal distribution."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, features] -> [N, 2]``."""
        mean, log_var = self.layers(x).unbind(-1)
        # Within what float32 can square.
        return torch.stack([mean, log_var.clamp(-10, 10)], -1)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The negative log-likelihood of one model, without its constant."""
    inputs, targets = batch
    mean, log_var = model(inputs).unbind(-1)
    return nn.functional.gaussian_nll_loss(mean, targets, log_var.exp())


def nll(model: nn.Module, batch: Batch) -> Tensor:
    """The same, to report."""
    return loss_fn(model, batch)


def mixture(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of an equal mixture of the members' distributions, ``[M, N, 2] -> [N], [N]``.

    References:
        Lakshminarayanan et al., "Simple and scalable predictive uncertainty estimation using deep ensembles", NeurIPS 2017.
    """
    mean, log_var = outputs.unbind(-1)
    whole = mean.mean(0)
    return whole, (log_var.exp() + mean.square()).mean(0).sub(whole.square()).clamp(min=0).sqrt()
