"""Every private name of PyTorch that this package uses, and no other room touches any.

Each name exists in PyTorch 2.9 to 2.15, and is looked up by ``private``, which refuses a release without it. Once the tests
have run on a later release, raise ``NEWEST`` in ``_release.py``.
"""

# ruff: noqa: F403
# isort: off
from hfta_func._torch._release import *
from hfta_func._torch.compiler import *
from hfta_func._torch.levels import *
from hfta_func._torch.modules import *
from hfta_func._torch.recorded import *
from hfta_func._torch.tape import *

# Last, because its ``operator`` is not that of the standard library.
from hfta_func._torch.dispatcher import *
