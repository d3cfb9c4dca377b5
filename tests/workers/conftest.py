"""What tests of workers run under."""

from __future__ import annotations

import os

import pytest

from hfta_func.run import trainers
from hfta_func.run.trainers import ExecutorTrainer
from hfta_func.workers import pool
from worker_arrays import waits


@pytest.fixture(scope="module", autouse=True)
def chosen_processors() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("needs processors that can be chosen")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with one core run these as well, and no step is made here while workers start."""
    monkeypatch.setattr(ExecutorTrainer, "is_ready", waits)
    if len(pool.cores()) < 2:
        for module in (trainers, pool):
            monkeypatch.setattr(module, "cores", lambda: [0, 0])
