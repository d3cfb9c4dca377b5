"""PyTorch's distributions inside an array, where they leave out the checks of their arguments.

The checks read the values of tensors, of which each member has its own, and raise for all members if those of one are bad.

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
    """Have distributions check nothing inside an array, and all that they always do outside."""
    global _restore
    if _restore is None:
        _restore = replace_validation(inside_array)


def uninstall() -> None:
    """Restore PyTorch's own checks."""
    global _restore
    if _restore is not None:
        _restore()
        _restore = None
