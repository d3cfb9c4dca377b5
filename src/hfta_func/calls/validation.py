"""PyTorch's distributions inside an array, where they leave out the checks of their arguments.

The checks read the values of tensors, which differ between members, and raise for all members if those of one are bad.
"""

from __future__ import annotations

from hfta_func._torch import function_modes, replace_validation
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed

_restore = None


def inside_array() -> bool:
    """Whether the code of a member is running, in this thread."""
    return any(isinstance(mode, lowered | routed) for mode in function_modes())


def install() -> None:
    """Leave out the checks of distributions inside an array; outside, they stay."""
    global _restore
    if _restore is None:
        _restore = replace_validation(inside_array)


def uninstall() -> None:
    """Restore PyTorch's checks."""
    global _restore
    if _restore is not None:
        _restore()
        _restore = None
