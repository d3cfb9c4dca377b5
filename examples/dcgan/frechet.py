"""How far generated images are from real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLES = 1024
"""Generated images that are compared."""

Moments = tuple[Tensor, Tensor]


def frechet(first: Moments, second: Moments) -> Tensor:
    """The Fréchet distance between two distributions, taken for normal.

    ``|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))`` of means and covariances. FID takes them of a large network's features;
    here they are of the images themselves, grey and of 8x8 pixels, so that no network has to be downloaded.

    References:
        Heusel et al., "GANs trained by a two time-scale update rule converge to a local Nash equilibrium", NeurIPS 2017.
    """
    (m1, c1), (m2, c2) = first, second
    values, vectors = torch.linalg.eigh(c1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    return (m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * cross


def moments(images: Tensor) -> Moments:
    """Mean and covariance of images ``[N, C, H, W]``."""
    features = nn.functional.adaptive_avg_pool2d(images.double().mean(1), 8).flatten(1)
    return features.mean(0), features.mT.cov()
