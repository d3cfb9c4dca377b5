"""MobileNet V2 and V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


class Row(NamedTuple):
    """A row of the papers' tables: kernel, expanded channels, output channels, squeeze-and-excite, activation, stride."""

    kernel: int
    expanded: float
    outputs: int
    squeeze: bool
    act: Callable[[], nn.Module]
    stride: int


_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, output channels, repeats, and the stride of the first."""

R, H = nn.ReLU, nn.Hardswish
_SMALL = (
    *(Row(3, 16, 16, True, R, 2), Row(3, 72, 24, False, R, 2), Row(3, 88, 24, False, R, 1), Row(5, 96, 40, True, H, 2)),
    *(Row(5, 240, 40, True, H, 1), Row(5, 240, 40, True, H, 1), Row(5, 120, 48, True, H, 1)),
    *(Row(5, 144, 48, True, H, 1), Row(5, 288, 96, True, H, 2), Row(5, 576, 96, True, H, 1)),
    Row(5, 576, 96, True, H, 1),
)
_LARGE = (
    *(
        Row(3, 16, 16, False, R, 1),
        Row(3, 64, 24, False, R, 2),
        Row(3, 72, 24, False, R, 1),
        Row(5, 72, 40, True, R, 2),
    ),
    *(Row(5, 120, 40, True, R, 1), Row(5, 120, 40, True, R, 1), Row(3, 240, 80, False, H, 2)),
    *(Row(3, 200, 80, False, H, 1), Row(3, 184, 80, False, H, 1), Row(3, 184, 80, False, H, 1)),
    *(Row(3, 480, 112, True, H, 1), Row(3, 672, 112, True, H, 1), Row(5, 672, 160, True, H, 2)),
    *(Row(5, 960, 160, True, H, 1), Row(5, 960, 160, True, H, 1)),
)


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; with a shortcut where shapes allow."""

    def __init__(self, inputs: int, expanded: int, row: Row, outputs: int):
        super().__init__()
        layers = [] if expanded == inputs else convolution(inputs, expanded, 1, row.act)
        layers += convolution(expanded, expanded, row.kernel, row.act, row.stride, groups=expanded)
        if row.squeeze:
            layers.append(SqueezeExcite(expanded))
        self.layers = nn.Sequential(*layers, *convolution(expanded, outputs, 1, None))
        self.shortcut = row.stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W] -> [N, outputs, H / stride, W / stride]``."""
        return x + self.layers(x) if self.shortcut else self.layers(x)


class SqueezeExcite(nn.Module):
    """Weighs the channels by what the whole image has of them (Hu et al., CVPR 2018)."""

    def __init__(self, channels: int):
        super().__init__()
        squeezed = by_eight(channels / 4)
        self.weigh = nn.Sequential(
            *(nn.Conv2d(channels, squeezed, 1), nn.ReLU()),
            *(nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, H, W]`` to the same."""
        return x * self.weigh(x.mean((2, 3), keepdim=True))


class MobileNet(nn.Module):
    """Version ``v2``, ``v3s`` or ``v3l``, every layer ``width`` times as wide as published.

    References:
        Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018.
        Howard et al., "Searching for MobileNetV3", ICCV 2019.
    """

    def __init__(self, version: str, classes: int = 10, width: float = 1.0):
        super().__init__()
        if version == "v2":
            act, first, last, hidden = nn.ReLU6, 32, 1280, None
            rows = [Row(3, t, c, False, act, s if i == 0 else 1) for t, c, n, s in _V2 for i in range(n)]
        else:
            act, first, hidden = H, 16, 1024 if version == "v3s" else 1280
            rows = list(_SMALL if version == "v3s" else _LARGE)
            last = 6 * rows[-1].outputs
        channels = by_eight(first * width)
        layers: list[nn.Module] = [*convolution(3, channels, 3, act, 2)]
        for row in rows:
            # V2's table has factors, V3's has numbers of channels.
            expanded = round(row.expanded * channels) if version == "v2" else by_eight(row.expanded * width)
            outputs = by_eight(row.outputs * width)
            layers.append(InvertedResidual(channels, expanded, row, outputs))
            channels = outputs
        ends = by_eight(last * max(width, 1.0) if version == "v2" else last * width)
        self.layers = nn.Sequential(*layers, *convolution(channels, ends, 1, act))
        head: list[nn.Module] = []
        if hidden is not None:
            head, ends = [nn.Linear(ends, by_eight(hidden * width)), nn.Hardswish()], by_eight(hidden * width)
        self.head = nn.Sequential(*head, nn.Dropout(0.2), nn.Linear(ends, classes))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, H, W] -> [N, classes]``."""
        return self.head(self.layers(x).mean((2, 3)))


def convolution(
    inputs: int, outputs: int, kernel: int, act: Callable[[], nn.Module] | None, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the size but for its stride, with batch normalisation and activation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs), *([act()] if act else [])]


def by_eight(channels: float) -> int:
    """The nearest multiple of eight, at most a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
