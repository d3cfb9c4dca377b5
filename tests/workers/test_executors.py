"""What every executor must do: one table of laws, over all that can train an array."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import hfta_func as hfta
from executor_laws import (
    LAWS,
    a_run_is_the_same,
    what_is_dropped_is_not_answered,
)
from hfta_func.workers.executor import Inline

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processors that can be chosen"),
    # Ray leaves sockets and files to the garbage collector, and says what it will do in later versions.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Two(Inline):
    """An executor of two workers that are this process."""

    count = 2


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


@pytest.mark.exhaustive(ids="^ray")
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
