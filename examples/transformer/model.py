"""A small Transformer language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class TransformerLM(nn.Module):
    """d 128, two layers, two heads, feed-forward 128, dropout 0.2, as HFTA trains it on WikiText-2.

    References:
        Vaswani et al., "Attention is all you need", NeurIPS 2017.
    """

    def __init__(self, vocabulary: int, length: int, dim: int = 128, dropout: float = 0.2):
        super().__init__()
        self.dim = dim
        self.embed = nn.Embedding(vocabulary, dim)
        place = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        self.register_buffer("place", torch.stack([place.sin(), place.cos()], -1).flatten(1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, 2, dim, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, L] -> [N, L, vocabulary]``."""
        x = self.dropout(self.embed(tokens) * math.sqrt(self.dim) + self.place)
        # Left to find out itself, the encoder compares masks and waits for the answer at every step.
        return self.decoder(self.encoder(x, self.mask, is_causal=True))
