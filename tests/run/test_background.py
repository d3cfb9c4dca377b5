"""Steps that are compiled in another process while they train."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.errors import CompileWarning
from hfta_func.run import background, kept
from hfta_func.workers import process
from processes import output

M = 3


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def arrayed(loss: Any = loss_fn, **options: Any) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    step = hfta.make_train_step(make(), loss, hfta.sgd(lr=[0.01, 0.02, 0.03]), **options)
    return step, step.init(*hfta.init_params(make, range(M)), seeds=range(M))


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, no estimate of what compiling may cost, and no yielding to other tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "kept"))
    for name in ("_COMPILING", "_COMPILING_A_LEAF"):
        monkeypatch.setattr(background, name, 0)
    monkeypatch.setattr(background, "_FIRST", 1)
    monkeypatch.setattr(background, "Process", lambda *args, low_priority, **options: process.Process(*args, **options))
    # Steps of tests are too small for a comparison to mean anything.
    monkeypatch.setattr(background, "_TRIAL", 1_000_000)
    torch.compiler.reset()


def the_graph(quick: Any) -> Any:
    """What becomes of the step for the only shape so far."""
    return next(iter(quick.shapes.values()), None)


def until(quick: Any, wanted: Any, call: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not wanted(quick):
        assert time.monotonic() < end, "nothing came of it"
        call()
        time.sleep(0.02)


@pytest.mark.exhaustive
@pytest.mark.soak(ids="False")
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_goes_over_to_a_graph_and_on_with_the_same_results(donate: bool) -> None:
    step, state = arrayed(donate=donate)
    other, own = arrayed(donate=donate)
    quick = hfta.compile(step)
    done = 0

    def call() -> None:
        nonlocal state, own, done
        x = torch.randn(M, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(done))
        (state, found), (own, expected) = quick(state, x), other(own, x)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-9, atol=1e-9)
        done += 1

    until(quick, lambda quick: quick.is_compiled, call)
    for _ in range(5):
        call()
    for one, two in zip(optree.tree_leaves(state), optree.tree_leaves(own), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    # Another shape is not compiled yet, and nobody waits for it.
    start = time.monotonic()
    quick(optree.tree_map(torch.clone, state), torch.ones(M, 2, 4, dtype=torch.float64))
    assert not quick.is_compiled and time.monotonic() - start < 2
    call()
    assert quick.is_compiled


SCALE = 2.0


@pytest.mark.exhaustive
def test_a_graph_notices_what_its_user_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"one": 1.0}
    step, state = arrayed(lambda model, x: SCALE * weights["one"] * model(x).square().mean())
    batch = torch.ones(M, 5, 4, dtype=torch.float64)
    run = kept.graph(step, {"cpp.vec_isa_ok": True})
    run(state, batch)
    other = state._replace(params={name: param.float() for name, param in state.params.items()})

    def refused(state: hfta.step.TrainState, batch: Tensor) -> bool:
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                run(state, batch)
            except RuntimeError as error:
                return "recompile" in str(error)
        return False

    assert not refused(state, batch)
    with hfta.rules.override(all="loop"):
        assert refused(state, batch)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SCALE", 3.0)
        assert refused(state, batch)
    assert refused(other, batch) and refused(state, batch[:, :2]) and not refused(state, batch)
    weights["one"] = 5.0
    assert refused(state, batch)


def test_what_cannot_be_kept_or_sent_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "graph", lambda step, options: step)
    lock = __import__("threading").Lock()
    locked = arrayed(lambda model, x: model(x).square().mean() + 0 * bool(lock))
    for step, state in (arrayed(nonfinite="raise"), locked):
        quick = hfta.compile(step)
        for _ in range(2):
            quick(state, torch.ones(M, 5, 4, dtype=torch.float64))
        assert quick.status == "compiled" and the_graph(quick).worker is None


@pytest.mark.exhaustive
def test_a_process_that_is_killed_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "Process", process.Process)
    # Beside training that leaves a processor, it goes last.
    monkeypatch.setattr(background.StepGraph, "_crowded", lambda self, state: False)
    step, state = arrayed()
    quick = hfta.compile(step)
    for _ in range(2):
        quick(state, torch.ones(M, 5, 4, dtype=torch.float64))
    (worker,) = the_graph(quick).worker._workers
    # Once it has begun: one that dies while it starts is started again.
    assert the_graph(quick).worker.ready(60)
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 19
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.warns(CompileWarning, match="goes on eagerly: its workers died once, last worker 0 with status -9"):
        until(quick, lambda _: the_graph(quick)._ended, lambda: quick(state, torch.ones(M, 5, 4, dtype=torch.float64)))
    quick(state, torch.ones(M, 5, 4, dtype=torch.float64))


def test_a_slower_graph_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = arrayed()
    quick = hfta.compile(step)
    quick(state, torch.ones(M, 5, 4, dtype=torch.float64))
    (graph,) = quick.shapes.values()
    monkeypatch.setattr(background, "_TRIAL", 3)

    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return step(*args)

    graph.run = slow
    for _ in range(4):
        quick(state, torch.ones(M, 5, 4, dtype=torch.float64))
    assert not quick.is_compiled and len(graph._compiled) == 3


def test_fit_compiles_behind_the_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = arrayed()
    data, asked = torch.randn(20, 4, dtype=torch.float64), []

    def loader() -> hfta.ArrayLoader:
        return hfta.ArrayLoader(data, 5, seeds=range(M))

    monkeypatch.setattr(background.StepGraph, "ask", lambda self, state, batch, left: asked.append(left) or [])
    compiled = hfta.fit(step, state, loader(), epochs=2, progress=False, compile=True)
    assert asked == [8, 7, 6, 5, 4, 3, 2, 1]
    plain = hfta.fit(step, state, loader(), epochs=2, progress=False)
    assert torch.equal(compiled.history["loss"], plain.history["loss"])


@pytest.mark.exhaustive
def test_the_other_process_ends_with_this_one() -> None:
    program = """
import time
import test_background as t, torch, hfta_func as hfta
t.background._COMPILING = t.background._COMPILING_A_LEAF = 0
step, state = t.arrayed()
quick = hfta.compile(step)
for _ in range(4):
    quick(state, torch.ones(3, 5, 4, dtype=torch.float64))
(worker,) = t.the_graph(quick).worker._workers
while not worker.pid:
    time.sleep(0.01)
print(worker.pid)
"""
    assert not pathlib.Path(f"/proc/{int(output(program))}").exists()
