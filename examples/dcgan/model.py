"""DCGAN's two models.

References:
    Radford, Metz and Chintala, "Unsupervised representation learning with deep convolutional generative adversarial
    networks", ICLR 2016.
"""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn


class Generator(nn.Sequential):
    """Images from noise; 4x4 at first, then twice as large with every layer.

    Args:
        size: Edge of the images, a power of two from 16 on.
        width: Channels before the last layer (ngf).
        noise: Channels of the noise (nz).
        channels: Of the images.
    """

    def __init__(self, size: int = 64, width: int = 64, noise: int = 100, channels: int = 3):
        widths = [width * 2**i for i in reversed(range(_layers(size)))]
        super().__init__(
            *(nn.ConvTranspose2d(noise, widths[0], 4, 1, 0, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()),
            *(
                nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in itertools.pairwise(widths)
            ),
            *(nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.apply(_begin)


class Discriminator(nn.Sequential):
    """One number for each image, positive where it looks real; layers mirror the generator's."""

    def __init__(self, size: int = 64, width: int = 64, channels: int = 3):
        widths = [width * 2**i for i in range(_layers(size))]
        super().__init__(
            *(nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
            *(
                nn.Sequential(nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
                for i, o in itertools.pairwise(widths)
            ),
            nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False),
        )
        self.apply(_begin)


def on_real(verdict: Tensor) -> Tensor:
    """Binary cross-entropy where images should look real."""
    return nn.functional.softplus(-verdict).mean()


def on_fake(verdict: Tensor) -> Tensor:
    """Binary cross-entropy where images should look generated."""
    return nn.functional.softplus(verdict).mean()


def _layers(size: int) -> int:
    return int(math.log2(size)) - 2


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
