"""Studies whose workers or whose driver are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hfta_func import tune
from processes import program
from studies import SPACE, STUDY, after, build, told


def pids(crew: Any) -> list[int]:
    return [worker.pid for worker in crew._workers]


def kill(crew: Any, place: int) -> None:
    os.kill(pids(crew)[place], signal.SIGKILL)


class Killer:
    """Kills workers at random moments while they train, but none of them for the third time in a row."""

    def __init__(self, crew: Any, kills: int):
        self.kills, self._busy, answered = 0, {}, crew._is_answered

        def noted(call: Any, worker: Any) -> bool:
            self._busy[worker.name] = call
            try:
                return answered(call, worker)
            finally:
                del self._busy[worker.name]

        crew._is_answered = noted
        self._thread = threading.Thread(target=self._run, args=(crew, kills), daemon=True)
        self._ended, self._crew = threading.Event(), crew

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        del self._crew._is_answered

    def _run(self, crew: Any, kills: int) -> None:
        draws = random.Random(3)
        names = [worker.name for worker in crew._workers]
        while self.kills < kills and not self._ended.wait(draws.uniform(0.0, 0.1)):
            busy = [names.index(name) for name, call in [*self._busy.items()] if crew._seen_to_die[call] < 2]
            if busy:
                kill(crew, draws.choice(busy))
                self.kills += 1
                deaths = crew.deaths
                while crew.deaths == deaths and not self._ended.wait(0.01):
                    pass


def epochs_of(study: tune.Study) -> list[int]:
    return [member.epoch for member in study.population.members]


def once(study: tune.Study) -> bool:
    """Whether each trial was asked for once, and all have ended."""
    shown, numbers = study.optuna.get_trials(deepcopy=False), [trial.number for trial in study.trials]
    return numbers == [*range(len(shown))] and all(one.state.is_finished() for one in shown)


def check_kills(crew: Any, trials: int, kills: int) -> None:
    """Workers that are killed at random moments change neither trials nor winner, and every trial is told once."""

    def build_slow(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        return found._replace(step=after(lambda *_: time.sleep(0.004), found.step))

    options = STUDY | {"scheduler": tune.hyperband(), "trials": trials, "epochs": 9 if trials == 11 else 27}
    expected = tune.run(build, SPACE, max_models=16, **options)
    deaths = crew.deaths
    with Killer(crew, kills) as killer:
        found = tune.run(build_slow, SPACE, max_models=4, executor=crew, **options)
    assert killer.kills == kills == crew.deaths - deaths
    assert told(found) == told(expected) and found.best.number == expected.best.number
    assert epochs_of(found) == epochs_of(expected)
    assert once(found) and once(expected)


KILLS = int(os.environ.get("HFTA_TEST_KILLS", "2"))
"""How often nodes and drivers are killed."""
DRIVER = """
import sys, time
import hfta_func as hfta
from hfta_func import tune
from kills import once
from studies import SPACE, STUDY, after, build, told

def build_slow(fixed, members):
    found = build(fixed, members)
    return found._replace(step=after(lambda *_: time.sleep(0.01), found.step))

options = STUDY | {"scheduler": tune.hyperband(), "trials": 64, "epochs": 27, "max_models": 8}
with hfta.workers.WorkerPool(2) as pool:
    pool.ready(60, everyone=True)
    print("begins", *[worker.pid for worker in pool._workers], flush=True)
    study = tune.run(build_slow, SPACE, executor=pool, resume=sys.argv[1], **options)
assert once(study)
assert told(study) == told(tune.run(build, SPACE, **options | {"max_models": 16}))
print("the same")
"""


def check_killed_drivers(code: str, *arguments: Any, seconds: float, errors: int) -> None:
    """A study whose driver is killed goes on to the same trials, and its two workers end, without a word."""
    draws, killed = random.Random(1), 0
    for _ in range(KILLS):
        with program(code, *arguments, stderr=errors) as driver:
            workers = [int(word) for word in driver.stdout.readline().split()[1:]]
            time.sleep(draws.uniform(0.1, seconds))
            driver.kill()
            rest, said = driver.communicate()
        assert len(workers) == 2 and "Error" not in (said or "")
        # At the end of the call that each is at.
        for _ in range(600):
            if not any(os.path.exists(f"/proc/{worker}") for worker in workers):
                break
            time.sleep(0.1)
        assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
        if rest.endswith("the same\n"):
            break
        killed += 1
    assert killed
    print("killed", killed)
    with program(code, *arguments, stderr=subprocess.PIPE) as driver:
        out, said = driver.communicate(timeout=600)
    assert out.endswith("the same\n"), said[-3000:]
