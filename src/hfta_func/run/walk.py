"""The operators of a step that does not run, as if on a given type of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hfta_func._torch import NotWalkableError, Walker, pytree, storage_number
from hfta_func._tree import tree_map
from hfta_func.errors import HFTAError, TraceError
from hfta_func.rules import _choice


class Like(NamedTuple):
    """What is known of a tensor of a step that does not run."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of its different elements: an expanded one has fewer."""
        sizes = (size for size, stride in zip(self.shape, self.stride, strict=True) if stride)
        return self.dtype.itemsize * torch.Size(sizes).numel() * bool(torch.Size(self.shape).numel())


class Operator(NamedTuple):
    """An operator of a step."""

    call: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position and by name, with a Like for every tensor
    results: tuple[Like, ...]  # without views
    flops: float  # floating-point operations of a product or a convolution
    held: int  # bytes that the step has allocated before it

    @property
    def name(self) -> str:
        """Its name, without an overload."""
        return self.call._schema.name.rpartition("::")[2]

    @property
    def tensors(self) -> list[Like]:
        """The tensors among its arguments."""
        leaves = pytree.tree_leaves(self.inputs, is_leaf=lambda leaf: isinstance(leaf, Like))
        return [leaf for leaf in leaves if isinstance(leaf, Like)]

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype among its arguments."""
        return max((like.dtype for like in self.tensors), key=lambda one: one.itemsize, default=torch.float32)

    @property
    def is_kernel(self) -> bool:
        """Whether it computes or copies; others return views."""
        return bool(self.results) or self.call._schema.is_mutable

    @property
    def bytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(like.bytes for like in (*self.tensors, *self.results)) if self.is_kernel else 0


class Walk(NamedTuple):
    """What a step consists of: its operators in order, how they were lowered, and bytes that it has allocated at most."""

    operators: list[Operator]
    choices: list[_choice.Choice]
    peak: int


def _like(leaf: Any) -> Any:
    return Like(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flops(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of a product or a convolution."""
    name = call._schema.name.rpartition("::")[2].replace("_for_cpu", "")
    if name == "convolution_backward":
        # Each gradient has the work of the convolution; PyTorch's formula takes the channels of all groups for one.
        once: Any = flop_registry[torch.ops.aten.convolution]
        return sum(args[10][:2]) * once(args[1], args[2], None, *args[4:8], out_val=args[0])
    formula: Any = flop_registry.get(getattr(torch.ops.aten, name, call.overloadpacket))
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def walk(step: Callable[[Any, Any], Any], state: Any, batch: Any, device: str = "cpu") -> Walk:
    """Go through a step that is not compiled without values: nothing is computed, and its memory is not taken.

    Every member trains on, as if no loss and no gradient were infinite or NaN. Lowerings are chosen for the type of device.
    A step that cannot go on without values raises a TraceError.
    """
    operators: list[Operator] = []

    def note(call: Any, args: Any, kwargs: Any, result: Any, before: int) -> None:
        given = pytree.tree_map(_like, (tuple(args), kwargs))
        known = {storage_number(leaf) for leaf in _tensors((args, kwargs))}
        made = tuple(_like(leaf) for leaf in _tensors(result) if storage_number(leaf) not in known)
        operators.append(Operator(call, given, made, _flops(call, args, kwargs, result), before - held))

    walker = Walker(note)
    state, batch = tree_map(walker.fake, state), tree_map(walker.fake, batch)
    held = walker.bytes
    try:
        with walker.walking(device):
            choices = _choice.explain(step, state, batch)
    except HFTAError:
        raise
    except (NotWalkableError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        raise TraceError(
            f"the step cannot be walked without values ({why}); if it runs with values, decide by torch.where and return "
            f"metrics as tensors, or plan on the device itself, without device="
        ) from error
    return Walk(operators, choices, walker.peak - held)
