"""What every executor must do, as a table of laws."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfta_func as hfta
from comparisons import assert_tensors_close, assert_trees_close
from member_runs import Run, stop


def assert_same_run(found: hfta.Result, expected: hfta.Result) -> None:
    assert_trees_close(found.state, expected.state, 1e-10, "state")
    assert [*found.history.epochs[0]] == [*expected.history.epochs[0]]
    for name in expected.history.epochs[0]:
        assert_tensors_close(found.history[name], expected.history[name], 1e-10, f"history[{name!r}]", member_dim=1)
    for name in ("seeds", "members", "since"):
        assert torch.equal(getattr(found.history, name), getattr(expected.history, name))
    assert found.history.failures == expected.history.failures


def a_run_is_the_same(executor: hfta.Executor, folder: pathlib.Path) -> None:
    expected = Run().fit(3, restore_best="mse")
    assert_same_run(Run().fit(3, restore_best="mse", executor=executor), expected)


def batches_of_any_loader_are_the_same(executor: hfta.Executor, folder: pathlib.Path) -> None:
    def run(**options: Any) -> hfta.Result:
        one = Run()
        one.loader = [*one.loader]
        return one.fit(3, **options)

    assert_same_run(run(executor=executor, resume=folder / "run", save_every=2), run())


def a_run_goes_on_from_its_file(executor: hfta.Executor, folder: pathlib.Path) -> None:
    for epochs in (1, 3):
        found = Run().fit(epochs, executor=executor, resume=folder / "run", save_every=2)
    assert_same_run(found, Run().fit(3))


def members_come_and_go(executor: hfta.Executor, folder: pathlib.Path) -> None:
    def change(state: Any, history: hfta.History) -> Any:
        if len(history) == 1:
            return hfta.take(hfta.concat([state, Run([77]).state]), [3, 4, 0, 2, 1])
        return hfta.take(state, [1]) if len(history) == 3 else None

    assert_same_run(Run().fit(5, change, executor=executor), Run().fit(5, change))


def inactive_members_are_left_out(executor: hfta.Executor, folder: pathlib.Path) -> None:
    expected = Run().fit(5, stop(e1=[0, 2], e3=[3]), compact=True)
    assert_same_run(Run().fit(5, stop(e1=[0, 2], e3=[3]), compact=True, executor=executor), expected)


def errors_name_the_member_of_the_whole_array(executor: hfta.Executor, folder: pathlib.Path) -> None:
    def spoil(state: Any, history: hfta.History) -> Any:
        state.params["0.weight"][3] = torch.nan
        return state._replace(active=torch.tensor([False, True, False, True]))

    with pytest.raises(hfta.NonFiniteError, match=r"^model 3: the "):
        Run(nonfinite="raise").fit(3, spoil, compact=True, executor=executor)


def a_call_is_answered(executor: hfta.Executor, folder: pathlib.Path) -> None:
    class Divide:
        def __call__(self, a: int, b: int) -> float:
            return a / b

    divide = Divide()
    calls = [executor.submit(divide, a=6, b=b) for b in (2, 3, 0)]
    answers = dict(executor.wait() for _ in calls)
    assert [answers[call] for call in calls[:2]] == [3.0, 2.0]
    assert isinstance(answers[calls[2]], ZeroDivisionError)
    executor.forget(divide)
    call = executor.submit(dict, seed=7)
    assert executor.wait() == (call, {"seed": 7})
    executor.forget()


def what_is_dropped_is_not_answered(executor: hfta.Executor, folder: pathlib.Path) -> None:
    executor.submit(dict, seed=1)
    executor.forget()
    call = executor.submit(dict, seed=2)
    assert executor.wait() == (call, {"seed": 2})
    executor.forget()
    assert executor.count >= 1 and executor.deaths >= 0
    # What was dropped may still run.
    assert call not in executor.busy()


LAWS: list[Callable[[hfta.Executor, pathlib.Path], None]] = [
    a_run_is_the_same,
    batches_of_any_loader_are_the_same,
    a_run_goes_on_from_its_file,
    members_come_and_go,
    inactive_members_are_left_out,
    errors_name_the_member_of_the_whole_array,
    a_call_is_answered,
    what_is_dropped_is_not_answered,
]
