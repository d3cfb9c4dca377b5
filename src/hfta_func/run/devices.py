"""CPUs and GPUs by their data sheets: the rates that bound how fast they run an operator."""

from __future__ import annotations

import difflib
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A CPU or a GPU of the table.

    Args:
        name: Its name.
        kind: ``"cpu"`` or ``"cuda"``.
        single: TFLOP/s in float32 without tensor cores; of a CPU those of one core at its highest clock.
        half: TFLOP/s in bfloat16 or float16 with tensor cores, without sparsity.
        bandwidth: GB/s of its memory.
        memory: GB of a GPU's memory.
        cores: Cores of a CPU.
        channels: Channels of a CPU's memory: one core reads at most as fast as one channel.
        source: Where the numbers are from.
    """

    name: str
    kind: str
    single: float
    half: float
    bandwidth: float
    memory: float
    cores: int
    channels: int
    source: str

    def rates(self, dtype: torch.dtype, threads: int) -> tuple[float, float]:
        """Floating-point operations and bytes per second at most, of a CPU with so many threads."""
        threads = min(threads, self.cores)
        flops = self.half if dtype.itemsize == 2 else self.single / (2 if dtype.itemsize > 4 else 1)
        share = 1.0 if self.kind == "cuda" else min(1.0, threads / self.channels)
        return 1e12 * flops * (1 if self.kind == "cuda" else threads), 1e9 * self.bandwidth * share


def _gpu(name: str, single: float, half: float, bandwidth: float, memory: float, source: str) -> Device:
    return Device(name, "cuda", single, half, bandwidth, memory, 1, 1, source)


def _cpu(name: str, clock: float, per_cycle: int, bandwidth: float, cores: int, channels: int, source: str) -> Device:
    single = clock * per_cycle / 1e3
    return Device(name, "cpu", single, single, bandwidth, 0.0, cores, channels, source)


# A core of a CPU with two units for fused multiply-adds of 256 bits makes 32 operations in float32 a cycle, of 512 bits 64.
DEVICES = (
    _gpu("H200", 67, 989, 4800, 141, "NVIDIA H200 Tensor Core GPU, data sheet, SXM"),
    _gpu("H100", 67, 989, 3350, 80, "NVIDIA H100 Tensor Core GPU, data sheet, SXM"),
    _gpu("H100 PCIe", 51, 756, 2000, 80, "NVIDIA H100 Tensor Core GPU, data sheet, PCIe"),
    _gpu("A100 80GB", 19.5, 312, 2039, 80, "NVIDIA A100 Tensor Core GPU, data sheet, SXM 80GB"),
    _gpu("A100 40GB", 19.5, 312, 1555, 40, "NVIDIA A100 Tensor Core GPU, data sheet, 40GB"),
    _gpu("L40S", 91.6, 362, 864, 48, "NVIDIA L40S GPU, data sheet"),
    _gpu("L4", 30.3, 121, 300, 24, "NVIDIA L4 Tensor Core GPU, data sheet"),
    _gpu("A10", 31.2, 125, 600, 24, "NVIDIA A10 Tensor Core GPU, data sheet"),
    _gpu("V100", 15.7, 125, 900, 32, "NVIDIA V100 Tensor Core GPU, data sheet, SXM2 32GB"),
    _gpu("T4", 8.1, 65, 320, 16, "NVIDIA T4 Tensor Core GPU, data sheet"),
    _gpu("RTX 4090", 82.6, 165, 1008, 24, "NVIDIA Ada GPU architecture, white paper, appendix"),
    _gpu("RTX 3090", 35.6, 71, 936, 24, "NVIDIA Ampere GA102 GPU architecture, white paper, appendix"),
    _cpu("EPYC 9654", 3.7, 32, 460.8, 96, 12, "AMD EPYC 9004 series, data sheet; Zen 4: two 256-bit FMA units"),
    _cpu("EPYC 7763", 3.5, 32, 204.8, 64, 8, "AMD EPYC 7003 series, data sheet; Zen 3: two 256-bit FMA units"),
    _cpu("EPYC 7742", 3.4, 32, 204.8, 64, 8, "AMD EPYC 7002 series, data sheet; Zen 2: two 256-bit FMA units"),
    _cpu("Xeon 8480+", 3.8, 64, 307.2, 56, 8, "Intel ARK, Xeon Platinum 8480+; two 512-bit FMA units"),
    _cpu("Xeon 8380", 3.4, 64, 204.8, 40, 8, "Intel ARK, Xeon Platinum 8380; two 512-bit FMA units"),
    _cpu("Xeon 6248", 3.9, 64, 140.8, 20, 6, "Intel ARK, Xeon Gold 6248; two 512-bit FMA units"),
    _cpu("Graviton3", 2.6, 32, 307.2, 64, 8, "Arm Neoverse V1 platform; AWS Graviton3, re:Invent 2021: DDR5-4800"),
)


def find_device(name: str) -> Device:
    """The device of a name, whatever its capitals.

    Raises:
        ValueError: if the table does not have it; names the nearest.
    """
    names = {device.name.lower(): device for device in DEVICES}
    if not isinstance(name, str) or name.lower() not in names:
        near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.0)[0]
        listed = ", ".join(device.name for device in DEVICES)
        raise ValueError(f"device {name!r} is not in the table; the nearest is {names[near].name!r}, all are {listed}")
    return names[name.lower()]
