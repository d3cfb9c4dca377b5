"""What errors of PyTorch about members that run as one become: which line is at fault, and what to do there."""

from __future__ import annotations

import os
import re
import traceback

from hfta_func.calls.body import Diverged, user_code_location
from hfta_func.calls.made import REFUSAL
from hfta_func.errors import HFTAError, RandomnessError, TraceError

_VMAP = os.path.join(os.path.dirname(__file__), "vmap.py")
UNROUTED = (
    "draws from PyTorch's global generator in a way that cannot be routed to the members' keys; draw with torch.rand, "
    "torch.randn, torch.bernoulli or dropout inside a step or functional(model)(..., key=), or in a loader's collate_fn"
)
_OTHERWISE = (
    "; buffers that are equal in all models, of modules that train no parameter, can be read with share_frozen=True, which "
    "makes them one, and all values in a step with chunk_size=1, which runs one member after another"
)
_VALUES = (
    ", but the members run as one and each has its own value; compute with tensors instead (torch.where, masks, clamp), or "
    f"return the value as a metric and read it outside{_OTHERWISE}"
)
_CURES = {
    "[Nn]ested ?[Tt]ensor|aten::_nested": "computes with a nested tensor, which members that run as one cannot; pad it, "
    "torch.nested.to_padded_tensor(x, 0.0), and mask, or make the step with chunk_size=1",
    r"inplace arithmetic|\(self, \*extra_args\) is not possible": REFUSAL,
    "dynamic shape|differently shaped": "makes a tensor whose shape depends on values, and each member has its own; keep all "
    f"entries and mask them (torch.where, masks) instead of selecting some{_OTHERWISE}",
    "Cannot access data pointer": f"needs the values of a tensor (.tolist(), .numpy(), an operator that reads it){_VALUES}",
    r"\.item\(\)": f"asks for the value of a tensor (.item(), float(), int(), .tolist()){_VALUES}",
    "data-dependent control flow": f"branches on the value of a tensor (if, while, assert){_VALUES}",
}
"""What the user's code does, and the cure, by what PyTorch says; anything else is said in its words."""


def advice(error: Exception) -> Exception | None:
    """An error that says which line is at fault and what to do; None for errors that need no advice."""
    if isinstance(error, Diverged) and error.sides is None:
        return None
    # What an operator cannot run on ends with a list of all that PyTorch knows.
    text, where = str(error).partition("is only available for these backends")[0], user_code_location(error)
    if isinstance(error, HFTAError):
        # Rules and draws cannot name the line. An inner vmap, which raises from this file, has already named it.
        named = traceback.extract_tb(error.__traceback__)[-1].filename == _VMAP or where == "this function"
        return None if named else type(error)(f"in {where.rstrip(',')}: {text}")
    if "called random operation while in randomness error mode" in text:
        return RandomnessError(f"{where} {UNROUTED}")
    for pattern, cure in _CURES.items():
        if re.search(pattern, text):
            return TraceError(f"{where} {cure}")
    return None
