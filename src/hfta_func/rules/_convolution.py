"""What the table of lowerings asks of a convolution."""

from __future__ import annotations

import math
from typing import NamedTuple


class Convolution(NamedTuple):
    """The convolution of one member: the shapes of input and filters, and the options in PyTorch's order."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def pixels(self) -> int:
        """The pixels of one image of the input."""
        return math.prod(self.x[2:])

    @property
    def pixels_out(self) -> int:
        """The pixels of one image of the output, if it is padded as usual and not transposed."""
        return math.prod(-(-size // step) for size, step in zip(self.x[2:], self.stride, strict=True))

    @property
    def fewer_pixels(self) -> int:
        """The pixels on the side with fewer: the output, or the input if it is transposed."""
        return self.pixels if self.transposed else self.pixels_out

    @property
    def is_pointwise(self) -> bool:
        """Whether it has 1x1 filters, one group, and no padding."""
        return math.prod(self.weight[2:]) == 1 and self.groups == 1 and not any(self.padding)

    @property
    def is_one_pixel(self) -> bool:
        """Whether it computes one pixel per image, or if transposed reads one: a linear layer."""
        if self.transposed:
            return all(size == 1 for size in self.x[2:]) and not any(self.padding)
        axes = zip(self.x[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        return all(size + 2 * pad - step * (taps - 1) - 1 < jump for size, taps, jump, pad, step in axes)

    def holds(self, entries: int) -> bool:
        """Whether the filters have at least so many entries."""
        return math.prod(self.weight) >= entries

    def is_uneven(self, pixels: int) -> bool:
        """Whether at most 4 channels become 32 or more, or the other way round, on so many pixels of all images."""
        few, many = sorted(self.weight[:2])
        return few <= 4 and many >= 32 and self.groups == 1 and self.x[0] * self.pixels >= pixels

    def shrinks(self) -> bool:
        """Whether it makes at most 16 pixels of more, or at most 4 with at least 1 MB of filters."""
        few = (self.pixels_out <= 2**4 and max(self.stride) > 1) or (self.pixels_out <= 4 and self.holds(2**18))
        return few and not self.transposed and self.groups == 1

    def fills_blocks(self, size: int) -> bool:
        """Whether the channels of a group fill blocks of this size, at a stride of 1."""
        ins, outs = self.weight[1], self.weight[0] // self.groups
        return ins % size == outs % size == 0 and max(self.stride) == 1 and not self.transposed
