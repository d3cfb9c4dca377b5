"""Callbacks for :func:`fit`; they hold no state of their own, so that a resumed run continues them."""

from __future__ import annotations

import os
import pathlib
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import where
from hfta_func._types import CheckpointError
from hfta_func.files.atomic import PathLike
from hfta_func.files.checkpoint import load, plain, read_metadata, save
from hfta_func.run.history import Callback, History
from hfta_func.step.state import TrainState

Mode = Literal["min", "max"]


def early_stopping(metric: str, patience: int, min_delta: float = 0.0, mode: Mode = "min") -> Callback:
    """Make each member inactive once it has stopped improving.

    A member keeps the parameters that it has then; :func:`keep_best` saves those of its best epoch.

    Args:
        metric: Name of a metric in the history, one number per member.
        patience: Number of consecutive epochs without improvement after which a member stops.
        min_delta: Least improvement over the best value so far that counts; NaN is no improvement.
        mode: Whether lower or higher values are better.

    Raises:
        ValueError: if ``patience`` is less than 1, or ``mode`` is neither ``"min"`` nor ``"max"``.

    Example:
        >>> history = History(torch.tensor([7, 8]))
        >>> history.epochs = [{"loss": torch.tensor([1.0, 1.0])}, {"loss": torch.tensor([0.5, 1.5])}]
        >>> step = make_train_step(torch.nn.Linear(1, 1), lambda model, batch: model(batch).mean(), sgd(lr=0.1))
        >>> state = step.init(*init_params(lambda: torch.nn.Linear(1, 1), [7, 8]), seeds=[7, 8])
        >>> early_stopping("loss", patience=1)(state, history).active
        tensor([ True, False])
    """
    sign = _sign(mode)
    if patience < 1:
        raise ValueError(f"patience is {patience}; it must be at least 1 epoch")

    def stop(state: TrainState, history: History) -> TrainState:
        values = sign * _per_member(history, metric)
        best = torch.full_like(values[0], float("inf"))
        waited = torch.zeros_like(values[0])
        for value in values:
            better = value < best - min_delta
            best, waited = torch.where(better, value, best), torch.where(better, 0, waited + 1)
        return state._replace(active=state.active & (waited < patience).to(state.active.device))

    return stop


def keep_checkpoints(directory: PathLike, keep: int = 3, every: int = 1) -> Callback:
    """Save the state as ``epoch-000012.safetensors`` and remove all but the latest files with exactly such names.

    Args:
        directory: Folder of the files; it is created if it does not exist.
        keep: Number of files to keep. Files of later epochs, from another run, stay.
        every: Number of epochs between files.

    Raises:
        ValueError: if ``keep`` or ``every`` is less than 1.

    Example:
        >>> import tempfile
        >>> callback = keep_checkpoints(tempfile.mkdtemp(), keep=2, every=5)
    """
    if keep < 1 or every < 1:
        raise ValueError(f"keep is {keep} and every is {every}; both must be at least 1")
    folder = pathlib.Path(directory)

    def keep_latest(state: TrainState, history: History) -> None:
        if len(history) % every:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"epoch-{epoch:06d}.safetensors" for epoch in range(1, len(history) + 1)]
        save(state, folder / names[-1], metadata={"epoch": len(history)})
        with os.scandir(folder) as entries:
            there = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        for name in [name for name in names if name in there][:-keep]:
            (folder / name).unlink(missing_ok=True)

    return keep_latest


def keep_best(path: PathLike, metric: str, mode: Mode = "min") -> Callback:
    """Keep a file with the state of each member after its own best epoch.

    ``load(path, like=state)`` reads it, and ``read_metadata(path)["metadata"]`` has each member's ``epoch`` and ``value``.
    NaN is never best; a member that has only had NaN is kept as of its first epoch. NaN and infinity are strings in
    ``value``, which ``float`` reads.

    Args:
        path: The file; the first epoch of a run replaces it.
        metric: Name of a metric in the history, one number per member.
        mode: Whether lower or higher values are better.

    Raises:
        ValueError: if ``mode`` is neither ``"min"`` nor ``"max"``.

    Example:
        >>> import os, tempfile
        >>> callback = keep_best(os.path.join(tempfile.mkdtemp(), "best.safetensors"), "accuracy", mode="max")
    """
    sign = _sign(mode)

    def keep(state: TrainState, history: History) -> None:
        value = _per_member(history, metric)[-1].double()
        epoch = torch.full_like(value, len(history), dtype=torch.int64)
        if len(history) > 1 and os.path.exists(path):
            held = read_metadata(path)["metadata"]
            try:
                best = torch.tensor([float(number) for number in held["value"]], dtype=torch.float64)
                epochs = torch.tensor(held["epoch"]).view_as(best)
            except (LookupError, TypeError, ValueError, RuntimeError):
                raise CheckpointError(f"{path} is not a file of keep_best; pass a file of its own") from None
            better = ~value.isnan() & ~(sign * value >= sign * best)
            if not better.any():
                return
            state = where(better.to(state.active.device), state, load(path, like=state))
            value, epoch = torch.where(better, value, best), torch.where(better, epoch, epochs)
        found = {"metric": metric, "mode": mode, "epoch": epoch.tolist(), "value": plain(value.tolist())}
        save(state, path, metadata=found)

    return keep


def tensorboard(writer: Any) -> Callback:
    """Write every metric with one number per member to TensorBoard, as ``loss/0``, ``loss/1``, ....

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or the directory for one.

    Raises:
        ImportError: if TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> callback = tensorboard(tempfile.mkdtemp())
    """
    if isinstance(writer, (str, os.PathLike)):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed; pip install 'hfta_func[tensorboard]', or pass a SummaryWriter"
            ) from error
        writer = SummaryWriter(os.fspath(writer))

    def record(state: TrainState, history: History) -> None:
        for name, values in history.epochs[-1].items():
            if values.dim() == 1:
                for member, value in enumerate(values.tolist()):
                    writer.add_scalar(f"{name}/{member}", value, len(history))
        writer.flush()

    return record


def _per_member(history: History, metric: str) -> Tensor:
    """A metric ``[epochs, M]``."""
    values = history[metric]
    if values.shape[1:] != history.seeds.shape:
        raise ValueError(
            f"metric '{metric}' has shape {list(values.shape[1:])} per epoch; a callback needs one number per model "
            f"{list(history.seeds.shape)}"
        )
    return values


def _sign(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"mode is {mode!r}; it must be 'min' or 'max'")
    return 1 if mode == "min" else -1
