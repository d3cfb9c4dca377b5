"""The operators of a step that does not run, and its time on a GPU that is not here, by its data sheet."""

from __future__ import annotations

import difflib
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hfta_func._torch import NotWalkableError, Walker, pytree, storage_number
from hfta_func._tree import tree_map
from hfta_func.errors import HFTAError, TraceError
from hfta_func.rules import _choice

_SHARE, _LAUNCH, _GAP = 0.5, 5e-6, 2e-6
"""The share of a GPU's rates that operators reach, seconds to launch a kernel, and seconds between two kernels."""
_OPERATOR, _RULE = 3.5e-6, 50.6e-6
"""Seconds that this process takes for an operator and for a rule, fitted to steps on an EPYC 9755."""


class Operator(NamedTuple):
    """An operator of a step."""

    name: str  # without an overload
    is_kernel: bool  # whether it computes or copies; others return views
    flops: float  # floating-point operations of a product or a convolution
    bytes: int  # that it reads and writes
    dtype: torch.dtype  # the widest among its arguments


class Walk(NamedTuple):
    """What a step consists of: its operators in order, how they were lowered, and bytes that it has allocated at most."""

    operators: list[Operator]
    choices: list[_choice.Choice]
    peak: int


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of its different elements: an expanded one has fewer."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.dtype.itemsize * torch.Size(sizes).numel() * bool(tensor.numel())


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

    def note(call: Any, args: Any, kwargs: Any, result: Any, _: int) -> None:
        given = _tensors((args, kwargs))
        known = {storage_number(leaf) for leaf in given}
        made = [leaf for leaf in _tensors(result) if storage_number(leaf) not in known]
        name, is_kernel = call._schema.name.rpartition("::")[2], bool(made) or call._schema.is_mutable
        moved = sum(map(_bytes, (*given, *made))) if is_kernel else 0
        dtype = max((leaf.dtype for leaf in given), key=lambda one: one.itemsize, default=torch.float32)
        operators.append(Operator(name, is_kernel, _flops(call, args, kwargs, result), moved, dtype))

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


class Device(NamedTuple):
    """A row of ``devices.json``."""

    name: str
    single: float  # TFLOP/s in float32 without tensor cores
    half: float  # the same in bfloat16 or float16, with tensor cores and without sparsity
    bandwidth: float  # GB/s of its memory
    memory: float  # GB
    source: str

    def seconds(self, walked: Walk, is_replayed: bool) -> float:
        """Seconds of a step."""
        kernels = [operator for operator in walked.operators if operator.is_kernel]
        busy = sum(max(one.flops / self._rate(one.dtype), one.bytes / (1e9 * self.bandwidth)) for one in kernels)
        # This process runs ahead of a GPU, or the GPU waits.
        waiting = 0.0 if is_replayed else _OPERATOR * len(walked.operators) + _RULE * len(walked.choices)
        return max(busy / _SHARE + _GAP * len(kernels), waiting + _LAUNCH * len(kernels))

    def _rate(self, dtype: torch.dtype) -> float:
        return 1e12 * (self.half if dtype.itemsize == 2 else self.single / (2 if dtype.itemsize > 4 else 1))


def find_device(name: str) -> Device:
    """The device of a name; raises a ValueError that names the nearest if the table does not have it."""
    rows = json.loads(pathlib.Path(__file__).with_name("devices.json").read_text())
    table, wanted = {known.lower(): Device(known, *row) for known, row in rows.items()}, str(name).lower()
    if wanted in table:
        return table[wanted]
    near = max(table, key=lambda name: (wanted in name, difflib.SequenceMatcher(None, wanted, name).ratio()))
    known = ", ".join(rows)
    raise ValueError(f"device {name!r} is not in the table; the nearest is {table[near].name!r}, and it has {known}")
