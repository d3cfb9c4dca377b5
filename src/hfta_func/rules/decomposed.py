"""Operators that PyTorch implements with others but does not decompose under ``vmap``.

They are decomposed as outside ``vmap``, into operators that have rules.
"""

from __future__ import annotations

from hfta_func.rules._registry import register_decomposed

register_decomposed(
    *("_weight_norm", "bilinear", "chain_matmul", "column_stack", "diagflat", "fill_diagonal_"),
    *("isclose", "istft", "nanquantile", "nanquantile.scalar", "narrow.Tensor"),
    *("native_channel_shuffle", "tensor_split.tensor_indices_or_sections", "fft_ihfft2", "fft_ihfftn", "moveaxis.int"),
    *("norm_except_dim", "quantile", "quantile.scalar", "stft", "stft.center", "vander"),
)
