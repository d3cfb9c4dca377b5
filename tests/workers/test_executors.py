"""The executors of the package keep the laws of executors; those of clusters do in ``tests/cluster``."""

from __future__ import annotations

import pytest

import hfta_func as hfta
from hfta_func.testing import assert_executor
from hfta_func.workers.pool import Inline
from worker_arrays import Two


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [Inline, Two])
def test_this_process_keeps_the_laws(kind: type[Inline]) -> None:
    assert_executor(kind())


@pytest.mark.exhaustive
def test_worker_processes_keep_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfta_func.workers.pool.cores", lambda: [0, 0])
    with hfta.workers.WorkerPool(2) as pool:
        assert_executor(pool, restarts=True)
