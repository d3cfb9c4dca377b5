"""Callbacks for :func:`run` that show a study while it runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from hfta_func._types import require
from hfta_func.files.atomic import PathLike
from hfta_func.tune.study import Study, Trial


def tensorboard(folder: PathLike) -> Callable[..., None]:
    """Write a study to TensorBoard, a run per trial with its hyperparameters, as a callback for :func:`run`.

    Each metric is the mean over the trial's seeds after every epoch; with several seeds, ``loss/0``, ``loss/1``, ... are
    the metrics of its members. TensorBoard's page HPARAMS has a row per trial, with the values that it began with.

    Args:
        folder: The folder of the runs ``trial-0000``, ``trial-0001``, ..., each written anew when its trial has trained.

    Raises:
        ImportError: if TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> callback = tensorboard(tempfile.mkdtemp())
    """
    require("torch.utils.tensorboard", "tensorboard")
    shown: dict[int, tuple[int, str]] = {}

    def record(study: Study) -> None:
        for trial in study.trials:
            epochs = min(len(study.population.members[member].metrics) for member in trial.members)
            if epochs and shown.get(trial.number) != (epochs, trial.status):
                shown[trial.number] = epochs, trial.status
                _write(study, trial, epochs, os.path.join(folder, f"trial-{trial.number:04d}"))

    return record


def _write(study: Study, trial: Trial, epochs: int, folder: str) -> None:
    board = require("torch.utils.tensorboard", "tensorboard")
    members = [study.population.members[member].metrics for member in trial.members]
    shown = {
        name: value if isinstance(value, bool | int | float) else str(value) for name, value in trial.params.items()
    }
    shutil.rmtree(folder, ignore_errors=True)
    with board.SummaryWriter(folder) as writer:
        begun: Any = board.summary.hparams(shown, dict.fromkeys(study.metrics, 0.0))
        for summary in begun if trial.status != "running" else begun[:2]:
            writer.file_writer.add_summary(summary)
        for epoch in range(epochs):
            for name in members[0][epoch]:
                values = [metrics[epoch][name] for metrics in members]
                each = {f"{name}/{index}": value for index, value in enumerate(values)} if len(values) > 1 else {}
                for tag, value in {name: sum(values) / len(values), **each}.items():
                    writer.add_scalar(tag, value, epoch + 1)
