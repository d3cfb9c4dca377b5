"""What calls of a padded model need: blocks that only some members have, and the functions that depend on true sizes.

Where it is known which members have a block, it runs for them alone; a compiler does not know it, and runs it for all. What
calls depend on is found out by calling a model of each true size; that members then compute the same is the oracle's part.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import expand, first_member, outside_transforms, pytree, unwritten
from hfta_func._tree import tree_map
from hfta_func._types import Params
from hfta_func.calls.padding import Event, Padded, Recorder, Sizes
from hfta_func.calls.routing import routed
from hfta_func.errors import StackError
from hfta_func.models.padding import Padding, Size
from hfta_func.models.remat import run_apart, tables_with_max_norm
from hfta_func.models.sizes import SIZE

_for_all: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Blocks that use tensors from elsewhere, which have a part for every member."""


def pass_over_blocks(module: nn.Module, owner: nn.Module) -> None:
    """Make a module of a padded model pass over the blocks that members lack."""
    if hasattr(module, "padded_present") and not hasattr(owner, "padded_chains"):
        module.forward = types.MethodType(_optional_block, module)
    elif hasattr(module, "padded_chains"):
        module.forward = types.MethodType(_blocks_in_chains, module)


def _optional_block(module: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a block that members may lack: their result is its first argument."""
    forward = _blocks_in_chains if hasattr(module, "padded_chains") else type(module).forward
    return _if_present([module], lambda *args, **kwargs: forward(module, *args, **kwargs), (given, *args), kwargs)


def _blocks_in_chains(module: Any, given: Any) -> Any:
    """The forward of a sequence some of whose blocks members may lack; a row of these is passed over at once."""
    for names in module.padded_chains:
        blocks = [getattr(module, name) for name in names]
        run = functools.partial(functools.reduce, lambda x, block: block(x), blocks)  # pyright: ignore
        given = _if_present(blocks, run, (given,), {}) if hasattr(blocks[0], "padded_present") else run(given)
    return given


def _if_present(blocks: Sequence[Any], run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``run`` makes of its arguments for members that have the blocks, and the first argument itself for others."""
    present = blocks[0].padded_present
    has = _torch.known_values(present)
    if has is not None and all(has):
        return run(*args, **kwargs)
    part = nn.ModuleList(blocks)
    is_known = has is not None and _torch.is_batched(present) and _torch.level_of(present) == _torch.depth()
    if has is not None and is_known and _for_all.isdisjoint(blocks) and not tables_with_max_norm(part):
        try:
            return run_apart(part, run, args, kwargs, functools.partial(_for_some, has))
        except (RuntimeError, ValueError):
            # What is wrong in any case, the run for all raises again.
            _for_all.update(blocks)
    # Without its input, a missing block has no part in the gradient, whatever it computes.
    output = run(tree_map(lambda x: torch.where(present, x, torch.zeros_like(x)), args[0]), *args[1:], **kwargs)
    return tree_map(lambda new, old: torch.where(present, new, fitted(old, new.shape)), output, args[0])


def _for_some(has: list[bool], run: Callable[..., Any], leaves: Any, before: Callable[[], list[Any]]) -> list[Any]:
    """``run(*leaves)`` in a level over some members, in the place of that over all; others have what was before.

    Where none are chosen, the first stands for all.
    """
    members = [member for member, one in enumerate(has) if one]
    chosen, interpreter = members or [0], _torch.current_interpreter()
    level = interpreter.level()
    plain, dims = _torch.unwrap_leaves(leaves, level)
    fronts = tuple(None if dim is None else 0 for dim in dims)
    mapped = _torch.restore_vmap(run, fronts, len(chosen), interpreter.randomness())

    def joined(new: Any, dim: int | None, old: Any, old_dim: int | None) -> Any:
        """``[members, ...], [M, ...] -> [M, ...]``: the results of these members beside what the others have."""
        if not isinstance(old, Tensor):
            return new
        new = expand(torch.zeros_like(old) if new is None else new, dim, len(chosen))
        if len(new) != len(chosen):
            raise RuntimeError("the result has parts of all members")
        every = fitted(expand(old, old_dim, len(has)), (len(has), *new.shape[1:]))
        return every.index_copy(0, torch.tensor(members).long(), new[: len(members)])

    with interpreter.lower():
        # [M, ...] -> [members, ...]
        pairs = zip(plain, dims, strict=True)
        parts = [x if dim is None else x.movedim(dim, 0).index_select(0, torch.tensor(chosen)) for x, dim in pairs]
        new, new_dims = mapped(*parts)
    old, old_dims = _torch.unwrap_leaves(before(), level)
    with interpreter.lower():
        results = [joined(*each) for each in zip(new, new_dims, old, old_dims, strict=True)]
    return [_torch.add_batch_dim(x, 0, level) if isinstance(x, Tensor) else x for x in results]


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in another shape, without its last units or with zeros behind them."""
    lengths = [new - old for old, new in zip(x.shape, shape, strict=True)]
    return F.pad(x, [part for length in reversed(lengths) for part in (0, length)]) if any(lengths) else x


class Events:
    """The events of a padded model's calls, by the shapes of inputs.

    Args:
        padding: What the model knows of its sizes.
        numbers: The paths of the numbers that calls take as buffers.
        func: What calls a model.
        call: ``call(params, buffers, inputs, key, recorder)`` calls the padded one.
    """

    def __init__(self, padding: Padding, numbers: Sequence[str], func: Callable[..., Any], call: Callable[..., Any]):
        self.padding, self._numbers, self._func, self._call = padding, numbers, func, call
        self._known: dict[Any, list[Sizes]] = {}
        # Those of the latest call, while a compiler traces, which knows no values.
        self.latest: list[Sizes] = []

    def __call__(
        self, model: nn.Module, params: Params, buffers: Params, inputs: tuple[Any, Any], key: Tensor | None
    ) -> Padded:
        """What computes the results of a member of the size that its buffers tell, for inputs of these shapes.

        Raises:
            StackError: if a true size does not call the same functions.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        known = self._known.get((shapes, str(spec), key is None))
        if known is None:
            with outside_transforms(), torch.random.fork_rng([]):
                parts = [{path: first_member(x).detach() for path, x in tree.items()} for tree in (params, buffers)]
                given = [first_member(leaf).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                noise = torch.zeros_like(parts[1][SIZE]) if key is None else first_member(key)
                inputs, whole = pytree.tree_unflatten(given, spec), Recorder()
                self._call(*parts, pytree.tree_map_only(Tensor, torch.clone, inputs), noise, whole)
                alone = [self._alone(model, size, inputs, noise) for size in self.padding.sizes]
                known = _joined(self.padding, whole.events, alone)
            # Without a key nothing draws from one.
            known = [event for event in known if key is not None or event.name not in ("site", "draw")]
            self._known[shapes, str(spec), key is None] = known
        self.latest = known
        return Padded(buffers[SIZE], known)

    def _alone(self, model: nn.Module, size: Size, inputs: tuple[Any, Any], key: Tensor) -> list[Event]:
        """The events of a model of a true size, in the modes of the padded one."""
        alone, recorder = copy.deepcopy(size.model), Recorder()
        for path, inner in size.modules.items():
            alone.get_submodule(inner).training = model.get_submodule(path).training
        for owner, _, name in (number.rpartition(".") for number in self._numbers):
            if owner in size.modules:
                # At a rate of 0 nothing is drawn, but members' rates differ.
                module = alone.get_submodule(size.modules[owner])
                setattr(module, name, getattr(module, name) or 0.5)
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, inputs)
        mode = routed(key)
        mode.padding = recorder
        with mode, torch.no_grad():
            self._func(alone, *args, **kwargs)
        return recorder.events


def _joined(padding: Padding, whole: list[Event], alone: list[list[Event]]) -> list[Sizes]:
    """The events of all sizes in one, those of the padded model."""
    columns: list[list[tuple[int, ...] | None]] = []
    for events, size in zip(alone, padding.sizes, strict=True):
        lacks = [f"{path}." for path in padding.optional if path not in size.modules]
        has = [not any(f"{event.path}.".startswith(path) for path in lacks) for event in whole]
        expected = [event for event, is_there in zip(whole, has, strict=True) if is_there]
        for event, other in itertools.zip_longest(expected, events):
            if event is None or other is None or (event.name, len(event.sizes)) != (other.name, len(other.sizes)):
                where = f"'{event.path}'" if event is not None and event.path else "the model"
                raise StackError(
                    f"{where} does not call the same functions in a model of every size, so it cannot be padded; give all "
                    f"models one size there, or stack each size as an array of its own"
                )
        rest = iter(events)
        columns.append([next(rest).sizes if is_there else None for is_there in has])
    joined = []
    for event, *column in zip(whole, *columns, strict=True):
        absent = unwritten(torch.tensor([each is None for each in column]))
        filled = [event.sizes if each is None else each for each in column]
        lengths = enumerate(zip(*filled, strict=True))
        axes = {axis: unwritten(torch.tensor(each)) for axis, each in lengths if {*each} != {event.sizes[axis]}}
        joined.append(Sizes(event.name, axes, absent if bool(absent.any()) else None, event.sizes))
    return joined
