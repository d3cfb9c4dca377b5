"""How a step becomes a graph: the compiler's options, and what a call of the graph checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hfta_func._torch.guards import may_change
from hfta_func._tree import leaves

# It trusts the processor's own list of its instructions, instead of compiling a program for each of them, which takes longer
# than a small graph; and does not look again at shapes that have been looked at to choose the graph.
_TRUSTING = {"cpp.vec_isa_ok": True, "size_asserts": False, "alignment_asserts": False}
_TOGETHER = 16
"""With more parameters than this, the calls are compiled apart from the kernels: at the same time and with less optimisation,
which saves a third of a deep model's time to compile. With fewer, the calls are much of a step."""


def options(state: Any) -> tuple[dict[str, Any], ...]:
    """Options of inductor for a step with this state, to be tried in turn; the first calls kernels from C++, not Python."""
    apart = len(leaves(getattr(state, "params", state))) > _TOGETHER
    return {**_TRUSTING, "cpp_wrapper": True, "cpp_wrapper_build_separate": apart}, _TRUSTING, {}


def graph(step: Callable[..., Any], chosen: Mapping[str, Any]) -> Any:
    """The step, compiled when it is called, with these options; a call checks only what may change between calls."""
    own: Any = {**chosen, "guard_filter_fn": may_change}
    return torch.compile(step, fullgraph=True, dynamic=False, options=own)
