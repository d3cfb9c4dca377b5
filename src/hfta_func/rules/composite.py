"""Operators that PyTorch makes of others, but does not take apart under vmap: they are taken apart here.

Each runs as PyTorch itself runs it, operator by operator, and those have rules.
"""

from __future__ import annotations

from hfta_func.rules._registry import register_composite

register_composite(
    *("_pad_packed_sequence", "_weight_norm", "bilinear", "chain_matmul", "column_stack", "ctc_loss.IntList"),
    *("ctc_loss.Tensor", "diagflat", "fill_diagonal_", "gru_cell", "isclose", "istft", "kl_div", "lstm_cell"),
    *("margin_ranking_loss", "multilabel_margin_loss", "nanquantile", "nanquantile.scalar", "native_channel_shuffle"),
    *(
        "norm_except_dim",
        "pdist",
        "quantile",
        "quantile.scalar",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "stft",
        "stft.center",
    ),
    *("triplet_margin_loss", "vander"),
)
