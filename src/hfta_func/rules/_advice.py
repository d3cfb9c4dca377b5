"""What errors of PyTorch about members that run as one become: which line is at fault, and what to do there."""

from __future__ import annotations

import os
import re
import traceback

from hfta_func.calls.body import user_code_location
from hfta_func.calls.control_flow import Diverged
from hfta_func.calls.made import REFUSAL
from hfta_func.errors import HFTAError, RandomnessError, TraceError

_VMAP = os.path.join(os.path.dirname(__file__), "vmap.py")
UNROUTED = (
    "draws from PyTorch's global generator in a way that cannot be routed to the members' keys; draw with torch.rand, "
    "torch.randn, torch.bernoulli or dropout inside a step or functional(model)(..., key=)"
)


_CURES = {
    "vmap staticmethod|marked as dirty|bdim < tensor.dim": "applies an autograd function whose batching rule does not work: "
    "write either a vmap staticmethod that returns (outputs, out_dims), or generate_vmap_rule = True and no argument in "
    "place; or neither",
    "must override the setup_context": "applies an autograd function by a method that was kept, f = Function.apply, before "
    "the rules were installed; call Function.apply where it is used, or hfta_func.rules.install() before its import",
    "may have escaped": "uses a tensor of a member outside of its call, as in another thread; compute in the call",
    "while setting up backward hooks": "registers a hook for the backward pass of a module in a call, but the members have "
    "one backward pass, which the step takes; take the gradient of an activation by torch.autograd.grad in the loss",
    "access storage of": "needs the memory of a tensor (copy.deepcopy, pickle, torch.save, storage()), but those of all "
    "members lie in one; copy a tensor by x.clone() and a module in __init__, save the state outside, or make the step with "
    "chunk_size=1",
    "modified by an inplace operation": "needs, for the gradient, values that were modified by an inplace operation; write "
    "into a copy, x = x.clone(), or compute a new tensor",
    "a leaf Variable that requires grad": "writes a parameter in place, which a step must not do, as autograd refuses alone; "
    "compute with a new tensor (weight * 2), or make it a buffer",
}
"""Advice by what PyTorch says of autograd functions and some others."""


_OTHERWISE = (
    "; buffers that are equal in all models, of modules that train no parameter, can be read with share_frozen=True, which "
    "makes them one, and all values in a step with chunk_size=1, which runs one member after another"
)


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
    unsupported = re.search(
        r"(\w+::\w+(?:\.\w+)?)\.? hit the vmap fallback|rule not implemented for (\w+::\w+(?:\.\w+)?)|"
        r"(aten::\w+) requires special handling|vmap over (torch\.\w+)",
        text,
    )
    operator = next(filter(None, unsupported.groups())) if unsupported else ""
    if re.search(r"[Nn]ested ?[Tt]ensor|aten::_nested", text):
        return TraceError(
            f"{where} computes with a nested tensor, which members that run as one cannot; pad it, "
            f"torch.nested.to_padded_tensor(x, 0.0), and mask, or make the step with chunk_size=1"
        )
    if operator and operator not in ("aten::equal", "torch.allclose"):
        return TraceError(
            f"{where} calls {operator}, for which there is no batching rule; write it with operators that have one, "
            f"register one with hfta_func.rules.register, or make the step with chunk_size=1, which needs none"
        )
    if "inplace arithmetic" in text or "(self, *extra_args) is not possible" in text:
        return TraceError(f"{where} {REFUSAL}")
    if "dynamic shape" in text or "differently shaped" in text:
        called = re.search(r"(aten::|torch\.)\w+", text)
        return TraceError(
            f"{where} makes a tensor whose shape depends on values ({called[0] if called else 'a boolean index'}), and each "
            f"member has its own; keep all entries and mask them (torch.where, masks) instead of selecting some{_OTHERWISE}"
        )
    if operator:
        what = f"compares values of tensors ({operator.replace('aten::', 'torch.')})"
    elif "Cannot access data pointer" in text:
        what = "needs the values of a tensor (.tolist(), .numpy(), or an operator that reads them)"
    elif ".item()" in text:
        what = "asks for the value of a tensor (.item(), float(), int(), .tolist())"
    elif "data-dependent control flow" in text:
        what = "branches on the value of a tensor (if, while, assert)"
    else:
        return None
    return TraceError(
        f"{where} {what}, but the members run as one and each has its own value; compute with tensors instead (torch.where, "
        f"masks, clamp), or return the value as a metric and read it outside{_OTHERWISE}"
    )
