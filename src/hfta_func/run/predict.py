"""Time and memory of a step on a device, from operators that were measured on a device of its kind."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hfta_func.run.devices import Device
from hfta_func.run.walk import Like, Operator, Walk, likes

_FILE = pathlib.Path(__file__).with_name("operators.json")
"""What ``python -m benchmarks plan --write`` has measured, by kind of device."""
_NEAREST = 4
_CACHE = 2**20
"""Bytes for each thread that a cache holds: up to these, an operator is as fast as the cores are."""
_SHARE, _LAUNCH, _GAP = 0.5, 5e-6, 2e-6
"""Of a kind of device that was not measured: the share of its rates that is reached, and seconds that launching a kernel takes
and that a device is idle between two."""


class Row(NamedTuple):
    """A measured operator: its name, its :func:`features`, seconds, and bytes beyond its results by bytes that it moves."""

    name: str
    features: tuple[float, ...]
    seconds: float
    extra: float


class Measured(NamedTuple):
    """What was measured on a device.

    Args:
        device: Its name in the table.
        threads: Threads of a CPU.
        host: Seconds of this process for each of :func:`host_work`.
        rows: The operators.
    """

    device: str
    threads: int
    host: tuple[float, ...]
    rows: tuple[Row, ...]


@functools.cache
def measured(kind: str) -> Measured | None:
    """What was measured on a kind of device; None if nothing was."""
    found = json.loads(_FILE.read_text()).get(kind)
    return found and Measured(*found[:3], tuple(Row(row[0], tuple(row[1]), *row[2:]) for row in found[3]))


def host_work(walk: Walk, num_leaves: int) -> tuple[float, ...]:
    """How much of what this process does besides kernels a step has: a call, kernels, views, rules, leaves of parameters."""
    kernels = sum(operator.is_kernel for operator in walk.operators)
    return 1.0, float(kernels), float(len(walk.operators) - kernels), float(len(walk.choices)), float(num_leaves)


def features(operator: Operator) -> tuple[float, ...]:
    """What the time of an operator depends on: logarithms of work, traffic, parts, width and results' width."""
    shapes = [like.shape for like in operator.tensors if like.shape]
    groups = operator.inputs[0][8 + (operator.name == "convolution_backward")] if "convolution" in operator.name else 1
    parts = shapes[0][0] if "bmm" in operator.name else groups
    width = min((min(shape[-2:]) for shape in shapes[:3]), default=1)
    dense = all(like.stride == _dense(like.shape) for like in operator.tensors)
    numbers = 1 + operator.flops, 1 + operator.bytes, parts, max(1, width), 1 if dense else 4
    return tuple(round(math.log2(number), 2) for number in numbers)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Predictor:
    """``seconds(operator)`` and ``bytes(operator)`` on a device.

    Args:
        device: The device.
        known: What was measured on a device of its kind; None if nothing was.
        here: The device that it was measured on.
        threads: Threads of a CPU.
    """

    def __init__(self, device: Device, known: Measured | None, here: Device, threads: int):
        self._device, self._here, self._threads, self._known = device, here, threads, known
        self._rows: dict[str, list[Row]] = defaultdict(list)
        for row in () if known is None else known.rows:
            self._rows[row.name].append(row)
        self._tables = {name: torch.tensor([row.features for row in rows]) for name, rows in self._rows.items()}
        self._cache: dict[Any, tuple[float, float]] = {}
        core = device.rates(torch.float32, 1)[0] / here.rates(torch.float32, 1)[0]
        self._clock = 1.0 if device.kind == "cuda" else core

    def step(self, walk: Walk, num_leaves: int, is_replayed: bool = False) -> tuple[float, int]:
        """Seconds and peak bytes of a step."""
        seconds, peak = 0.0, walk.peak
        for operator in walk.operators:
            if operator.is_kernel:
                taken, extra = self.operator(operator)
                seconds += taken
                peak = max(peak, operator.held + int(sum(like.bytes for like in operator.results) + extra))
        host = (0.0,) * 5 if is_replayed or self._known is None else self._known.host
        waiting = sum(each * count for each, count in zip(host, host_work(walk, num_leaves), strict=True))
        if self._device.kind != "cuda":
            return seconds + waiting, peak
        launches = sum(operator.is_kernel for operator in walk.operators)
        return max(seconds + _GAP * launches, waiting + (0.0 if is_replayed else _LAUNCH) * launches), peak

    def operator(self, operator: Operator) -> tuple[float, float]:
        """Seconds of an operator, and bytes that it allocates besides its results."""
        key = operator.name, features(operator)
        if key not in self._cache:
            self._cache[key] = self._predict(operator, key[1])
        return self._cache[key]

    def _predict(self, operator: Operator, wanted: tuple[float, ...]) -> tuple[float, float]:
        dtype = max((like.dtype for like in operator.tensors), key=lambda dtype: dtype.itemsize, default=torch.float32)
        target = _least(wanted, *self._device.rates(dtype, self._threads))
        rows = self._rows.get(operator.name) or self._alike(operator)
        if not rows:
            return target / _SHARE, 0.0
        here = self._here.rates(dtype, self._known.threads if self._known else 1)
        table = self._tables.get(operator.name)
        table = torch.tensor([row.features for row in rows]) if table is None else table
        distances = (table - torch.tensor(wanted)).square().sum(1)
        near = distances.topk(min(_NEAREST, len(rows)), largest=False)
        if float(near.values[0]) == 0:
            near_rows, weights = [rows[int(near.indices[0])]], [1.0]
        else:
            near_rows, weights = [rows[i] for i in near.indices.tolist()], [1 / float(d) for d in near.values]
        start = min(row.seconds for row in rows)
        logs, extra = 0.0, 0.0
        for row, weight in zip(near_rows, weights, strict=True):
            # What is beyond the time of the smallest grows with the work.
            work = max(row.seconds - start, 0.0) * _least(wanted, *here) / _least(row.features, *here)
            logs += weight * math.log(start + work)
            extra += weight * row.extra
        seconds, extra = math.exp(logs / sum(weights)), extra / sum(weights) * 2 ** wanted[1]
        begin = min(start, seconds)
        fits = self._device.kind == "cpu" and 2 ** wanted[1] <= _CACHE * self._threads
        ratio = 1 / self._clock if fits else target / _least(wanted, *here)
        return max(begin / self._clock + (seconds - begin) * ratio, 2 ** wanted[0] / self._device.rates(dtype, self._threads)[0]), extra

    def _alike(self, operator: Operator) -> list[Row]:
        """Measured operators for one of which none has its name: as much work, whatever they compute."""
        return [] if operator.flops else [row for rows in self._rows.values() for row in rows if row.features[0] == 0]


def _least(wanted: Sequence[float], flops: float, moved: float) -> float:
    return max(2 ** wanted[0] / flops, 2 ** wanted[1] / moved)
