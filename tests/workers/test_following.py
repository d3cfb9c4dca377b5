"""Arrays in other processes whose members come, go and become inactive: the same run as in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfta_func as hfta
from hfta_func._tree import leaves
from member_runs import DATA, SEEDS, Run, assert_same, stop
from worker_arrays import Two, function_sizes, pools

pytestmark = pytest.mark.usefixtures("two_cores")


def elsewhere(way: str) -> dict[str, Any]:
    return {"workers": 2} if way == "workers" else {"executor": Two()}


def assert_same_run(found: hfta.run.Result, expected: hfta.run.Result) -> None:
    assert_same(found.state._replace(opt_state=()), expected.state._replace(opt_state=()))
    assert_same(leaves(found.state.opt_state), leaves(expected.state.opt_state))
    for name in expected.history.epochs[0]:
        assert_same(found.history[name], expected.history[name])
    for name in ("seeds", "members", "since"):
        assert torch.equal(getattr(found.history, name), getattr(expected.history, name))
    assert found.history.failures == expected.history.failures


def change(state: Any, history: hfta.run.History) -> Any:
    """Members in another order, with a new one; as many as before, of which one is new; and a single one."""
    if len(history) == 1:
        return hfta.take(hfta.concat([state, Run([77]).state]), [3, 4, 0, 2, 1])
    if len(history) == 2:
        return hfta.concat([hfta.take(state, [4, 1, 0, 3]), Run([78]).state])
    return hfta.take(state, [1]) if len(history) == 4 else None


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["workers", "executor"])
def test_members_come_and_go(way: str) -> None:
    expected = Run().fit(6, change, restore_best="mse")
    assert_same_run(Run().fit(6, change, restore_best="mse", **elsewhere(way)), expected)


@pytest.mark.exhaustive(ids="workers")
@pytest.mark.parametrize("way", ["workers", "executor"])
def test_a_run_goes_on_inside_an_epoch_with_the_members_it_had(way: str, tmp_path: Path) -> None:
    expected = Run().fit(6, change)
    path = tmp_path / "run.safetensors"

    def broken(state: Any, batch: Any) -> Any:
        if int(state.step.max()) == 14:
            raise KeyboardInterrupt
        return run.step(state, batch)

    broken.batch_dims = 0  # type: ignore[attr-defined]
    run = Run()
    with pytest.raises(KeyboardInterrupt):
        options = {"evaluate": run.evaluate, "callbacks": [change], "progress": False, "resume": path, "save_every": 1}
        hfta.fit(broken, run.state, run.loader, epochs=6, **options)
    # One member is left of four in its last epochs, fewer than there are processes.
    for epochs in (5, 6):
        found = Run().fit(epochs, change, resume=path, save_every=1, **elsewhere(way))
    assert_same_run(found, expected)


@pytest.mark.sampled(every=3)
@pytest.mark.exhaustive(ids="workers")
@pytest.mark.soak(ids="workers-(shared|batches)")
@pytest.mark.parametrize("loader", ["own", "batches", "shared"])
@pytest.mark.parametrize("way", ["workers", "executor"])
def test_inactive_members_are_left_out(way: str, loader: str, tmp_path: Path) -> None:
    def run() -> Run:
        one = Run(batch_dims=None if loader == "shared" else 0)
        if loader == "batches":
            one.loader = [*one.loader]
        elif loader == "shared":
            one.loader = hfta.ArrayLoader(DATA, 5, shared=True)
        return one

    leave = stop(e1=[0, 2], e4=[3])
    expected = run().fit(6, leave, compact=True)
    assert expected.history["loss"].isnan().sum(0).tolist() == [5, 0, 5, 2]
    one = run()
    sizes = one.note_sizes() if way == "executor" else []
    assert_same_run(one.fit(6, leave, compact=True, **elsewhere(way)), expected)
    if way == "executor":
        assert sizes == [2] * 6 + [1] * 18 + [1] * 6
    for epochs in (2, 5, 6):
        options = {"resume": tmp_path / "run", "save_every": 2, "compact": True}
        found = run().fit(epochs, leave, **options, **elsewhere(way))
    assert_same_run(found, expected)


def test_processes_stay_and_data_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    crews = pools(monkeypatch)
    rows = torch.randn(20_000, 4, dtype=torch.float64)
    run, seen = Run(), []
    run.loader = hfta.ArrayLoader((rows, rows[:, :2].clone()), 10_000, seeds=SEEDS)

    def drop(state: Any, history: Any) -> Any:
        (pool,) = crews
        functions = function_sizes(pool)
        seen.append(([size // rows.nbytes for size in functions], [one.pid for one in pool._workers]))
        return hfta.take(state, [*range(3 - len(history))]) if len(history) < 3 else None

    run.fit(3, drop, workers=2, evaluate=None)
    assert seen[0] == seen[1] == seen[2] and seen[0][0] == [1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen[0][1]), "they end with the call"
