"""Time and memory of a step on a device that is not here, by its data sheet and operators measured on one of its kind."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hfta_func.run.walk import Like, Operator, Walk

FILE = pathlib.Path(__file__).with_name("operators.json")
"""What ``python -m benchmarks plan --write`` has measured, by kind of device."""
_NEAREST = 4
_CACHE = 2**20
"""Bytes for each thread of a CPU up to which an operator is as fast as the cores are."""
_SHARE, _LAUNCH, _GAP = 0.5, 5e-6, 2e-6
"""Of a GPU: the share of its rates that operators reach which were not measured on any, the seconds that launching a kernel
takes, and those between two kernels."""
_BLOCK = 16
"""Channels that oneDNN keeps together: the floats of a vector of AVX-512."""


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
    if wanted not in table:
        alike = {name: (wanted in name, difflib.SequenceMatcher(None, wanted, name).ratio()) for name in table}
        near = table[max(alike, key=alike.__getitem__)].name
        known = ", ".join(device.name for device in table.values())
        raise ValueError(f"device {name!r} is not in the table; the nearest is {near!r}, and it has {known}")
    return table[wanted]


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
    host: tuple[float, ...]  # seconds of this process for each of host_work
    rows: Sequence[Row]


@functools.cache
def measured(kind: str) -> Measured:
    """What was measured on a kind of device."""
    device, threads, within, host, rows = json.loads(FILE.read_text()).get(kind, ("", 1, 1.0, [0.0] * 4, ()))
    return Measured(
        device, threads, within, tuple(host), [Row(name, tuple(wanted), each) for name, wanted, each in rows]
    )


def host_work(walk: Walk, num_leaves: int) -> tuple[float, ...]:
    """What this process does besides kernels: operators forward and backward, rules, leaves of parameters."""
    backward = sum(operator.is_backward for operator in walk.operators)
    counts = len(walk.operators) - backward, backward, len(walk.choices), num_leaves
    return tuple(map(float, counts))


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
        if self._known.rows:
            return (
                f"{self._device.name}: from operators measured on {self._known.device}, {self._known.threads} threads"
            )
        return f"{self._device.name}: {_SHARE:.0%} of its data sheet's rates, as no device of its kind was measured yet"

    def step(self, walk: Walk, num_leaves: int, is_replayed: bool = False) -> tuple[float, int]:
        """Seconds and peak bytes of a step."""
        seconds, peak, kernels = 0.0, walk.peak, [operator for operator in walk.operators if operator.is_kernel]
        for operator in kernels:
            dtype = max((like.dtype for like in operator.tensors), key=lambda one: one.itemsize, default=torch.float32)
            seconds += self._predict(operator.name, features(operator), dtype)
            if self._device.kind == "cpu":
                results = sum(like.bytes for like in operator.results)
                peak = max(peak, operator.held + results + workspace(operator, self._threads))
        host = (measured("cpu") if self._device.kind == "cuda" else self._known).host
        pairs = zip(host, host_work(walk, num_leaves), strict=True)
        waiting = 0.0 if is_replayed else sum(each * count for each, count in pairs)
        if self._device.kind == "cuda":
            # This process runs ahead of a GPU, or the GPU waits.
            return max(seconds + _GAP * len(kernels), waiting / self._faster + _LAUNCH * len(kernels)), peak
        return seconds * self._known.within + waiting / self._faster, peak

    def _predict(self, name: str, wanted: tuple[float, ...], dtype: torch.dtype) -> float:
        """Seconds of an operator."""
        rates = self._device.rates(dtype, self._threads)
        least, known = _least(wanted, *rates), self._known.rows
        # An operator without products that was not measured is like others without.
        rows = [row for row in known if row.name == name] or [
            row for row in known if max(row.features[0], wanted[0]) == 0
        ]
        if not rows:
            return least / _SHARE
        source = self._source.rates(dtype, self._known.threads)
        start = min(row.seconds for row in rows)
        logs = weights = 0.0
        near = sorted((math.dist(row.features, wanted), row) for row in rows)[:_NEAREST]
        near = [pair for pair in near if pair[0] <= 2 * near[0][0]]
        for distance, row in near:
            # What the smallest takes besides does not grow with the work.
            work = (row.seconds - start) * _least(wanted, *source) / _least(row.features, *source)
            weight = 1 / max(distance, 1e-3) ** 2
            logs, weights = logs + weight * math.log(max(start + work, 1e-9)), weights + weight
        seconds = math.exp(logs / weights)
        fits = self._device.kind == "cpu" and 2 ** wanted[1] <= _CACHE * self._threads
        ratio = self._source.single / self._device.single if fits else least / _least(wanted, *source)
        seconds = start / self._faster + max(0.0, seconds - start) * ratio
        return max(seconds, 2 ** wanted[0] / rates[0])


def _least(wanted: Sequence[float], flops: float, moved: float) -> float:
    """The least seconds of an operator at these rates."""
    return max(2 ** wanted[0] / flops, 2 ** wanted[1] / moved)


def workspace(operator: Operator, threads: int) -> int:
    """Bytes that an operator allocates on a CPU besides its results."""
    if operator.name in ("convolution", "convolution_backward"):
        return _of_convolution(operator, threads)
    if operator.name == "native_batch_norm_backward":
        # PyTorch allocates the gradient of the input twice.
        return operator.inputs[0][1].bytes
    whole = [like for like in operator.tensors if like.shape]
    if torch.Tag.pointwise in operator.call.tags and operator.name not in ("where", "masked_fill") and whole:
        dtype = functools.reduce(torch.promote_types, (like.dtype for like in whole))
        # Operands of another dtype are converted first.
        return sum(math.prod(like.shape) * dtype.itemsize for like in whole if like.dtype != dtype)
    return 0


def _of_convolution(operator: Operator, threads: int) -> int:
    args = operator.inputs[0]
    is_backward = operator.name.endswith("backward")
    if is_backward:
        y, x, weight, _, stride, _, dilation, transposed, _, groups, (for_x, *_) = args
    else:
        (x, weight, _, stride, _, dilation, transposed, _, groups), (y,), for_x = args, operator.results, False
    taps, dtype = math.prod(weight.shape[2:]), weight.dtype
    channels = weight.shape[0] // groups, weight.shape[1]
    unfolded = dtype.itemsize * channels[1] * taps * math.prod((x if transposed else y).shape[2:])
    is_product = taps == groups == max(stride) == threads == 1 and x.shape[0] < _BLOCK and dtype == torch.float32
    if is_product or dtype == torch.float64:
        # Not by oneDNN: a product of all images, unfolded if filters are larger than 1x1.
        return x.shape[0] * unfolded if taps > 1 else 0
    blocks = dtype.itemsize * groups * taps * math.prod(map(_in_blocks, channels))
    is_channels_last = any(like.stride[1] == 1 < math.prod(like.shape[2:]) for like in (x, y))
    if channels == (1, 1) and groups > 1 and (not is_backward or _has_small_filters(x, weight, dilation)):
        # Kernels for one channel per group, which others fill up to a block.
        blocks = weight.bytes
    elif groups > 1 and not is_channels_last and any(count % (_BLOCK // 2) for count in channels):
        # A product of each unfolded image, and a copy of the result.
        return max(x.bytes, threads * (4 * weight.bytes + unfolded)) if is_backward else y.bytes + weight.bytes
    if is_channels_last:
        return blocks + weight.bytes * (2 if is_backward else 1)
    if transposed and not is_backward:
        # The result as it was computed, and converted.
        return 2 * y.bytes
    in_blocks = [like.bytes // like.shape[1] * _in_blocks(like.shape[1]) for like in (x, y)]
    few = y if transposed else x
    if groups == 1 and few.shape[1] < _BLOCK:
        # An image of few channels is read as it is, and its gradient copied as it is.
        in_blocks[1 if transposed else 0] = few.bytes if for_x else 0
    moved = blocks + sum(in_blocks)
    # Results are allocated after what they are converted from.
    return max(blocks, moved - weight.bytes) if is_backward else max(in_blocks[1], moved - y.bytes)


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _has_small_filters(x: Like, weight: Like, dilation: list[int]) -> bool:
    """Whether there is a kernel for the gradient of filters with one channel per group."""
    taps = weight.shape[2:]
    return max(taps) <= 3 and max(dilation) == 1 and all(map(int.__ge__, x.shape[2:], taps))
