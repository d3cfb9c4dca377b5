"""Packed sequences whose lengths all members share. Dimension letters as in :mod:`hfta_func.rules.recurrent`."""

from __future__ import annotations

import torch
from torch import Tensor

from hfta_func._types import TraceError


def padding(batch_sizes: Tensor, rows: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each padded position ``[TN]`` its packed row, for each row ``[R]`` its position, and the mask of positions in use.

    No value is read, so that a graph is valid for all packings of the same shapes.
    """
    steps = torch.arange(batch_sizes.shape[0])
    ends = batch_sizes.cumsum(0)
    starts, sample = ends - batch_sizes, torch.arange(batch)
    sources = (starts.unsqueeze(1) + sample).clamp(max=rows - 1).flatten()
    row = torch.arange(rows)
    step = torch.searchsorted(ends, row, right=True)
    positions = row + (steps * batch - starts).index_select(0, step)
    mask = (sample < batch_sizes.unsqueeze(1))[None, :, :, None]
    return sources.to(device), positions.to(device), mask.to(device)


def require_shared(dim: int | None, what: str) -> None:
    """Raise a TraceError unless all members share ``what``."""
    if dim is not None:
        raise TraceError(
            f"each member has its own {what} of packed sequences, which decide its shape, but the members run as "
            f"one and need equal shapes; pack with lengths that all members share, or pad and mask"
        )
