"""Blocks of a padded model that only some members have; they run for all, and the others keep what they had."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._tree import tree_map


def run_present_blocks(model: nn.Module) -> None:
    """Make a padded model pass over the blocks that members lack."""
    for path, module in model.named_modules():
        owner = model.get_submodule(path.rpartition(".")[0])
        if hasattr(module, "padded_present") and not hasattr(owner, "padded_chains"):
            module.forward = types.MethodType(_optional_block, module)
        elif hasattr(module, "padded_chains"):
            module.forward = types.MethodType(_blocks_in_chains, module)


def _optional_block(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block that members may lack: their result is its first argument."""
    forward = _blocks_in_chains if hasattr(module, "padded_chains") else type(module).forward
    return _selected([module], lambda *args, **kwargs: forward(module, *args, **kwargs), args, kwargs)


def _blocks_in_chains(module: Any, given: Any) -> Any:
    """The forward of a sequence some of whose blocks members may lack."""
    for names in module.padded_chains:
        blocks = [getattr(module, name) for name in names]

        def run(x: Any, blocks: Sequence[nn.Module] = blocks) -> Any:
            for block in blocks:
                x = block(x)
            return x

        given = _selected(blocks, run, (given,), {}) if hasattr(blocks[0], "padded_present") else run(given)
    return given


def _selected(blocks: Sequence[Any], run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``run`` makes of its arguments for members that have the blocks, for others the first argument itself."""
    present = blocks[0].padded_present
    if all(_torch.known_values(present) or [False]):
        return run(*args, **kwargs)
    # Without its input, a missing block has no part in the gradient, whatever it computes.
    entered = tree_map(lambda x: torch.where(present, x, torch.zeros_like(x)), args[0])
    output = run(entered, *args[1:], **kwargs)
    return tree_map(lambda new, old: torch.where(present, new, _fitted(old, new.shape)), output, args[0])


def _fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in another shape, without its last units or with zeros behind them."""
    lengths = [new - old for old, new in zip(x.shape, shape, strict=True)]
    return F.pad(x, [part for length in reversed(lengths) for part in (0, length)]) if any(lengths) else x
