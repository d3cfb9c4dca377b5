"""What every executor must do: one table of laws, over all that can train an array."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hfta_func as hfta
from hfta_func._tree import leaves
from hfta_func.workers.executor import Inline
from test_members import Run, stop

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processors that can be chosen"),
    # Ray leaves sockets and files to the garbage collector, and says what it will do in later versions.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Two(Inline):
    """An executor of two workers that are this process."""

    count = 2


def assert_same_run(found: hfta.Result, expected: hfta.Result) -> None:
    for a, b in zip(leaves(found.state), leaves(expected.state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert [*found.history.epochs[0]] == [*expected.history.epochs[0]]
    for name in expected.history.epochs[0]:
        torch.testing.assert_close(found.history[name], expected.history[name], rtol=1e-10, atol=1e-10, equal_nan=True)
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


@pytest.fixture(scope="module", params=["this process", "two parts", "processes", "ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[hfta.Executor]:
    if request.param == "this process":
        yield Inline()
    elif request.param == "two parts":
        yield Two()
    elif request.param == "processes":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hfta_func.workers.local.cores", lambda: [0, 0])
            with hfta.WorkerPool(2) as found:
                yield found
    else:
        yield from ray_pool()


def ray_pool() -> Iterator[hfta.Executor]:
    ray = pytest.importorskip("ray", reason="needs Ray; pip install 'hfta_func[cluster]'")
    from hfta_func import cluster
    from hfta_func.cluster import ray_actors

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with ray_actors._on_this_machine():
            ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False, num_cpus=2)
        try:
            with cluster.ray() as found:
                yield found
        finally:
            ray.shutdown()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_executor_obeys(law: Any, executor: hfta.Executor, tmp_path: pathlib.Path) -> None:
    law(executor, tmp_path)


class Swapped(Two):
    """Takes the results of two calls for each other's."""

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        call, answer = super().wait(timeout)
        return call ^ 1, answer


class Silent(Two):
    """Answers what was dropped."""

    def forget(self, function: Any = None) -> None:
        pass


@pytest.mark.parametrize(("law", "broken"), [(a_run_is_the_same, Swapped), (what_is_dropped_is_not_answered, Silent)])
def test_a_law_can_be_broken(law: Any, broken: type[Two], tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError):
        law(broken(), tmp_path)
