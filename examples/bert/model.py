"""BERT."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """Layers, features, heads, and features between the two linear layers."""

    layers: int
    dim: int
    heads: int
    hidden: int


MEDIUM, SMALL = Sizes(8, 512, 8, 2048), Sizes(2, 32, 2, 64)


class BERT(nn.Module):
    """An encoder of tokens with a head that predicts them; the head's last layer is the table of tokens.

    Sequences are of one segment, so the table of segments is left out: one of its rows would be added everywhere.

    Args:
        vocabulary: Different tokens.
        length: Tokens of the longest sequence.
        sizes: BERT-Medium's by default.
        causal: Whether a token attends only to itself and earlier tokens.
        dropout: Of embeddings, attention and feed-forward layers.

    References:
        Devlin et al., "BERT: pre-training of deep bidirectional transformers for language understanding", NAACL 2019.
        Turc et al., "Well-read students learn better", arXiv 1908.08962 (BERT-Medium).
    """

    def __init__(self, vocabulary: int, length: int, sizes: Sizes = MEDIUM, causal: bool = False, dropout: float = 0.1):
        super().__init__()
        layers, dim, heads, hidden = sizes
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        dense = nn.Linear(dim, dim)
        self.head = nn.Sequential(dense, nn.GELU(), nn.LayerNorm(dim))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.register_buffer("mask", mask)
        for module in (self.tokens, self.places, dense):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, L] -> [N, L, vocabulary]``."""
        x = self.dropout(self.norm(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        # Left to find out itself, the encoder compares masks and waits for the answer at every step.
        x = self.encoder(x, self.mask, is_causal=self.mask is not None)
        return nn.functional.linear(self.head(x), self.tokens.weight, self.bias)
