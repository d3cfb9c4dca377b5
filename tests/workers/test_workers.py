"""Arrays whose parts train in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from clocks import press_ctrl_c
from hfta_func.errors import WorkerError
from hfta_func.run import trainers
from hfta_func.step import allocator
from hfta_func.workers import process
from hfta_func.workers.process import loads
from processes import environment, program
from worker_arrays import M, arrayed, assert_same, data, loader, loss_fn, make, pools, trained

pytestmark = pytest.mark.usefixtures("two_cores")


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("donate", [False, True])
def test_two_processes_are_one_array(donate: bool) -> None:
    evaluated = hfta.make_eval_step(
        make().eval(), lambda model, batch: {"error": (model(batch[0]) - batch[1]).square().mean()}
    )
    own: dict[str, Any] = {"evaluate": lambda state: evaluated(state, data())}

    def callbacks() -> list[Any]:
        return [hfta.callbacks.early_stopping("error", patience=2), hfta.schedules.plateau("loss", patience=0)]

    runs = [trained(arrayed(donate=donate), 4, callbacks=callbacks(), workers=count, **own) for count in (2, None)]
    assert_same(*runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [0, None, (0, None)])
def test_batches_of_any_kind(dims: Any) -> None:
    batches = [
        tuple(
            leaf[at : at + 6] if dim is None else torch.stack([leaf[at : at + 6] * (i + 1) for i in range(M)])
            for leaf, dim in zip(data(), dims if isinstance(dims, tuple) else (dims, dims), strict=True)
        )
        for at in range(0, 24, 6)
    ]
    step, state = arrayed(batch_dims=dims)
    found = hfta.fit(step, state, batches, epochs=3, progress=False, workers=2, save_every=None)
    assert_same(found, hfta.fit(step, state, batches, epochs=3, progress=False))


def test_an_error_of_the_user_s_code_comes_through() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        trained(arrayed(loss=loss), workers=2)


@pytest.mark.exhaustive
def test_workers_keep_large_blocks() -> None:
    # Otherwise every step of wide models pays for page faults.
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not allocator._is_decided:
            raise LookupError("large blocks go back to the system")
        return loss_fn(model, batch)

    array = arrayed(loss=loss)
    trained(array, workers=2)
    with hfta.workers.WorkerPool(1) as pool:
        trained(array, executor=pool)


@pytest.mark.exhaustive
def test_a_killed_process_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    array = arrayed()
    expected = trained(array, 4)
    crews = pools(monkeypatch)

    def kill(state: Any, history: hfta.run.History) -> None:
        worker = crews[0]._workers[len(history) % 2]
        threading.Timer(0.001 * len(history), os.kill, (worker.pid, signal.SIGKILL)).start()

    assert_same(trained(array, 4, callbacks=[kill], workers=2), expected)


@pytest.mark.exhaustive
def test_a_process_that_always_dies_is_given_up() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        os._exit(3)

    match = r"^models [02] to [14]: its workers died 3 times in a row, last worker [01] with status 3"
    with pytest.raises(WorkerError, match=match):
        trained(arrayed(loss=loss), workers=2)


def slow(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.01)
    return loss_fn(model, batch)


@pytest.mark.exhaustive
@pytest.mark.soak(ids="None")
@pytest.mark.parametrize("save_every", [None, 2])
def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, save_every: int | None) -> None:
    step, state = arrayed(loss=slow)
    options: dict[str, Any] = {"epochs": 12, "progress": False, "save_every": save_every}
    expected = hfta.fit(step, state, loader(), resume=tmp_path / "whole", workers=2, **options)
    assert_same(expected, hfta.fit(step, state, loader(), **{**options, "save_every": None}))
    stops = 0

    def stop(state: Any, history: hfta.run.History) -> None:
        if len(history) % 3 == 1:
            press_ctrl_c(0.013 * (stops + 1))

    while True:
        calls = [stop] if stops < 3 else []
        found = hfta.fit(step, state, loader(), resume=tmp_path / "run", callbacks=calls, workers=2, **options)
        if not found.history.interrupted:
            break
        stops += 1
        kept = hfta.load(tmp_path / "run", like=state)
        assert len(set(kept.step.tolist())) == 1, "all members have seen the same batches"
    assert stops == 3
    assert_same(found, expected)
    for a, b in zip(optree.tree_leaves(found.state), optree.tree_leaves(expected.state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("faster", [True, False])
def test_auto_tries_workers_and_takes_what_is_faster(
    faster: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = os.getpid()

    def loss(model: nn.Module, batch: Any) -> Any:
        with (tmp_path / "where").open("a") as file:
            file.write(f"{os.getpid() == here} ")
        time.sleep(0.3 if (os.getpid() == here) is faster else 0.03)
        return loss_fn(model, batch)

    monkeypatch.setattr(trainers, "_LEAST", 0.1)
    monkeypatch.setattr(trainers, "_TRIAL", 0.1)
    crews = pools(monkeypatch)

    step, state = arrayed(loss=loss)
    options: dict[str, Any] = {"epochs": 12, "progress": False, "save_every": 3}
    found = hfta.fit(step, state, loader(), workers="auto", resume=tmp_path / "run", **options)
    where = (tmp_path / "where").read_text().split()
    assert where[0] == "True" and "False" in where, "it begins here, and tries workers"
    assert where[-1] == str(not faster) and crews[0]._closed
    assert found.history.status.startswith("Pool: replayed or eager; a step took" if faster else "eager: ")
    assert found.history.status.endswith("in worker processes")
    assert_same(found, trained(arrayed(), 12))


def test_auto_says_why_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "cores", lambda: [0, 1])
    step, state = arrayed()
    options: dict[str, Any] = {"epochs": 2, "progress": False, "workers": "auto"}
    found = hfta.fit(step, state, loader(), **options)
    assert re.search(r"no worker processes: they start for 60 s of training, not for \d+\.\d s$", found.history.status)
    found = hfta.fit(step, state, [*loader()], **options)
    assert found.history.status.endswith("; no worker processes: the loader is no ArrayLoader")
    monkeypatch.setattr(trainers, "cores", lambda: [0])
    found = hfta.fit(step, state, loader(), **options)
    assert found.history.status.endswith("; no worker processes: there is one processor or one model")


@pytest.mark.exhaustive
def test_a_worker_that_dies_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (5,)

    monkeypatch.setattr(process, "settings", Deadly)
    match = "died 3 times in a row while it started, last with status 5; what"
    with pytest.raises(WorkerError, match="worker [01] " + match):
        trained(arrayed(), workers=2)
    with hfta.workers.WorkerPool(1) as pool, pytest.raises(WorkerError, match="worker 0 " + match):
        trained(arrayed(), executor=pool)


def test_bad_input() -> None:
    for count in (0, "many"):
        with pytest.raises(ValueError, match=f"workers is {count!r}; it must be at least 1, or 'auto'"):
            trained(arrayed(), workers=count)
    lock = threading.Lock()
    array = arrayed(loss=lambda model, batch: loss_fn(model, batch)[0] + 0 * bool(lock))
    with pytest.raises(TypeError, match="the step or the loader cannot be sent to workers"):
        trained(array, workers=2)


KILLED = """
import time
import torch
from hfta_func.workers.process import Shared

shared = Shared(torch.arange(9))
print(shared.path, flush=True)
time.sleep(3600)
"""


def test_shared_memory_has_no_name_and_outlives_a_killed_process_only_where_it_is_mapped() -> None:
    with program(KILLED) as process:
        path = process.stdout.readline().strip()
        assert os.readlink(path).endswith("(deleted)")
        mapped = loads(path)
        process.kill()
        process.wait()
    assert not os.path.exists(path) and mapped.tolist() == [*range(9)]


SCRIPT = """
import hfta_func as hfta
print("runs", flush=True)
scale = 3
with hfta.workers.WorkerPool(1) as pool:
    for power in (2, 3):
        pool.submit(lambda power: scale**power, power=power)
        print(pool.wait()[1])
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, module: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    own = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    order = [sys.executable, *(["-m", "script"] if module else [str(tmp_path / "script.py")])]
    done = subprocess.run(order, env=own, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("runs\n9\n27\n", "")


THREADS = """
import hfta_func as hfta, torch
step = hfta.make_train_step(torch.nn.Linear(512, 64), lambda m, x: m(x).square().mean(), hfta.sgd(lr=0.1))
state = step.init(*hfta.init_params(lambda: torch.nn.Linear(512, 64), [0, 1]), seeds=[0, 1])
with hfta.workers.WorkerPool(1) as pool:
    hfta.fit(step, state, [torch.randn(2, 512, 512)] * 2, epochs=1, progress=False, executor=pool)
print("trained")
"""


def test_workers_compute_with_threads_of_their_own() -> None:
    """The server that they are forked from has none, whose locks they would wait for."""
    own = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    done = subprocess.run([sys.executable, "-c", THREADS], env=own, capture_output=True, text=True, timeout=200)
    assert done.stdout == "trained\n", done.stderr
