"""The least time of a step on this machine: products at the rate of a large one, traffic at the rate of a large copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry

SECONDS = 0.2
"""How long each rate of the machine is measured."""


class _Work(TorchDispatchMode):
    """Lists floating-point operations and bytes, caches aside, of every operator that computes or moves something."""

    def __init__(self):
        super().__init__()
        self.operators: list[tuple[float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, formula = _tensors((args, kwargs)), flop_registry.get(func.overloadpacket)
        known = {leaf.untyped_storage().data_ptr() for leaf in inputs}
        made = [leaf for leaf in _tensors(result) if leaf.untyped_storage().data_ptr() not in known]
        places = [i for i, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
        made += [leaf for i in places if i < len(args) for leaf in _tensors(args[i])]
        # Views move nothing.
        if made:
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            self.operators.append((flops, sum(leaf.numel() * leaf.itemsize for leaf in (*inputs, *made))))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def roofline(step: Callable[[], object]) -> dict[str, float]:
    """The least seconds of what a step in plain PyTorch does, its operations and bytes, and the rates of this machine."""
    with _Work() as work:
        step()
    flops, moved = rates()
    least = sum(max(one / flops, other / moved) for one, other in work.operators)
    sums = {"flops": sum(one for one, _ in work.operators), "bytes": sum(other for _, other in work.operators)}
    return {"seconds": least, **sums, "flops a second": flops, "bytes a second": moved}


@functools.cache
def rates() -> tuple[float, float]:
    """Operations and bytes a second of a large product and of a large copy, the best of several."""
    size, entries = 512, 2**24
    a, source = torch.ones(size, size), torch.ones(entries)
    given, threads = {"a": a, "source": source, "target": torch.empty_like(source)}, torch.get_num_threads()
    timers = [Timer(code, globals=given, num_threads=threads) for code in ("a @ a", "target.copy_(source)")]
    product, copy = (min(timer.blocked_autorange(min_run_time=SECONDS).times) for timer in timers)
    return 2 * size**3 / product, 8 * entries / copy
