"""Time and memory of a step on a device, from operators that were measured on a device of its kind."""

from __future__ import annotations

import functools
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hfta_func.run.devices import Device, find_device
from hfta_func.run.walk import Operator, Walk
from hfta_func.run.workspace import workspace

FILE = pathlib.Path(__file__).with_name("operators.json")
"""What ``python -m benchmarks plan --write`` has measured, by kind of device."""
_NEAREST = 4
_CACHE = 2**20
"""Bytes for each thread of a CPU up to which an operator is as fast as the cores are."""
_SHARE, _LAUNCH, _GAP = 0.5, 5e-6, 2e-6
"""Of a GPU: the share of its rates that operators reach which were not measured on any, the seconds that launching a kernel
takes, and those between two kernels."""


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
