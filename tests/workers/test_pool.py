"""Workers that outlive a call: several fits and studies use the same ones, and those that die are replaced."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import hfta_func as hfta
from clocks import press_ctrl_c
from hfta_func import tune
from hfta_func.workers import pool, process
from kills import DRIVER, check_killed_drivers, check_kills, epochs_of, kill, once, pids
from studies import SCHEDULERS, SPACE, STUDY, after, build, told
from worker_arrays import M, arrayed, assert_same, data, loss_fn, trained


@pytest.fixture(scope="module")
def crew() -> Iterator[hfta.workers.WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        if len(pool.cores()) < 2:
            patch.setattr(pool, "cores", lambda: [0, 0])
        with hfta.workers.WorkerPool(2) as found:
            yield found


@pytest.mark.exhaustive
def test_several_fits_use_the_same_processes(crew: hfta.workers.WorkerPool, tmp_path: pathlib.Path) -> None:
    array = arrayed()
    before: list[int] = []
    called = {"compile": False, "callbacks": [lambda *_: None]}
    for options in ({}, {"resume": tmp_path / "run", "save_every": 2}, called):
        assert_same(trained(array, 3, executor=crew, **options), trained(array, 3))
        before = before or pids(crew)
        assert pids(crew) == before and not crew._functions, "nothing is kept of a fit that has ended"
    # The file holds the whole run, which goes on from there.
    assert_same(trained(array, 5, resume=tmp_path / "run"), trained(array, 5))


def test_a_run_that_was_broken_off_inside_an_epoch_goes_on(
    crew: hfta.workers.WorkerPool, tmp_path: pathlib.Path
) -> None:
    array = arrayed()
    calls: list[int] = []
    submit = crew.submit

    def pressed(*args: Any, **order: Any) -> int:
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return submit(*args, **order)

    options: dict[str, Any] = {"resume": tmp_path / "run", "save_every": 2, "executor": crew}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "submit", pressed)
        found = trained(array, 3, **options)
    assert found.history.interrupted and 0 < int(found.state.step[0]) < 15
    assert_same(trained(array, 3, **options), trained(array, 3))


class Fake:
    """A worker in this process, which answers with its own name, unless it does something else first."""

    def __init__(self, name: str, first: Callable[[Fake], Any] = lambda own: None, restarts: bool = True):
        self.name, self.first, self.restarts = name, first, restarts
        self.starts, self.gone = 0, threading.Event()

    def start(self) -> None:
        self.starts += 1
        if self.starts > 1 and not self.restarts:
            self.gone.wait()

    def call(self, *message: Any) -> bytes:
        return self.first(self) or process.dumps(self.name)

    def kill(self) -> None:
        self.gone.set()

    def close(self) -> None:
        pass


def die(worker: Fake) -> None:
    raise process.Died("for good")


def test_whatever_happens_to_a_worker_its_call_is_answered() -> None:
    def fail(worker: Fake) -> bytes:
        if worker.starts == 1:
            raise OSError("the line is cut")
        return b"no pickle" if worker.starts == 2 else b""

    with pool.Pool([Fake("only", fail)]) as crew:
        call = crew.submit(dict)
        assert crew.wait(60) == (call, "only") and crew.deaths == 2

    def always(worker: Fake) -> None:
        raise OSError("the line is cut")

    with pool.Pool([Fake("only", always)]) as crew:
        call = crew.submit(dict)
        number, answer = crew.wait(60)
        assert number == call and "its workers died 3 times in a row, last only OSError: the line is cut" in str(answer)


@pytest.mark.exhaustive
def test_ctrl_c_inside_a_segment_ends_it_after_a_step_or_two(
    crew: hfta.workers.WorkerPool, tmp_path: pathlib.Path
) -> None:
    def slow(model: Any, batch: Any) -> Any:
        time.sleep(0.2)
        return loss_fn(model, batch)

    def many() -> hfta.ArrayLoader:
        return hfta.ArrayLoader(data(120), 2, seeds=range(M))

    seen: list[float] = []

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.01)
        press_ctrl_c(1.0)

    pressed = threading.Thread(target=press, daemon=True)
    step, state = arrayed(loss=slow)
    options: dict[str, Any] = {"epochs": 1, "progress": False, "resume": tmp_path / "run"}
    pressed.start()
    found = hfta.fit(step, state, many(), executor=crew, callbacks=[lambda *_: seen.append(1)], **options)
    steps = {*found.state.step.tolist()}
    assert found.history.interrupted and not seen
    assert len(steps) == 1 and 0 < steps.pop() < 60, "all members have seen the same batches, and not the epoch"
    quick, _ = arrayed()
    again = hfta.fit(quick, state, many(), executor=crew, **options)
    assert_same(again, hfta.fit(quick, state, many(), epochs=1, progress=False))


def test_errors_and_failures_name_the_member(crew: hfta.workers.WorkerPool) -> None:
    lr = [0.01, 0.01, 0.01, 0.01, 1e300]
    found, expected = (trained(arrayed(lr), 3, executor=executor) for executor in (crew, None))
    assert found.history.failures == expected.history.failures != []
    with pytest.raises(hfta.errors.NonFiniteError, match=r"^model 4: the "):
        trained(arrayed(lr, nonfinite="raise"), 3, executor=crew)


@pytest.mark.exhaustive(ids="population|median|none")
@pytest.mark.parametrize("scheduler", ["hyperband", "population", "median", "none"])
def test_a_study_in_workers_finds_the_same(crew: hfta.workers.WorkerPool, scheduler: str) -> None:
    options = STUDY | {"scheduler": SCHEDULERS[scheduler], "max_models": 4}
    found = tune.run(build, SPACE, executor=crew, **options)
    expected = tune.run(build, SPACE, **options)
    assert told(found) == told(expected) and found.best.number == expected.best.number
    assert epochs_of(found) == epochs_of(expected)
    mine, other = (study.state(study.best.number).params for study in (found, expected))
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    assert found.export(found.best.number) is not None


def test_both_workers_train_and_none_waits_for_the_slowest(
    crew: hfta.workers.WorkerPool, tmp_path: pathlib.Path
) -> None:
    slow, gate = tmp_path / "slow", tmp_path / "gate"

    def wait(*_: Any) -> None:
        try:
            # The first of all steps waits for what the other worker does.
            slow.touch(exist_ok=False)
        except FileExistsError:
            return
        while not gate.exists():
            time.sleep(0.01)

    def build_gated(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        return found._replace(step=after(wait, found.step))

    seen: list[int] = []

    def look(study: tune.Study) -> None:
        seen.append(sum(len(trial.values) for trial in study.trials))
        if len(seen) == 3:
            gate.touch()

    options = STUDY | {"scheduler": tune.asynchronous_halving(eta=2), "max_models": 3, "executor": crew}
    study = tune.run(build_gated, SPACE, callbacks=[look], **options)
    assert gate.exists() and all(trial.values for trial in study.trials)


@pytest.mark.exhaustive
def test_a_member_that_raises_or_kills_its_worker_fails_alone(crew: hfta.workers.WorkerPool) -> None:
    here = os.getpid()

    def end(state: Any) -> None:
        bad = {seed: bool((state.keys == hfta.random.keys([seed])).any()) for seed in (1, 3)}
        assert os.getpid() != here
        if bad[1]:
            raise ArithmeticError("too fast")
        if bad[3]:
            os._exit(7)

    def build_deadly(fixed: Mapping[str, Any], members: Mapping[str, Sequence[Any]]) -> tune.Array:
        found = build(fixed, members)
        return found._replace(evaluate=after(end, found.evaluate))

    table = {"lr": [0.1] * 3, "momentum": [0.0] * 3, "seed": [1, 2, 3]}
    population = tune.population(build_deadly, table, max_models=3, executor=crew)
    # In one array, which is halved.
    population.jobs.start(population.groups[0], population.members, 1, None)
    population.fit(1)
    assert [member.status for member in population.members] == ["failed", "alive", "failed"]
    assert population.members[0].error == "ArithmeticError: too fast"
    error = population.members[2].error or ""
    assert "its workers died 3 times in a row" in error and "with status 7" in error


@pytest.mark.exhaustive
@pytest.mark.soak(ids="64")
@pytest.mark.parametrize(("trials", "kills"), [(11, 1), (64, 10)])
def test_workers_that_are_killed_change_nothing(crew: hfta.workers.WorkerPool, trials: int, kills: int) -> None:
    check_kills(crew, trials, kills)


def test_ctrl_c_ends_a_study_which_goes_on(crew: hfta.workers.WorkerPool, tmp_path: pathlib.Path) -> None:
    options = STUDY | {"scheduler": tune.halving(), "max_models": 2, "executor": crew, "resume": tmp_path / "study"}

    def press(study: tune.Study) -> None:
        if len(calls) < 3:
            calls.append(1)
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            # While the other array trains, or the next ones.
            time.sleep(0.1)

    calls: list[int] = []
    stops = 0
    while (study := tune.run(build, SPACE, callbacks=[press], **options)).interrupted:
        stops += 1
    assert stops == 3
    del options["executor"], options["resume"]
    assert told(study) == told(tune.run(build, SPACE, **options)) and once(study)


@pytest.mark.exhaustive
def test_workers_that_were_replaced_get_functions_again(crew: Any) -> None:
    def answer(power: int) -> tuple[int, int]:
        time.sleep(0.05)
        return 2**power, os.getpid()

    def all_of() -> list[tuple[int, int]]:
        calls = [crew.submit(answer, power=power) for power in range(8)]
        answers = dict(crew.wait() for _ in calls)
        assert [answers[call][0] for call in calls] == [2**power for power in range(8)]
        return [answers[call][1] for call in calls]

    deaths = crew.deaths
    for name in ("both", "workers", "are", "there"):
        crew.submit(dict, name=name)
    crew.ready(60, everyone=True)
    crew.forget()
    assert set(all_of()) == set(pids(crew))
    old = pids(crew)
    for place in (0, 1):
        kill(crew, place)
    assert not {*old} & {*all_of()} and crew.deaths == deaths + 2
    crew.forget()


def test_bad_input(crew: hfta.workers.WorkerPool) -> None:
    options: dict[str, Any] = STUDY | {"max_models": 4}
    with pytest.raises(ValueError, match=r"workers is 2 and there is an executor"):
        trained(arrayed(), workers=2, executor=crew)
    with pytest.raises(ValueError, match="there are workers and an executor"):
        tune.run(build, SPACE, workers=2, executor=crew, **options)
    with pytest.raises(ValueError, match="workers is 0; it must be"):
        tune.run(build, SPACE, workers=0, **options)
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"build cannot be sent to workers .*lock.* move it to a module"):
        tune.run(lambda fixed, members: lock and build(fixed, members), SPACE, executor=crew, **options)
    # Nothing is left behind.
    assert told(tune.run(build, SPACE, executor=crew, **options)) == told(tune.run(build, SPACE, **options))
    with hfta.workers.WorkerPool(1) as closed:
        pass
    with pytest.raises(hfta.errors.WorkerError, match="have been closed"):
        closed.submit(dict)


@pytest.mark.soak
@pytest.mark.skipif(len(pool.cores()) < 2, reason="needs two processors")
def test_a_driver_that_is_killed_goes_on_and_its_workers_end(tmp_path: pathlib.Path) -> None:
    check_killed_drivers(DRIVER, tmp_path / "study", seconds=3.0, errors=subprocess.PIPE)
