"""A 1-D convolutional and a recurrent network for windows of signals, both a trunk with a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class CNN(nn.Module):
    """Two convolutions; what they find in four parts of the window goes to the head."""

    def __init__(self, channels: int, outputs: int, width: int = 16):
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv1d(channels, width, 7, 2), nn.ReLU(), nn.Conv1d(width, 2 * width, 5, 2), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(4), nn.Flatten()),
        )
        self.head = nn.Linear(8 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, L] -> [N, outputs]``."""
        return self.head(self.trunk(x))


class GRU(nn.Module):
    """A recurrent layer over pairs of samples, whose last state goes to the head."""

    def __init__(self, channels: int, outputs: int, width: int = 16):
        super().__init__()
        self.trunk = nn.GRU(2 * channels, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, L] -> [N, outputs]``."""
        pairs = x.unflatten(2, (-1, 2)).permute(0, 2, 3, 1).flatten(2)
        return self.head(self.trunk(pairs)[0][:, -1])


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of classes, and the squared error of numbers."""
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs[:, 0], targets)
    return nn.functional.cross_entropy(outputs, targets)


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss to stop by, and the share of wrong classes, or the squared error."""
    wrong = (model(batch[0]).argmax(1) != batch[1]).float().mean()
    loss = loss_fn(model, batch)
    return {"val_loss": loss, "error": loss if torch.is_floating_point(batch[1]) else wrong}
