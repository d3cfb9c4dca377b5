"""Callbacks for :func:`run` that show a study while it runs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from hfta_func._types import require
from hfta_func.errors import WorkerError
from hfta_func.files.atomic import PathLike
from hfta_func.run.history import History
from hfta_func.tune.study import Study, Trial
from hfta_func.workers.pool import Pool


def tensorboard(folder: PathLike) -> Callable[..., None]:
    """Write a study to TensorBoard, a run per trial with its hyperparameters, as a callback for :func:`run`.

    Each metric is the mean over the trial's seeds after every epoch; with several seeds, ``loss/0``, ``loss/1``, ... are
    the metrics of its members. TensorBoard's page HPARAMS has a row per trial, with the values that it began with.

    Args:
        folder: The folder of the runs ``trial-0000``, ``trial-0001``, ...; a resumed study continues them.

    Raises:
        ImportError: if TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> callback = tensorboard(tempfile.mkdtemp())
    """
    require("torch.utils.tensorboard", "tensorboard")
    records = require("tensorboard.summary.writer.record_writer", "tensorboard")
    shown: dict[int, tuple[int, str]] = {}

    def record(study: Study, history: History | None = None) -> None:
        for trial in study.trials:
            epochs = min(len(study.population.members[member].metrics) for member in trial.members)
            if epochs and shown.get(trial.number) != (epochs, trial.status):
                before, _ = shown.get(trial.number, (0, ""))
                shown[trial.number] = epochs, trial.status
                path = os.path.join(folder, f"trial-{trial.number:04d}")
                os.makedirs(path, exist_ok=True)
                # One file per trial, because the names of files of several writers need not sort by time; closed after each
                # write, because there are many trials. The first write replaces the same events of a broken-off study.
                with open(os.path.join(path, "events.out.tfevents.study"), "ab" if before else "wb") as file:
                    writer = records.RecordWriter(file)
                    for event in _events(study, trial, range(before, epochs)):
                        writer.write(event.SerializeToString())

    return record


def prometheus(name: str) -> Callable[..., None]:
    """Export the progress of a study to Prometheus through Ray's metrics, as a callback for :func:`run`.

    The endpoints of Ray's nodes then have ``ray_hfta_func_trials`` by study and status; ``ray_hfta_func_epochs_total``, the
    epochs that all members of a study have trained; and, by study and worker, ``ray_hfta_func_worker_seconds_total``, its
    time at work, and ``ray_hfta_func_worker_deaths_total``. They change after every array that has trained.

    Args:
        name: Name of the study.

    Raises:
        ImportError: if Ray is not installed.
        WorkerError: if this process is in no Ray cluster, or one without metrics; when the callback is called.

    Example:
        .. code-block:: python

            with cluster.ray(address="10.0.0.1:6379") as executor:
                study = tune.run(build, space, ..., executor=executor, callbacks=[tune.prometheus("digits")])
    """
    ray, metrics = require("ray", "cluster"), require("ray.util.metrics", "cluster")
    meters: dict[str, Any] = {}
    shown: dict[tuple[str, str], float] = {}

    def begin() -> None:
        if not ray.is_initialized():
            raise WorkerError("tune.prometheus needs a Ray cluster; call cluster.ray(...) before tune.run")
        if all(node.get("MetricsExportPort", -1) < 1 for node in ray.nodes() if node["Alive"]):
            raise WorkerError("this Ray cluster exports no metrics; pip install 'ray[default]' on all of its nodes")
        of_worker = ("study", "worker")
        meters["trials"] = metrics.Gauge("hfta_func_trials", "Trials by status.", ("study", "status"))
        meters["epochs"] = metrics.Counter("hfta_func_epochs", "Epochs that members have trained.", ("study",))
        meters["seconds"] = metrics.Counter("hfta_func_worker_seconds", "Seconds that a worker was at work.", of_worker)
        meters["deaths"] = metrics.Counter("hfta_func_worker_deaths", "Deaths of a worker.", of_worker)

    def count(label: str, total: float, **tags: str) -> None:
        key = label, tags.get("worker", "")
        if total > shown.get(key, 0):
            meters[label].inc(total - shown.get(key, 0), {"study": name, **tags})
            shown[key] = total

    def show(study: Study, history: History | None = None) -> None:
        if not meters:
            begin()
        for status, trials in study.counts.items():
            meters["trials"].set(trials, {"study": name, "status": status})
        count("epochs", sum(member.epoch for member in study.population.members))
        executor = study.population.jobs.executor
        if isinstance(executor, Pool):
            for worker, (seconds, deaths) in executor.record().items():
                count("seconds", seconds, worker=worker)
                count("deaths", deaths, worker=worker)

    return show


def _events(study: Study, trial: Trial, epochs: range) -> Iterator[Any]:
    """The events of a trial's file for some epochs."""
    board = require("torch.utils.tensorboard.summary", "tensorboard")
    make = functools.partial(require("tensorboard.compat.proto.event_pb2", "tensorboard").Event, wall_time=time.time())
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in trial.params.items()
    }
    experiment, begun, ended = board.hparams(plain, dict.fromkeys(study.metrics, 0.0))
    if epochs.start == 0:
        yield make(file_version="brain.Event:2")
        yield from (make(summary=summary) for summary in (experiment, begun))
    members = [study.population.members[member].metrics for member in trial.members]
    for epoch in epochs:
        for name in members[0][epoch]:
            values = [metrics[epoch][name] for metrics in members]
            each = {f"{name}/{index}": value for index, value in enumerate(values)} if len(values) > 1 else {}
            for tag, value in {name: sum(values) / len(values), **each}.items():
                yield make(step=epoch + 1, summary=board.scalar(tag, value))
    if trial.status != "running":
        yield make(summary=ended)
