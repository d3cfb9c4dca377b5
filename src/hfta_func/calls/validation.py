"""Functions of PyTorch that act otherwise inside an array.

Distributions leave out the checks of their arguments: these read the values of tensors, which differ between members, and
raise for all members if those of one are bad. Operators of functions, such as ``torch.cond``, do not compile these, see
:mod:`hfta_func.calls.higher_order`.
"""

from __future__ import annotations

from hfta_func._torch import function_modes, is_reading, replace_validation, run_operators_eagerly
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed

_restore = ()


def inside_array() -> bool:
    """Whether the code of a member is running, or read, in this thread."""
    return is_reading() or any(isinstance(mode, lowered | routed) for mode in function_modes())


def install() -> None:
    """Have functions of PyTorch act so inside an array; outside, they stay as they are."""
    global _restore
    _restore = _restore or (replace_validation(inside_array), run_operators_eagerly(inside_array))


def uninstall() -> None:
    """Restore PyTorch's functions."""
    global _restore
    for restore in _restore:
        restore()
    _restore = ()
