"""PointNet for classification and segmentation.

References:
    Qi, Su, Mo and Guibas, "PointNet: deep learning on point sets for 3D classification and segmentation", CVPR 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAPER, SMALL = (64, 128, 1024, 512, 256), (16, 32, 64, 32, 32)
"""Channels of three layers for each point, and of two layers for the cloud."""

Sizes = tuple[int, int, int, int, int]


def shared(inputs: int, outputs: int, act: bool = True) -> nn.Sequential:
    """One layer for each point."""
    return nn.Sequential(nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), *([nn.ReLU()] if act else []))


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """One layer for the cloud."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())


class Transform(nn.Module):
    """Predicts a matrix for each cloud (STN3d, STNkd), which starts near the identity."""

    def __init__(self, channels: int, sizes: Sizes):
        super().__init__()
        a, b, c, d, e = sizes
        self.points = nn.Sequential(shared(channels, a), shared(a, b), shared(b, c))
        self.cloud = nn.Sequential(dense(c, d), dense(d, e), nn.Linear(e, channels * channels))
        self.register_buffer("identity", torch.eye(channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, P] -> [N, C, C]``."""
        return self.cloud(self.points(x).amax(-1)).unflatten(-1, self.identity.shape) + self.identity


class Features(nn.Module):
    """Of each point, of the cloud, and the second transform."""

    def __init__(self, sizes: Sizes, feature_transform: bool):
        super().__init__()
        a, b, c, _, _ = sizes
        self.align, self.first = Transform(3, sizes), shared(3, a)
        self.align_features = Transform(a, sizes) if feature_transform else None
        self.rest = nn.Sequential(shared(a, b), shared(b, c, act=False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """``[N, 3, P] -> [N, a, P], [N, c], [N, a, a]``."""
        x = self.first(self.align(x).mT @ x)
        transform = None
        if self.align_features is not None:
            transform = self.align_features(x)
            x = transform.mT @ x
        return x, self.rest(x).amax(-1), transform


class PointNetClassifier(nn.Module):
    """The class of a cloud."""

    def __init__(self, classes: int, sizes: Sizes = PAPER, feature_transform: bool = True):
        super().__init__()
        _, _, c, d, e = sizes
        self.features = Features(sizes, feature_transform)
        self.head = nn.Sequential(
            *(dense(c, d), nn.Linear(d, e), nn.Dropout(0.3), nn.BatchNorm1d(e), nn.ReLU(), nn.Linear(e, classes))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[N, 3, P] -> [N, classes]``, and the second transform."""
        _, cloud, transform = self.features(x)
        return self.head(cloud), transform


class PointNetSegmenter(nn.Module):
    """The part of each point."""

    def __init__(self, parts: int, sizes: Sizes = PAPER, feature_transform: bool = True):
        super().__init__()
        a, b, c, d, e = sizes
        self.features = Features(sizes, feature_transform)
        self.head = nn.Sequential(shared(a + c, d), shared(d, e), shared(e, b), nn.Conv1d(b, parts, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[N, 3, P] -> [N, parts, P]``, and the second transform."""
        points, cloud, transform = self.features(x)
        cloud = cloud.unsqueeze(-1).expand(-1, -1, points.shape[-1])
        return self.head(torch.cat([points, cloud], 1)), transform


def orthogonality(transform: Tensor) -> Tensor:
    """How far matrices ``[N, C, C]`` are from turning space only: the mean norm of ``I - A A^T``."""
    product = transform @ transform.mT
    return torch.linalg.matrix_norm(torch.eye(product.shape[-1], device=product.device) - product).mean()
