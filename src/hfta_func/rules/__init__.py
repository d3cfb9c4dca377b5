"""Batching rules: what an operator of M members becomes.

Public: :func:`install`, :func:`uninstall`, :func:`is_installed`. Rules are installed by themselves on first use.
"""

from hfta_func.rules import attention, conv, linear, loss, norm, pooling
from hfta_func.rules._registry import install, is_installed, uninstall

__all__ = ["attention", "conv", "install", "is_installed", "linear", "loss", "norm", "pooling", "uninstall"]
