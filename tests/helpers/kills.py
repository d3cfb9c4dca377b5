"""Studies whose workers or whose driver are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hfta_func import tune
from studies import SPACE, STUDY, build, told


def pids(crew: Any) -> list[int]:
    return [worker.pid for worker in crew._workers]


def kill(crew: Any, place: int) -> None:
    os.kill(pids(crew)[place], signal.SIGKILL)


class Killer:
    """Kills workers at random moments while they train, but none of them for the third time in a row."""

    def __init__(self, crew: Any, kills: int, kill: Any = kill):
        self.kills, self._busy, answered = 0, {}, crew._is_answered

        def noted(call: Any, worker: Any) -> bool:
            self._busy[worker.name] = call
            try:
                return answered(call, worker)
            finally:
                del self._busy[worker.name]

        crew._is_answered = noted
        self._thread = threading.Thread(target=self._run, args=(crew, kills, kill), daemon=True)
        self._ended, self._crew = threading.Event(), crew

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        del self._crew._is_answered

    def _run(self, crew: Any, kills: int, kill: Any) -> None:
        draws = random.Random(3)
        names = [worker.name for worker in crew._workers]
        while self.kills < kills and not self._ended.wait(draws.uniform(0.0, 0.1)):
            busy = [names.index(name) for name, call in [*self._busy.items()] if call.deaths < 2]
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
    shown = study.optuna.get_trials(deepcopy=False)
    return [trial.number for trial in study.trials] == [*range(len(shown))] and all(
        one.state.is_finished() for one in shown
    )


def check_kills(crew: Any, trials: int, kills: int, *kill: Any) -> None:
    """Workers that are killed at random moments change neither trials nor winner, and every trial is told once."""

    def build_slow(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)

        def step(state: Any, batch: Any) -> Any:
            time.sleep(0.004)
            return found.step(state, batch)

        return found._replace(step=step)

    options = STUDY | {"scheduler": tune.hyperband(), "trials": trials, "epochs": 9 if trials == 11 else 27}
    expected = tune.run(build, SPACE, max_models=16, **options)
    deaths = crew.deaths
    with Killer(crew, kills, *kill) as killer:
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
from studies import SPACE, STUDY, build, told

def build_slow(fixed, members):
    found = build(fixed, members)
    def step(state, batch):
        time.sleep(0.01)
        return found.step(state, batch)
    return found._replace(step=step)

options = STUDY | {"scheduler": tune.hyperband(), "trials": 64, "epochs": 27, "max_models": 8}
with hfta.workers.WorkerPool(2) as pool:
    pool.ready(60, everyone=True)
    print("begins", *[worker.pid for worker in pool._workers], flush=True)
    study = tune.run(build_slow, SPACE, executor=pool, resume=sys.argv[1], **options)
assert once(study)
assert told(study) == told(tune.run(build, SPACE, **options | {"max_models": 16}))
print("the same")
"""
