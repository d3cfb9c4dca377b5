"""How many members to run together, found by measuring."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._gradient import inside_transform
from hfta_func._types import Tree

_ROUNDS = 3


class Chunks:
    """Remembers, for every shape of batch, how many members run fastest together."""

    def __init__(self) -> None:
        self.sizes: dict[Any, int] = {}

    def fastest(self, run: Callable[[int], Any], count: int, device: torch.device, batch: Tree) -> int:
        """The number of members per chunk, of 1, 2, 4, ... and all ``count``, whose ``run(size)`` takes least time.

        Where nothing can be timed, all of them: while a compiler traces, inside transforms, and on devices that run
        later than they are asked, such as XLA.
        """
        if torch.compiler.is_compiling() or inside_transform() or device.type == "xla":
            return count
        key = (
            count,
            device,
            *((leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor)),
        )
        if key not in self.sizes:
            sizes = [1 << power for power in range(count.bit_length()) if 1 << power < count] + [count]
            best = dict.fromkeys(sizes, float("inf"))
            # In turns, so that a disturbance does not fall on one size alone; the first round warms up.
            for turn in range(_ROUNDS + 1):
                for size in sizes:
                    start = now(device)
                    run(size)
                    elapsed = now(device) - start
                    if turn:
                        best[size] = min(best[size], elapsed)
            self.sizes[key] = min(sizes, key=best.__getitem__)
        return self.sizes[key]


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
