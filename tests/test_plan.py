"""Predictions of time and memory, and the largest array that fits."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import time
from typing import Any

import optree
import pytest
import torch

import hfta_func as hfta
from cases import WORKLOADS, batches, loss_fn, models
from hfta_func.plan import _line, _peak


def _array(name: str = "mlp", count: int = 2, **options: Any) -> tuple[Any, hfta.TrainState, Any]:
    members = models(name, count)
    step = hfta.make_train_step(members[0], loss_fn, hfta.adam(lr=1e-3), **options)
    (batch,) = batches(count, 1)
    return step, step.init(*hfta.stack_params(members), seeds=range(count)), batch


@pytest.mark.parametrize("name", WORKLOADS)
def test_memory_is_predicted(name: str) -> None:
    step, state, batch = _array(name)
    found = hfta.plan(step, state, batch, sizes=[2, 4])
    for count in (3, 12):
        members = torch.arange(count) % 2
        larger, data = hfta.take(state, members), hfta.take(batch, members)
        for _ in range(2):
            larger, _ = step(larger, data)
        held = sum(leaf.nbytes for leaf in optree.tree_leaves(larger))
        peak = _peak(functools.partial(step, larger, data), torch.device("cpu"))
        assert found.memory(count) == pytest.approx(held + peak, rel=0.15)


def test_what_fits_fits_and_one_more_does_not() -> None:
    step, state, batch = _array()
    whole = hfta.plan(step, state, batch, sizes=[2, 4], limit=30)
    assert whole.num_models == 30
    free = int(whole.memory(11)) + 1
    found = hfta.plan(step, state, batch, sizes=[2, 4], limit=30, free=free)
    assert found.num_models == 11
    assert found.memory(11) <= free < found.memory(12)
    assert hfta.plan(step, state, batch, sizes=[2, 4], free=10)[-2:] == (0, None)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["2", "4", "11"]
    assert lines[-2].endswith("predicted") and lines[-1].startswith("11 of 30 models fit")


@pytest.mark.parametrize(("power", "chunk_size"), [(2, 1), (0, None)])
def test_chunks_where_more_members_cost_more(power: int, chunk_size: int | None) -> None:
    _, state, batch = _array()

    def step(state: hfta.TrainState, batch: Any) -> tuple[hfta.TrainState, dict[str, Any]]:
        time.sleep(2e-3 * hfta.num_models(state) ** power)
        return state, {}

    found = hfta.plan(step, state, batch, sizes=[1, 2, 4], limit=6)
    assert (found.num_models, found.chunk_size) == (6, chunk_size)


def test_measurements_are_kept_and_lines_drawn_between_and_beyond() -> None:
    sizes, values = (1, 2, 8), (5.0, 6.0, 18.0)
    assert [_line(sizes, values, at) for at in sizes] == list(values)
    assert [_line(sizes, values, at) for at in (5, 16)] == [12.0, 34.0]


@pytest.mark.parametrize("donate", [False, True])
def test_the_state_is_not_written(donate: bool) -> None:
    step, state, batch = _array(donate=donate)
    held = optree.tree_map(torch.clone, (state, batch))
    hfta.plan(step, state, batch, sizes=[1, 2])
    hfta.max_models(step, state, batch, limit=3)
    for a, b in zip(optree.tree_leaves((state, batch)), optree.tree_leaves(held), strict=True):
        assert torch.equal(a, b)


def test_shared_batches() -> None:
    step, state, (inputs, targets) = _array(batch_dims=None)
    assert hfta.plan(step, state, (inputs[0], targets[0]), sizes=[1, 2], limit=5).num_models == 5


@pytest.mark.parametrize("sizes", [[4], [2, 2], [0, 1], [4, 2]])
def test_sizes_that_make_no_line(sizes: list[int]) -> None:
    step, state, batch = _array()
    with pytest.raises(ValueError, match="give at least two numbers of models, ascending from 1 or more"):
        hfta.plan(step, state, batch, sizes=sizes)


@pytest.mark.parametrize(
    ("most", "error"),
    [
        (0, MemoryError()),
        (1, torch.OutOfMemoryError("CUDA out of memory")),
        (37, RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        (64, MemoryError()),
    ],
)
def test_the_largest_that_runs(most: int, error: Exception) -> None:
    _, state, batch = _array()
    tried = []

    def step(state: hfta.TrainState, batch: Any) -> tuple[hfta.TrainState, dict[str, Any]]:
        tried.append(hfta.num_models(state))
        assert len(batch[0]) == hfta.num_models(state)
        if hfta.num_models(state) > most:
            raise error
        return state, {}

    assert hfta.max_models(step, state, batch, limit=64) == most
    assert len(set(tried)) <= 14


def test_other_errors_are_no_lack_of_memory() -> None:
    _, state, batch = _array()

    def step(state: hfta.TrainState, batch: Any) -> tuple[hfta.TrainState, dict[str, Any]]:
        if hfta.num_models(state) > 4:
            raise RuntimeError("shapes do not fit")
        return state, {}

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        hfta.max_models(step, state, batch)


def test_a_budget_is_kept() -> None:
    step, state, batch = _array()
    free = int(hfta.plan(step, state, batch, sizes=[8, 16]).memory(20))
    assert hfta.max_models(step, state, batch, free=free) == pytest.approx(20, abs=3)


def test_a_process_that_runs_out_of_memory_goes_on() -> None:
    code = """
        import resource, torch, hfta_func as hfta
        factory = lambda: torch.nn.Linear(1000, 1000)
        step = hfta.make_train_step(factory(), lambda model, batch: model(batch).square().mean(), hfta.sgd(lr=0.1))
        state = step.init(*hfta.init_params(factory, seeds=[0]), seeds=[0])
        batch = torch.randn(1, 4, 1000)
        state, _ = step(state, batch)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, -1))
        # Without a limit that it knows of, it has to find out.
        most = hfta.max_models(step, state, batch, free=2**50)
        _, metrics = step(state, batch)
        print(most, bool(metrics["finite"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    most, finite = done.stdout.split()
    # A model holds 4 MB, a step its gradient, update and new parameters.
    assert 5 <= int(most) <= 100 and finite == "True"
