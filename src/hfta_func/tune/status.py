"""The status of a running study, in a file that other processes read."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from typing import Any

from hfta_func.files import atomic
from hfta_func.files.atomic import PathLike
from hfta_func.tune.jobs import spans
from hfta_func.tune.search import Search

_NAME = "status.json"
_EVERY = 1.0
"""Seconds between two writes of the file."""


class Status:
    """Writes every second what a study does, to a file in its folder."""

    def __init__(self, folder: PathLike, search: Search):
        self._path = os.path.join(folder, _NAME)
        self._search, self._began = search, time.time()
        self._before = self._trained()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._write("broken off" if kind else "interrupted" if self._search.study.interrupted else "ended")

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write("running")
            self._ended.wait(_EVERY)

    def _trained(self) -> int:
        return sum(member.epoch for member in self._search.study.population.members)

    def _write(self, state: str) -> None:
        # The study goes on in another thread; if its data changes during a write, the next write is correct.
        with contextlib.suppress(RuntimeError, OSError):
            atomic.write(self._path, json.dumps(self._report(state)).encode(), durable=False)

    def _report(self, state: str) -> dict[str, Any]:
        study, jobs = self._search.study, self._search.study.population.jobs
        busy, seeds, training = jobs.executor.busy(), len(self._search.seeds), []
        for job in [*jobs.under_way]:
            for call, numbers in dict(job.calls).items():
                worker, since = busy.get(call, (None, None))
                first = min(job.starts[number] for number in numbers)
                training.append(
                    dict(worker=worker, since=since, fixed=job.group.fixed, members=len(numbers), first=first + 1)
                    | dict(trials=sorted({number // seeds for number in numbers}), last=first + job.epochs)
                )
        failures = [[trial.number, trial.error] for trial in [*study.trials] if trial.status == "failed"]
        return (
            dict(state=state, pid=os.getpid(), host=platform.node(), began=self._began, now=time.time())
            | dict(trials=study.counts, of=self._search.total, failures=failures[-3:], training=training)
            | dict(epochs=self._trained(), before=self._before, planned=self._search.planned)
            | dict(workers=jobs.executor.count, deaths=jobs.executor.deaths)
        )


def read(folder: PathLike) -> dict[str, Any]:
    """Read the file of :class:`Status`; raises a ValueError if there is none."""
    path = os.path.join(folder, _NAME)
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(folder)} holds no study that has run; pass the folder of tune.run(resume=...), or <file>.study"
        ) from error


def shown(status: dict[str, Any]) -> str:
    """Text of a :func:`read` status: progress, speed, time left, the arrays that train, and failures."""
    now, state = time.time(), status["state"]
    if state == "running" and not _is_alive(status, now):
        state = f"not running any more (last status {_time(now - status['now'])} ago); the same call goes on from its folder"
    counts = ", ".join(f"{count} {name}" for name, count in status["trials"].items() if count) or "none yet"
    rate = (status["epochs"] - status["before"]) / max(status["now"] - status["began"], 1e-9)
    lines = [f"{state}: {counts}, of {status['of']} trials"]
    lines.append(f"{rate:.3g} epochs of a member per second, {status['epochs']} in all")
    if state == "running" and rate:
        left = max(0, status["planned"] - status["epochs"])
        lines.append(f"about {_time(left / rate)} left for {left} epochs")
    if status["deaths"]:
        lines.append(f"workers have died {status['deaths']} times, and were replaced")
    for array in status["training"] if state == "running" else ():
        fixed = "".join(f" {name}={value}" for name, value in array["fixed"].items())
        since = f" for {_time(now - array['since'])}" if array["since"] else ""
        worker = array["worker"] or ("this process" if status["workers"] == 1 else "waits for a worker")
        epochs = f"epochs {array['first']} to {array['last']} of {array['members']} members"
        lines.append(f"  {worker}{since}: trials {spans(array['trials'])}{fixed}, {epochs}")
    return "\n".join([*lines, *(f"  trial {number} failed: {error}" for number, error in status["failures"])])


def _is_alive(status: dict[str, Any], now: float) -> bool:
    if status["host"] != platform.node():
        return now - status["now"] < 30 * _EVERY
    with contextlib.suppress(PermissionError):
        try:
            os.kill(status["pid"], 0)
        except ProcessLookupError:
            return False
    return True


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
