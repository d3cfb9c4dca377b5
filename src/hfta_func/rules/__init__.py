"""Batching rules: what an operator of M members becomes. They are installed on first use."""

# Importing a family registers its rules.
# isort: off
from hfta_func.rules import activation, attention, conv, ctc, decomposed, distance, embedding, linear  # noqa: F401
from hfta_func.rules import loss, norm, norm_batch, packing, pooling, recurrent, resampling, shape  # noqa: F401
# isort: on

from hfta_func.rules._choice import Explanation, Override, explain, override
from hfta_func.rules._install import install, is_installed, uninstall

__all__ = ["Explanation", "Override", "explain", "install", "is_installed", "override", "uninstall"]
