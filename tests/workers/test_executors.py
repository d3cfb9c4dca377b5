"""The executors of the package keep the laws of executors."""

from __future__ import annotations

import os
import sys

import pytest

import hfta_func as hfta
from hfta_func.testing import assert_executor
from hfta_func.workers.pool import Inline

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processors that can be chosen"),
    # Ray leaves sockets and files to the garbage collector, and says what it will do in later versions.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class TwoParts(Inline):
    """An executor of two workers that are this process."""

    count = 2


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [Inline, TwoParts])
def test_this_process_keeps_the_laws(kind: type[Inline]) -> None:
    assert_executor(kind())


@pytest.mark.exhaustive
def test_worker_processes_keep_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfta_func.workers.pool.cores", lambda: [0, 0])
    with hfta.workers.WorkerPool(2) as pool:
        assert_executor(pool, restarts=True)


@pytest.mark.exhaustive
def test_actors_of_ray_keep_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray; pip install 'hfta_func[cluster]'")
    from hfta_func import cluster
    from hfta_func.cluster import ray_actors

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with ray_actors._on_this_machine():
        ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False, num_cpus=2)
    try:
        with cluster.ray() as pool:
            assert_executor(pool, restarts=True)
    finally:
        ray.shutdown()
