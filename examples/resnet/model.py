"""ResNet-18."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

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
    """ResNet-18 with the stem for ImageNet, as HFTA trains it on CIFAR-10.

    References:
        He, Zhang, Ren and Sun, "Deep residual learning for image recognition", CVPR 2016.
    """

    def __init__(self, classes: int = 10, width: int = 64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(i, o, 1 if i == o else 2), BasicBlock(o, o, 1))
                for i, o in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, H, W] -> [N, classes]``."""
        return self.head(self.layers(self.stem(x)).mean((2, 3)))
