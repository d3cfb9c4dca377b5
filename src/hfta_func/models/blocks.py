"""Blocks of a padded model that only some members have.

Where it is known which members these are, the block runs for them alone; a compiler does not know it, and runs it for all.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func._tree import tree_map
from hfta_func.calls.routing import routed
from hfta_func.rules._operator import Operator

_for_all: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Blocks that use tensors from elsewhere, which have a part for every member."""


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
    has = _torch.known_values(present)
    if has is not None and all(has):
        return run(*args, **kwargs)
    if has is not None and _is_innermost(present) and _for_all.isdisjoint(blocks):
        try:
            return _by_some(_Some(has), blocks, run, args, kwargs)
        except RuntimeError:
            # What is wrong in any case, the run for all raises again.
            _for_all.update(blocks)
    # Without its input, a missing block has no part in the gradient, whatever it computes.
    entered = tree_map(lambda x: torch.where(present, x, torch.zeros_like(x)), args[0])
    output = run(entered, *args[1:], **kwargs)
    return tree_map(lambda new, old: torch.where(present, new, _fitted(old, new.shape)), output, args[0])


def _is_innermost(tensor: Tensor) -> bool:
    """Whether the innermost transform that is running maps over a tensor."""
    return _torch.is_batched(tensor) and _torch.level_of(tensor) == _torch.depth()


def _picked(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Different rows of a tensor."""
    back = [len(rows)] * len(x)
    for position, row in enumerate(rows):
        back[row] = position
    return _pick(x, torch.tensor(rows), torch.tensor(back))


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # Rows that were not picked get the zeros behind the last one.
    return torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])]).index_select(0, *ctx.saved_tensors), None, None


_pick = Operator(
    "picked(Tensor x, Tensor rows, Tensor back) -> Tensor",
    *(lambda x, rows, back: x.index_select(0, rows), _setup, _backward),
)


class _Some:
    """Some members of the level of ``vmap`` that is running; of none, one stands for all."""

    def __init__(self, has: list[bool]):
        self._interpreter, self._count = _torch.current_interpreter(), len(has)
        self._level, self._is_used = self._interpreter.level(), any(has)
        self._members = [*itertools.compress(range(len(has)), has)] or [0]
        self._are_first = self._is_used and self._members == [*range(len(self._members))]

    def map(self, func: Callable[..., tuple[Any, ...]], leaves: Sequence[Any], rests: list[Any]) -> list[Any]:
        """``func(*leaves)`` in a level over these members, in the place of that over all; results with their model axes.

        ``rests`` becomes what the other members have in the place of the first leaves, where a view has it.
        """
        plain, dims = _torch.unwrap_leaves(tuple(leaves), self._level)
        fronts = tuple(None if dim is None else 0 for dim in dims)
        count, parts = len(self._members), []
        mapped = _torch.restore_vmap(func, fronts, count, self._interpreter.randomness())
        with self._interpreter.lower():
            for at, (x, dim) in enumerate(zip(plain, dims, strict=True)):
                # [M, ...] -> [members, ...]
                x = x if dim is None else x.movedim(dim, 0)
                # What has no gradient may be written, as statistics are, and the block may run again for all.
                if dim is not None and not (self._are_first and x.requires_grad):
                    x = _picked(x, self._members)
                elif dim is not None and at < len(rests):
                    x, rests[at] = x.split([count, self._count - count])
                parts.append(x if dim is None else x[:count])
            outputs, dims = mapped(*parts)
        return [(x, dim) if isinstance(x, Tensor) else x for x, dim in zip(outputs, dims, strict=True)]

    def joined(self, new: Any, old: Any, rest: Any = None) -> Any:
        """These members' own result beside what the others have."""
        if not isinstance(new, tuple):
            return new
        x, dim = new
        x = self._front(x, dim, len(self._members))
        if len(x) != len(self._members):
            raise RuntimeError("the result has parts of all members")
        plain, dim = _torch.unwrap_batched(old, self._level)
        other = self._front(plain, dim, self._count)
        with self._interpreter.lower():
            if self._are_first:
                other = other[len(x) :] if rest is None else rest
            both = torch.cat([x, _fitted(other, (len(other), *x.shape[1:]))])
            if not self._are_first:
                rows = [len(x) + member for member in range(self._count)]
                for row, member in enumerate(self._members if self._is_used else ()):
                    rows[member] = row
                both = _picked(both, rows)
        return _torch.add_batch_dim(both, 0, self._level)

    def _front(self, x: Tensor, dim: int | None, count: int) -> Tensor:
        return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _by_some(some: _Some, blocks: Sequence[nn.Module], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the blocks make of their first argument for some members, beside that argument of the others."""
    mode = next(mode for mode in reversed(_torch.function_modes()) if isinstance(mode, routed))
    padding, site, reached, rests = mode.padding, mode.site, [], [None for _ in pytree.tree_leaves(args[0])]
    inside = nn.ModuleList(blocks)
    if any(getattr(module, "max_norm", None) is not None for module in inside.modules()):
        raise RuntimeError("look-up tables shorten their rows for all members")
    places = _torch.places_of(inside)
    tensors = {path: held[name] for path, (held, name) in places.items() if held[name] is not None}
    distinct = [*{id(tensor): tensor for tensor in tensors.values()}.values()]
    leaves, spec = pytree.tree_flatten((args, kwargs, mode.key, mode.skipped, padding.size, distinct))
    numbers = [position for position, leaf in enumerate(leaves) if mode.is_number(leaf)]
    # Kernels write statistics without counting it.
    buffers = {path for path, _ in inside.named_buffers(remove_duplicate=False) if not path.endswith("padded_present")}
    buffers = {path for path in buffers if not mode.is_number(tensors[path])}

    def part(*leaves: Any) -> tuple[Any, ...]:
        args, kwargs, key, skipped, size, parts = pytree.tree_unflatten([*leaves], spec)
        of = {id(tensor): one for tensor, one in zip(distinct, parts, strict=True)}
        before = {path: of[id(tensor)] for path, tensor in tensors.items()}
        versions, after = {path: _torch.writes(one) for path, one in before.items()}, {**before}
        with mode.again(key, site, [leaves[position] for position in numbers]) as inner:
            inner.skipped, inner.padding = skipped, padding.again(size, padding.position)
            values, layout = pytree.tree_flatten(_torch.call_with(places, after, run, *args, **kwargs))
        is_written = {
            path: one is not before[path] or _torch.writes(one) != versions[path] for path, one in after.items()
        }
        written = [path for path in after if path in buffers or is_written[path]]
        reached[:] = layout, written, inner.site, inner.padding.position
        skipped = torch.zeros((), dtype=torch.int64) if inner.skipped is None else inner.skipped
        return (*values, *(after[path] for path in written), skipped)

    # Functions that the mode of the part passes on reach this mode, too.
    mode.padding = None
    try:
        *results, skipped = some.map(part, leaves, rests)
    finally:
        mode.padding = padding
    layout, written, at, position = reached
    passed = torch.tensor(at - site) + (0 if mode.skipped is None else mode.skipped)
    others = [*pytree.tree_leaves(args[0]), *(tensors[path] for path in written), passed]
    if len(others) != len(results) + 1:
        raise RuntimeError("the result has another layout than the first argument")
    joined = [*itertools.starmap(some.joined, itertools.zip_longest([*results, skipped], others, rests))]
    for path, tensor in zip(written, joined[layout.num_leaves :], strict=False):
        held, name = places[path]
        held[name] = tensor
    if at > site and mode.key is not None:
        mode.skipped = joined[-1]
    mode.site, padding.position = at, position
    return pytree.tree_unflatten(joined[: layout.num_leaves], layout)


def _fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in another shape, without its last units or with zeros behind them."""
    lengths = [new - old for old, new in zip(x.shape, shape, strict=True)]
    return F.pad(x, [part for length in reversed(lengths) for part in (0, length)]) if any(lengths) else x
