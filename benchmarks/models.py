"""Two models that HFTA was published with, at their published sizes, as plain modules."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., CVPR 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W] -> [N, outputs, H / stride, W / stride]``."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """ResNet-18 with the stem for ImageNet, as HFTA trains it on CIFAR-10."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 256, 512)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(i, o, 1 if i == o else 2), BasicBlock(o, o, 1))
                for i, o in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, H, W] -> [N, classes]``."""
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class TransformerLM(nn.Module):
    """A small Transformer language model: d 128, two layers, two heads, feed-forward 128, dropout 0.2."""

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
        return self.decoder(self.encoder(x, self.mask))
