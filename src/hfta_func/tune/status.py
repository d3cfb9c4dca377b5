"""What a study that runs is doing, in a file that others can read."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from typing import Any

from hfta_func.files import atomic
from hfta_func.tune.jobs import spans
from hfta_func.tune.search import Search
from hfta_func.tune.tables import PathLike

_NAME = "status.json"
_EVERY = 1.0
"""Seconds from one look to the next."""


class Status:
    """Writes every second, to a folder, who trains what in a study.

    Args:
        folder: Where the study is kept.
        search: The search.
    """

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
        # The study goes on meanwhile; what a moment spoils, the next one mends.
        with contextlib.suppress(RuntimeError, OSError):
            atomic.write(self._path, json.dumps(self._report(state)).encode())

    def _report(self, state: str) -> dict[str, Any]:
        search, study = self._search, self._search.study
        counts = dict.fromkeys(("running", "complete", "stopped", "failed"), 0)
        for trial in [*study.trials]:
            counts[trial.status] += 1
        jobs = study.population.jobs
        busy = jobs.executor.busy()
        trials = {member: trial.number for trial in [*study.trials] for member in trial.members}
        training = []
        for job in [*jobs.under_way]:
            for call, numbers in dict(job.calls).items():
                worker, since = busy.get(call, (None, None))
                training.append({
                    **{"worker": worker, "since": since, "fixed": job.group.fixed, "members": len(numbers)},
                    **{"trials": sorted({trials[number] for number in numbers}), "epochs": job.epochs},
                    "from": min(job.starts[number] for number in numbers),
                })  # fmt: skip
        return {
            **{"state": state, "pid": os.getpid(), "host": platform.node(), "began": self._began, "now": time.time()},
            **{"trials": counts, "of": sum(cohort.trials for cohort in search.cohorts)},
            **{"epochs": self._trained(), "before": self._before, "planned": search.planned},
            **{"workers": jobs.executor.count, "deaths": jobs.executor.deaths, "training": training},
            "failures": [[trial.number, trial.error] for trial in [*study.trials] if trial.status == "failed"][-3:],
        }


def read(folder: PathLike) -> dict[str, Any]:
    """What :class:`Status` has written.

    Raises:
        ValueError: if there is nothing.
    """
    path = os.path.join(folder, _NAME)
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(folder)} holds no study that has run; pass the folder of tune.run(resume=...), or <file>.study"
        ) from error


def shown(found: dict[str, Any]) -> str:
    """In words: how far it is, who trains what, how fast, what has failed, and how long it will take."""
    now = time.time()
    state = found["state"]
    if state == "running" and not _is_alive(found, now):
        state = f"not running any more (no word for {_time(now - found['now'])}); the same call goes on from its folder"
    counts = ", ".join(f"{count} {name}" for name, count in found["trials"].items() if count) or "none yet"
    lines = [f"{state}: {counts}, of {found['of']} trials"]
    seconds, made = found["now"] - found["began"], found["epochs"] - found["before"]
    rate = made / seconds if seconds > 0 else 0.0
    lines.append(f"{rate:.3g} epochs of a member per second, {found['epochs']} in all")
    left = max(0, found["planned"] - found["epochs"])
    if found["state"] == "running" and rate:
        lines.append(f"about {_time(left / rate)} left, if {left} epochs are")
    if found["deaths"]:
        lines.append(f"workers have died {found['deaths']} times, and were replaced")
    for one in found["training"] if state == "running" else ():
        fixed = "".join(f" {name}={value}" for name, value in one["fixed"].items())
        since = f" for {_time(now - one['since'])}" if one["since"] else ""
        worker = one["worker"] or ("this process" if found["workers"] == 1 else "waits for a worker")
        lines.append(
            f"  {worker}{since}: trials {spans(one['trials'])}{fixed}, epochs {one['from'] + 1} to "
            f"{one['from'] + one['epochs']} of {one['members']} members"
        )
    lines += [f"  trial {number} failed: {error}" for number, error in found["failures"]]
    return "\n".join(lines)


def _is_alive(found: dict[str, Any], now: float) -> bool:
    if found["host"] != platform.node():
        return now - found["now"] < 30 * _EVERY
    try:
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
