"""What the benchmarks share: the machine, interleaved times, memory peaks, and tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func.run import memory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """What a number depends on besides the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("jax",) if find_spec(name)},
        "threads": torch.get_num_threads(),
        **(_card() if torch.cuda.is_available() else {}),
        "date": datetime.date.today().isoformat(),
    }


def _card() -> dict[str, Any]:
    """Of the first GPU. Products of float32 are exact and convolutions in TF32 unless somebody says otherwise."""
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.exists() else None
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": found[0] if found else "unknown",
        "cuda": torch.version.cuda,
        "tf32": {"products": torch.backends.cuda.matmul.allow_tf32, "convolutions": torch.backends.cudnn.allow_tf32},
        "mps": _mps(),
    }


def _mps() -> bool:
    """Whether NVIDIA's Multi-Process Service serves this process's user."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def seconds(work: Callable[[], object], calls: int, device: str = "cpu") -> float:
    """The time of one of ``calls`` calls in a row, until the device has done them."""
    start = _now(device)
    for _ in range(calls):
        work()
    return (_now(device) - start) / calls


def _now(device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Each timer once a round, A B C A B C ..., so that all see the same machine; the first ``warmup`` rounds are dropped."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(warmup + rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: values[warmup:] for name, values in times.items()}


def budget_seconds(text: str) -> float:
    """The seconds of a budget such as ``"5h"``, ``"90m"`` or ``"30s"``.

    Raises:
        ValueError: if it is none.
    """
    return float(text[:-1]) * {"h": 3600.0, "m": 60.0, "s": 1.0}[text[-1:]] if not text[-1:].isdigit() else float(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    signs = "<" + ">" * len(widths)
    lines = [zip(row, signs, widths, strict=False) for row in (head, *rows)]
    return "\n".join("  ".join(f"{cell:{sign}{width}}" for cell, sign, width in line) for line in lines)


def add_to(path: Path, key: str, about: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Put results into a file, under a key, in the place of those that they measure again."""
    old = json.loads(path.read_text()) if path.exists() else {"machine": about, key: {}}
    # Rows that are not measured again keep what they were measured on.
    stamps = dict.fromkeys(old[key], old["machine"]) | old.get("stamps", {}) | dict.fromkeys(results, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": about, "stamps": stamps, key: {**old[key], **results}}
    path.write_text(json.dumps(content, indent=2) + "\n")


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """The most that tensors allocated by ``work`` take at one time, above what is alive when it starts.

    From the events of the device's own allocator: exact, and the same at any load. Memory that a kernel takes from
    elsewhere is not in it.
    """
    return memory.peak_bytes(work, torch.device(device))


def resident_bytes(tree: Any) -> int:
    """The memory behind all tensors of a tree, shared storage once."""
    leaves = [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}
    return sum(storages.values())
