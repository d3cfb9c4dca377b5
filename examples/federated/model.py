"""What every client trains: a small network, handwritten digits, and shards of them in which labels are skewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Sequential):
    """Two layers, 64 pixels to 10 digits."""

    def __init__(self, width: int = 32):
        super().__init__(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def loss_fn(model: Callable[[Any], Tensor], batch: Batch) -> Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: Callable[[Any], Tensor], batch: Batch) -> Tensor:
    """The share of digits that are recognised."""
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


def load() -> tuple[Batch, Batch]:
    """Digits to train on and to test on."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, second = rows.split([1400, len(rows) - 1400])
    images = x.float() / 16
    return (images[first], y[first]), (images[second], y[second])


def shards(labels: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """The rows of each client: rows of every label are divided in shares of a Dirichlet distribution.

    Args:
        labels: The label of each row.
        clients: Number of shards, which have no rows in common.
        alpha: Concentration; below 1, most clients have few labels, and some many more rows than others.
        seed: Decides the shares.
    """
    generator = numpy.random.default_rng(seed)
    owner = torch.empty_like(labels)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        shares = generator.dirichlet([alpha] * clients)
        owner[rows] = torch.tensor(generator.choice(clients, len(rows), p=shares))
    client_rows = [(owner == client).nonzero().flatten() for client in range(clients)]
    # A client needs at least one row, so an empty one takes a row from the largest client.
    for client in range(clients):
        if not len(client_rows[client]):
            most = max(range(clients), key=lambda other: len(client_rows[other]))
            client_rows[client], client_rows[most] = client_rows[most][:1], client_rows[most][1:]
    return client_rows
