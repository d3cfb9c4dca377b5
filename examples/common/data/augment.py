"""Changes at random to a batch of one model, on the device that holds it, through ``torch.rand`` and its like.

In an array every member draws its own: the loader calls these under ``vmap``, with the member's key for noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Move each image by up to ``padding`` pixels in both directions, over black: ``[N, C, H, W]``."""
    count, channels, height, width = images.shape
    padded = nn.functional.pad(images, [padding] * 4)
    down, right = (torch.randint(0, 2 * padding + 1, (count, 1), device=images.device) for _ in range(2))
    rows = (torch.arange(height, device=images.device) + down)[:, None, :, None]
    columns = (torch.arange(width, device=images.device) + right)[:, None, None, :]
    padded = padded.gather(2, rows.expand(-1, channels, -1, padded.shape[3]))
    return padded.gather(3, columns.expand(-1, channels, height, -1))


def random_flip(images: Tensor) -> Tensor:
    """Mirror half of the images: ``[N, C, H, W]``."""
    flipped = torch.rand(images.shape[0], 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(-1), images)


def random_turn(points: Tensor) -> Tensor:
    """Turn each cloud around the vertical axis, the third: ``[N, 3, P]``."""
    angle = 2 * math.pi * torch.rand(points.shape[0], device=points.device)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], -1).view(-1, 3, 3)
    return turn.to(points.dtype) @ points


def jitter(points: Tensor) -> Tensor:
    """Move every point a little: ``[N, 3, P]``."""
    return points + 0.02 * torch.randn_like(points)
