"""CPUs and GPUs by their data sheets: the rates that bound how fast they run an operator."""

from __future__ import annotations

import difflib
import functools
import json
import pathlib
from typing import NamedTuple

import torch


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
