"""Operators that PyTorch makes of others, but does not take apart under vmap: they are taken apart here.

Each runs as PyTorch itself runs it, operator by operator, and those have rules.
"""

from __future__ import annotations

from hfta_func.rules._registry import register_composite

register_composite(
    *("_weight_norm", "bilinear", "chain_matmul", "column_stack", "diagflat", "fill_diagonal_"),
    *("isclose", "istft", "nanquantile", "nanquantile.scalar", "native_channel_shuffle"),
    *("norm_except_dim", "quantile", "quantile.scalar", "stft", "stft.center", "vander"),
)
