"""How a step becomes a graph: the compiler's options, and what a call of the graph checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hfta_func._torch import may_change, stays
from hfta_func._tree import leaves, tree_map

# It trusts the processor's own list of its instructions, instead of compiling a program for each of them, which takes longer
# than a small graph; and does not look again at shapes that have been looked at to choose the graph.
_TRUSTING = {"cpp.vec_isa_ok": True, "size_asserts": False, "alignment_asserts": False}
_TOGETHER = 16
"""With more parameters than this, the calls are compiled apart from the kernels: at the same time and with less optimisation,
which saves a third of a deep model's time to compile. With fewer, the calls are much of a step."""
_REPLAYED = "triton.cudagraphs"


def options(step: Callable[..., Any], state: Any, device: str) -> tuple[dict[str, Any], ...]:
    """Options of inductor for a step with this state on this type of device, to be tried in turn."""
    if device == "cpu":
        # The first calls kernels from C++, not Python.
        apart = len(leaves(getattr(state, "params", state))) > _TOGETHER
        return {**_TRUSTING, "cpp_wrapper": True, "cpp_wrapper_build_separate": apart}, _TRUSTING, {}
    # A CUDA graph launches all kernels at once; a state not written in place would be copied into its memory and back.
    in_place = device == "cuda" and getattr(getattr(step, "options", None), "donate", False)
    return ({_REPLAYED: True}, {}) if in_place else ({},)


def ahead(state: Any) -> dict[str, Any]:
    """Options of inductor for the graph of a step with this state that is kept as a library."""
    level = "O0" if len(leaves(getattr(state, "params", state))) > _TOGETHER else "O1"
    return {**_TRUSTING, "aot_inductor.compile_wrapper_opt_level": level}


def graph(step: Callable[..., Any], chosen: Mapping[str, Any]) -> Any:
    """The step, compiled when it is called, with these options; a call checks only what may change between calls."""
    options: Any = {**chosen, "guard_filter_fn": may_change}
    run = torch.compile(step, fullgraph=True, dynamic=False, options=options)
    if not chosen.get(_REPLAYED):
        return run

    def replay(state: Any, batch: Any) -> Any:
        # What lies where it lay is not copied into the graph's memory. Elsewhere, the graph is recorded anew.
        held = leaves(state)
        for leaf in (*held, *getattr(step, "base", {}).values()):
            stays(leaf)
        known = set(map(id, held))
        # Copies of what lies in the graph's memory, where the next call writes.
        return tree_map(lambda leaf: leaf if id(leaf) in known else leaf.clone(), run(state, batch))

    return replay
