"""Losses and metrics of one model that several examples share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.common.task import Batch, Metrics


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Of a classifier."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Batch) -> Metrics:
    """The share of samples whose class is found."""
    inputs, labels = batch
    return {"accuracy": (model(inputs).argmax(-1) == labels).float().mean()}


def token_entropy(logits: Tensor, targets: Tensor, where: Tensor | None = None) -> Tensor:
    """Cross-entropy of tokens ``[N, L]``, all or those of a mask: the logarithm of perplexity."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    if where is None:
        return losses.mean()
    where = where.flatten().to(losses.dtype)
    return (losses * where).sum() / where.sum().clamp(min=1)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Of a model of text, whose targets are the tokens that follow."""
    tokens, targets = batch
    return token_entropy(model(tokens), targets)


def perplexity(metrics: Metrics) -> Metrics:
    """From the mean over all tokens."""
    return {"perplexity": torch.exp(metrics["entropy"])}
