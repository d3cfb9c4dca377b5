"""The description of an example in terms of one ordinary model, and what both ways to train it need."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from examples.common.errors import BadInput, first_line

BESIDE = ("seconds", "finite", "failure")
"""Columns of the table that are not shown as curves."""

Batch = tuple[Tensor, ...]
Metrics = dict[str, Tensor]


class Task(NamedTuple):
    """A model, its loss, its optimizer and its data.

    Args:
        factory: Makes one model.
        loss_fn: The loss of one model.
        metric_fn: Means over the samples of a batch. The last line of the output reports the last metric.
        optimizer: ``"adam"`` or ``"adadelta"``; the flags give its hyperparameters.
        train: Training data, one row per sample.
        test: Test data, one row per sample.
        prepare: Converts a batch of rows to the model's input, on the device.
        augment: Changes a training batch at random, before ``prepare``.
        derive: Further metrics, from the means over all test samples.
    """

    factory: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    metric_fn: Callable[[nn.Module, Batch], Metrics]
    optimizer: str
    train: Batch
    test: Batch
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    augment: Callable[[Batch], Batch] = lambda batch: batch
    derive: Callable[[Metrics], Metrics] = lambda metrics: metrics

    def training_batch(self, batch: Batch) -> Batch:
        """Rows as the model sees them in training."""
        return self.prepare(self.augment(batch))


class Outcome(NamedTuple):
    """Metrics ``[M]`` of every epoch, the last test, and the trained models by name."""

    history: list[Metrics]
    last: Metrics
    models: dict[str, list[nn.Module]]


def evaluate(metrics: Callable[[Batch], Metrics], data: Batch, size: int, device: torch.device) -> Metrics:
    """Means over all rows, ``size`` of them at a time."""
    sums: Metrics = {}
    for batch in zip(*(leaf.split(size) for leaf in data), strict=True):
        share = len(batch[0]) / len(data[0])
        for name, value in metrics(tuple(leaf.to(device) for leaf in batch)).items():
            sums[name] = sums.get(name, 0) + share * value
        execute(device)
    return {name: value.cpu() for name, value in sums.items()}


def find_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        BadInput: if there is no such device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: PyTorch finds no CUDA device here; --device cpu runs everywhere")
    if name == "xla":
        try:
            return importlib.import_module("torch_xla").device()
        except ImportError:
            raise BadInput("--device xla: torch_xla is not installed; pip install 'hfta_func[xla]'") from None
    return torch.device(name)


def execute(device: torch.device) -> None:
    """Run recorded operations on a device that only records them until then."""
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


def autocast(device: torch.device, enabled: bool, cache: bool = True) -> torch.autocast:
    """Mixed precision in bfloat16, which needs no loss scale; ``cache`` keeps weights that were converted."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=cache)


def save(content: Any, path: Path) -> None:
    """``torch.save`` to a file that is either complete or as it was before.

    Raises:
        BadInput: if it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save(content, file)
        os.replace(part, path)
    # torch.save raises some disk failures as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise BadInput(
            f"{path} cannot be written: {first_line(error)}; give --save a folder that has room and is not read-only"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


class Clock:
    """The time of an epoch's training, without its test."""

    def __init__(self, device: torch.device):
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Start timing an epoch."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since then, after waiting for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.device.type == "xla":
            importlib.import_module("torch_xla.core.xla_model").wait_device_ops()
        return time.perf_counter() - self._start


def print_epoch(number: int, metrics: Metrics) -> None:
    """The line of an epoch in HFTA's words, then one metric a line with one number per member."""
    print(f"Epoch {number} took {metrics['seconds'][0]:.3f} s!")
    for name, value in metrics.items():
        if name not in BESIDE:
            print(f"  {name} {numbers(value)}", flush=True)


def numbers(values: Iterable[Any]) -> str:
    """One number per member."""
    return " ".join(f"{float(value):.4f}" for value in values)
