"""Batching rules: what an operator of M members becomes.

Public: :func:`install`, :func:`uninstall`, :func:`is_installed`, :func:`override`, :func:`explain`. Rules are installed by
themselves on first use.
"""

from hfta_func.rules import (
    activation,
    attention,
    composite,
    conv,
    ctc,
    distance,
    embedding,
    linear,
    loss,
    norm,
    norm_batch,
    pooling,
    recurrent,
    resampling,
    shape,
)
from hfta_func.rules._choice import Explanation, Override, explain, override
from hfta_func.rules._registry import install, is_installed, uninstall

__all__ = [
    "Explanation",
    "Override",
    "activation",
    "attention",
    "composite",
    "conv",
    "ctc",
    "distance",
    "embedding",
    "explain",
    "install",
    "is_installed",
    "linear",
    "loss",
    "norm",
    "norm_batch",
    "override",
    "pooling",
    "recurrent",
    "resampling",
    "shape",
    "uninstall",
]
