"""Callbacks for :func:`fit`; they hold no state, so that a resumed run continues them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import where
from hfta_func._types import SIGNS, direction_of, require
from hfta_func.errors import HyperparameterError, StateError
from hfta_func.files.atomic import PathLike
from hfta_func.files.checkpoint import load, plain, read_metadata, save
from hfta_func.run.history import Callback, History, Mode, is_better, present
from hfta_func.step.state import TrainState, average, mixing, refuse_shared


def early_stopping(metric: str, patience: int, min_delta: float = 0.0, mode: Mode = "min") -> Callback:
    """Make each member inactive once it has stopped improving.

    A member keeps its parameters of that epoch; :func:`keep_best` saves those of its best epoch.

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
    sign = SIGNS[direction_of(mode)]
    if patience < 1:
        raise ValueError(f"patience is {patience}; it must be at least 1 epoch")

    def stop(state: TrainState, history: History) -> TrainState:
        values = sign * present(history, metric)
        best, waited = torch.full_like(values[0], torch.inf), torch.zeros_like(values[0])
        for epoch, value in enumerate(values):
            better = value < best - min_delta
            best, waited = torch.where(better, value, best), torch.where(better, 0, waited + 1)
            # Members that came later have missed the epochs before.
            waited = torch.where(history.since[history.members] > epoch, 0, waited)
        return state._replace(active=state.active & (waited < patience).to(state.active.device))

    return stop


def stop_at(metric: str, value: float, mode: Mode = "min") -> Callback:
    """Make each member inactive once a metric is good enough.

    Args:
        metric: Name of a metric in the history, one number per member.
        value: What the metric must reach: at most this, or, with ``mode="max"``, at least this. NaN never does.
        mode: Whether lower or higher values are better.

    Raises:
        ValueError: if ``mode`` is neither ``"min"`` nor ``"max"``.

    Example:
        >>> history = History(torch.tensor([7, 8]))
        >>> history.epochs = [{"accuracy": torch.tensor([0.9, 0.97])}]
        >>> step = make_train_step(torch.nn.Linear(1, 1), lambda model, batch: model(batch).mean(), sgd(lr=0.1))
        >>> state = step.init(*init_params(lambda: torch.nn.Linear(1, 1), [7, 8]), seeds=[7, 8])
        >>> stop_at("accuracy", 0.95, mode="max")(state, history).active
        tensor([ True, False])
    """
    sign = SIGNS[direction_of(mode)]

    def stop(state: TrainState, history: History) -> TrainState:
        # In the precision of the metric, in which 0.95 may be a little less.
        reached = sign * present(history, metric)[-1] <= sign * value
        return state._replace(active=state.active & ~reached.to(state.active.device))

    return stop


def stop_after(seconds: float) -> Callback:
    """End :func:`fit` with the first epoch that ends after some seconds; members stay active, so that a file goes on.

    Args:
        seconds: Counted from the call of :func:`fit`, compiling included.

    Example:
        >>> callback = stop_after(3600)
    """

    def stop(state: TrainState, history: History) -> None:
        history.interrupted |= history.seconds >= seconds

    return stop


def while_active(state: TrainState, history: History) -> None:
    """A callback that sets to NaN what the last epoch says of members that took no part: their runs have ended."""
    away = history.members[~state.active.cpu()]
    for name, value in history.epochs[-1].items() if len(away) else ():
        if value.shape[:1] == history.seeds.shape:
            value = value if value.is_floating_point() else value.double()
            history.epochs[-1][name] = value.index_fill(0, away, torch.nan)


def keep_checkpoints(directory: PathLike, keep: int = 3, every: int = 1) -> Callback:
    """Save the state as ``epoch-000012.safetensors`` and remove all but the latest files with exactly such names.

    Args:
        directory: Folder of the files; it is created if it does not exist.
        keep: Number of files to keep. Files of later epochs, from another run, stay.
        every: Number of epochs between files.

    Example:
        >>> import tempfile
        >>> callback = keep_checkpoints(tempfile.mkdtemp(), keep=2, every=5)
    """
    folder = pathlib.Path(directory)

    def keep_latest(state: TrainState, history: History) -> None:
        if len(history) % every:
            return
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"epoch-{epoch:06d}.safetensors" for epoch in range(1, len(history) + 1)]
        save(state, paths[-1], metadata={"epoch": len(history)})
        for path in [path for path in paths if path.is_file() and not path.is_symlink()][:-keep]:
            path.unlink()

    return keep_latest


def keep_best(path: PathLike, metric: str, mode: Mode = "min") -> Callback:
    """Keep a file with the state of each member after its best epoch.

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
    sign = SIGNS[direction_of(mode)]

    def keep(state: TrainState, history: History) -> None:
        refuse_shared(state, "keep_best")
        value = present(history, metric)[-1].double()
        epoch = torch.full_like(value, len(history), dtype=torch.int64)
        if len(history) > 1 and os.path.exists(path):
            saved = read_metadata(path)["metadata"]
            best = torch.tensor([float(number) for number in saved["value"]], dtype=torch.float64)
            if best.shape != value.shape:
                cure = f"keep_best does not follow members that come or go, so use fit(..., restore_best='{metric}')"
                raise StateError(f"{path} holds {len(best)} members but the run has {len(value)} now; {cure} instead")
            epochs = torch.tensor(saved["epoch"])
            better = is_better(value, best, sign)
            if not better.any():
                return
            state = where(better.to(state.active.device), state, load(path, like=state))
            value, epoch = torch.where(better, value, best), torch.where(better, epoch, epochs)
        about = {"metric": metric, "mode": mode, "epoch": epoch.tolist(), "value": plain(value.tolist())}
        save(state, path, metadata=about)

    return keep


def averaging(
    groups: Tensor | Sequence[int] | Callable[[int], Tensor] | None = None,
    *,
    weights: Tensor | Sequence[Any] | Callable[[int], Any] | None = None,
    every: int = 1,
) -> Callback:
    """Average members after each epoch: federated averaging, gossip, peers that come and go.

    Parameters and buffers are averaged, see :func:`hfta_func.step.average`; optimizer state, such as momentum, and integers
    are not. Inactive members take no part.

    Args:
        groups: ``[M]`` integers: members with the same number are averaged, and those with -1 take no part. Or a function of
            the round, which counts from 0. Default: all members.
        weights: ``[M]``, such as numbers of rows; equal by default. Without groups also ``[M, M]``, whose row ``i`` has the
            weights of the average that member ``i`` gets. Or a function of the round.
        every: Number of epochs from one round to the next.

    Raises:
        HyperparameterError: in the run, if groups or weights do not fit the members.

    Example:
        >>> federated = averaging(weights=[120, 80, 300])
        >>> pairs = averaging(lambda turn: torch.arange(8).roll(turn) // 2)
    """

    def mix(state: TrainState, history: History) -> TrainState | None:
        if len(history) % every:
            return None
        turn = len(history) // every - 1
        matrix = None if weights is None else torch.as_tensor(weights(turn) if callable(weights) else weights)
        active = state.active.cpu()
        if matrix is None or matrix.dim() < 2:
            numbers = groups(turn) if callable(groups) else [0] * len(active) if groups is None else groups
            return average(state, mixing(torch.where(active, torch.as_tensor(numbers).cpu(), -1), matrix))
        if groups is not None:
            raise HyperparameterError(f"weights is {[*matrix.shape]}, who averages with whom; leave out groups")
        if matrix.shape != (len(active),) * 2:
            return average(state, matrix)
        # Inactive members have no weight in averages and keep their values; so do members left without any weight.
        among_active = torch.where(active[:, None] & active, matrix.double(), 0.0)
        alone = (among_active == 0).all(1) & (matrix != 0).any(1)
        return average(state, torch.where(alone[:, None], torch.eye(len(active), dtype=torch.float64), among_active))

    return mix


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
        writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(writer))

    def record(state: TrainState, history: History) -> None:
        for name, values in history.epochs[-1].items():
            if values.dim() == 1:
                members = history.members if values.shape == history.seeds.shape else torch.arange(len(values))
                for member in members.tolist():
                    writer.add_scalar(f"{name}/{member}", values[member].item(), len(history))
        writer.flush()

    return record
