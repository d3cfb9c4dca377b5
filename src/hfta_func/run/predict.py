"""The operators of a step that does not run, and its time and memory on a device that is not here.

The time follows from the device's data sheet and from operators measured on one of its kind.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hfta_func._torch import NotWalkableError, Walker, pytree, storage_number
from hfta_func._tree import tree_map
from hfta_func.errors import HFTAError, TraceError
from hfta_func.rules import _choice

FILE = pathlib.Path(__file__).with_name("operators.json")
"""What ``python -m benchmarks plan --write`` has measured, by kind of device."""
_CACHE = 2**20
"""Bytes for each thread of a CPU up to which an operator is as fast as the cores are."""
_SHARE, _LAUNCH, _GAP = 0.5, 5e-6, 2e-6
"""Of a GPU: the share of its rates that operators reach which were not measured on any, the seconds that launching a kernel
takes, and those between two kernels."""


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


class Device(NamedTuple):
    """A row of ``devices.json``."""

    name: str
    kind: str  # "cpu" or "cuda"
    single: float  # TFLOP/s in float32 without tensor cores; of a CPU, of one core at its highest clock
    half: float  # the same in bfloat16 or float16, with tensor cores and without sparsity
    bandwidth: float  # GB/s of its memory
    memory: float  # GB of a GPU
    cores: int  # of a CPU
    channels: int  # of a CPU's memory; one core reads at most as fast as one channel
    clock: float  # GHz of a CPU when all its cores work, as on a rented machine: without boost
    source: str

    def rates(self, dtype: torch.dtype, threads: int) -> tuple[float, float]:
        """Floating-point operations and bytes per second at most, of a CPU with so many threads."""
        cores = min(threads, self.cores)
        flops = self.half if dtype.itemsize == 2 else self.single / (2 if dtype.itemsize > 4 else 1)
        return 1e12 * flops * cores, 1e9 * self.bandwidth * min(1.0, cores / self.channels)


@functools.cache
def devices() -> dict[str, Device]:
    """The table, by names in small letters."""
    rows = json.loads(pathlib.Path(__file__).with_name("devices.json").read_text())
    return {name.lower(): Device(name, *row) for name, row in rows.items()}


def find_device(name: str) -> Device:
    """The device of a name; raises a ValueError that names the nearest if the table does not have it."""
    table, wanted = devices(), str(name).lower()
    if wanted in table:
        return table[wanted]
    near = max(table, key=lambda name: (wanted in name, difflib.SequenceMatcher(None, wanted, name).ratio()))
    known = ", ".join(device.name for device in table.values())
    raise ValueError(f"device {name!r} is not in the table; the nearest is {table[near].name!r}, and it has {known}")


class Row(NamedTuple):
    """A measured operator."""

    name: str
    features: tuple[float, ...]
    seconds: float


class Measured(NamedTuple):
    """What was measured on a device."""

    device: str
    threads: int
    within: float  # how many times as long kernels take within a step, where data come from memory, as alone
    host: Sequence[float]  # seconds of this process for each of host_work
    rows: Sequence[Row]


@functools.cache
def measured(kind: str) -> Measured:
    """What was measured on a kind of device."""
    *about, rows = json.loads(FILE.read_text()).get(kind, ("", 1, 1.0, (0.0, 0.0), ()))
    return Measured._make([*about, [Row(*row) for row in rows]])


def host_work(walk: Walk) -> tuple[int, int]:
    """What this process does besides kernels: the numbers of operators and of rules."""
    return len(walk.operators), len(walk.choices)


def features(operator: Operator) -> tuple[float, ...]:
    """Logarithms of what the time of an operator depends on: work, traffic, parts, width, and whether it reads in order."""
    shapes, args, parts = [like.shape for like in operator.tensors if like.shape], operator.inputs[0], 1
    if "convolution" in operator.name:
        parts = args[9 if operator.name.endswith("backward") else 8]
    elif "bmm" in operator.name:
        parts = shapes[0][0]
    width = min((min(shape[-2:]) for shape in shapes[:3]), default=1)
    strides = ((like.stride, [1, *itertools.accumulate(like.shape[:0:-1], int.__mul__)]) for like in operator.tensors)
    in_order = all(list(stride[::-1]) == dense[: len(stride)] for stride, dense in strides)
    numbers = 1 + operator.flops, 1 + operator.bytes, max(1, parts), max(1, width), 1 if in_order else 4
    return tuple(round(math.log2(number), 2) for number in numbers)


class Predictor:
    """Predicts a device from what was measured on one of its kind: products and traffic grow by the rates of both."""

    def __init__(self, device: Device, known: Measured, threads: int):
        self._device, self._known, self._threads = device, known, threads
        self._source = find_device(known.device) if known.device else device
        self._faster = 1.0 if device.kind == "cuda" else device.clock / self._source.clock
        self._predict = functools.cache(self._predict)

    @property
    def basis(self) -> str:
        """What predictions are made from, in words."""
        if not self._known.rows:
            return f"{self._device.name}: {_SHARE:.0%} of its data sheet's rates, as no device of its kind was measured yet"
        return f"{self._device.name}: from operators measured on {self._known.device}, {self._known.threads} threads"

    def step(self, walk: Walk, is_replayed: bool = False) -> tuple[float, int]:
        """Seconds and peak bytes of a step."""
        kernels = [operator for operator in walk.operators if operator.is_kernel]
        seconds = sum(self._predict(one.name, features(one), one.dtype) for one in kernels)
        host = (measured("cpu") if self._device.kind == "cuda" else self._known).host
        work = sum(each * count for each, count in zip(host, host_work(walk), strict=True))
        waiting = 0.0 if is_replayed else work / self._faster
        if self._device.kind == "cuda":
            # This process runs ahead of a GPU, or the GPU waits.
            return max(seconds + _GAP * len(kernels), waiting + _LAUNCH * len(kernels)), walk.peak
        peaks = (one.held + sum(like.bytes for like in one.results) + workspace(one) for one in kernels)
        return seconds * self._known.within + waiting, max(walk.peak, *peaks)

    def _predict(self, name: str, wanted: tuple[float, ...], dtype: torch.dtype) -> float:
        """Seconds of an operator: of the three most alike, each scaled by the least times of both."""
        rates, known = self._device.rates(dtype, self._threads), self._known.rows
        least = _least(wanted, *rates)
        # An operator without products that was not measured is like others without.
        rows = [row for row in known if row.name == name] or [
            row for row in known if max(row.features[0], wanted[0]) == 0
        ]
        if not rows:
            return least / _SHARE
        source = self._source.rates(dtype, self._known.threads)
        # What the smallest takes besides does not grow with the work.
        start = min(row.seconds for row in rows)
        ranked = heapq.nsmallest(3, ((math.dist(row.features, wanted), row) for row in rows))
        near = [row for distance, row in ranked if distance <= 2 * ranked[0][0]]
        alike = [
            start + (row.seconds - start) * _least(wanted, *source) / _least(row.features, *source) for row in near
        ]
        fits = self._device.kind == "cpu" and 2 ** wanted[1] <= _CACHE * self._threads
        ratio = self._source.single / self._device.single if fits else least / _least(wanted, *source)
        seconds = start / self._faster + max(0.0, statistics.geometric_mean(alike) - start) * ratio
        return max(seconds, 2 ** wanted[0] / rates[0])


def _least(wanted: Sequence[float], flops: float, moved: float) -> float:
    """The least seconds of an operator at these rates."""
    return max(2 ** wanted[0] / flops, 2 ** wanted[1] / moved)


def workspace(operator: Operator) -> int:
    """About how many bytes an operator allocates on a CPU besides its results."""
    if operator.name in ("convolution", "convolution_backward"):
        x, weight = operator.tensors[-2:] if operator.name.endswith("backward") else operator.tensors[:2]
        is_channels_last = x.stride[1] == 1 < math.prod(x.shape[2:])
        # oneDNN computes on copies in blocks of channels; images whose channels come last are read as they are.
        return weight.bytes + (0 if is_channels_last else x.bytes)
    # PyTorch allocates the gradient of the input twice.
    return operator.tensors[1].bytes if operator.name == "native_batch_norm_backward" else 0
