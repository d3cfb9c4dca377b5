"""Batching rules: what an operator of M members becomes. They are installed on first use."""

from hfta_func.rules import (  # noqa: F401 - importing a family registers its rules
    activation,
    attention,
    conv,
    ctc,
    decomposed,
    distance,
    embedding,
    linear,
    loss,
    norm,
    norm_batch,
    packing,
    pooling,
    recurrent,
    resampling,
    shape,
)
from hfta_func.rules._choice import Explanation as Explanation
from hfta_func.rules._choice import Override as Override
from hfta_func.rules._choice import explain as explain
from hfta_func.rules._choice import override as override
from hfta_func.rules._install import install as install
from hfta_func.rules._install import is_installed as is_installed
from hfta_func.rules._install import uninstall as uninstall
