"""Batching rules: how operators run for M members as one call. They are installed on first use."""

# Importing a family registers its rules.
# isort: off
from hfta_func.rules import attention, conv, embedding, indexing, linear, loss  # noqa: F401
from hfta_func.rules import norm, others, pooling, recurrent  # noqa: F401
# isort: on

from hfta_func.rules._choice import Explanation as Explanation
from hfta_func.rules._choice import Override as Override
from hfta_func.rules._choice import explain as explain
from hfta_func.rules._choice import override as override
from hfta_func.rules._extend import register as register
from hfta_func.rules._install import install as install
from hfta_func.rules._install import is_installed as is_installed
from hfta_func.rules._install import uninstall as uninstall
from hfta_func.rules._layout import expand as expand
from hfta_func.rules._registry import Call as Call
