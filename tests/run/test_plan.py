"""Predictions of time and memory, and the largest array that fits."""

from __future__ import annotations

import functools
import pathlib
import textwrap
import weakref
from typing import Any

import optree
import pytest
import torch

import hfta_func as hfta
from cases import WORKLOADS, batches, loss_fn, models
from hfta_func.run import memory
from hfta_func.run.memory import free_bytes, is_out_of_memory, peak_bytes
from processes import output

pytestmark = pytest.mark.usefixtures("small_heap")


def _array(name: str = "mlp", count: int = 2, **options: Any) -> tuple[Any, hfta.step.TrainState, Any]:
    members = models(name, count)
    step = hfta.make_train_step(members[0], loss_fn, hfta.adam(lr=1e-3), **options)
    (batch,) = batches(count, 1)
    return step, step.init(*hfta.stack_params(members), seeds=range(count)), batch


@pytest.mark.exhaustive(ids="transformer|cnn")
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
        peak = peak_bytes(functools.partial(step, larger, data), torch.device("cpu"))
        assert found.memory(count) == pytest.approx(held + peak, rel=0.15)


@pytest.mark.exhaustive
def test_what_fits_fits_and_one_more_does_not() -> None:
    step, state, batch = _array()
    whole = hfta.plan(step, state, batch, sizes=[2, 4], limit=30)
    assert whole.num_models == 30
    free = int(whole.memory(11)) + 1
    found = hfta.plan(step, state, batch, sizes=[2, 4], limit=30, free=free)
    assert found.num_models == 11
    assert found.memory(11) <= free < found.memory(12)
    nothing = hfta.plan(step, state, batch, sizes=[2, 4], free=10)
    assert (nothing.num_models, nothing.chunk_size) == (0, None)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["2", "4", "11"]
    assert lines[-2].endswith("predicted") and lines[-1].startswith("11 of 30 models fit")


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("donate", [False, True])
def test_the_state_is_not_written(donate: bool) -> None:
    step, state, batch = _array(donate=donate)
    held = optree.tree_map(torch.clone, (state, batch))
    hfta.plan(step, state, batch, sizes=[1, 2])
    hfta.run.max_models(step, state, batch, limit=3)
    for a, b in zip(optree.tree_leaves((state, batch)), optree.tree_leaves(held), strict=True):
        assert torch.equal(a, b)


def _failing(most: int, error: Exception, tried: list[int]) -> Any:
    """A step that fails with more than so many models, and notes how many it is tried with."""

    def step(state: hfta.step.TrainState, batch: Any) -> tuple[hfta.step.TrainState, dict[str, Any]]:
        tried.append(hfta.num_models(state))
        assert len(batch[0]) == tried[-1]
        if tried[-1] > most:
            raise error
        return state, {}

    return step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("most", "sizes", "num_models"),
    [(8, (1, 2, 4, 8), 30), (7, (1, 2, 4), 7), (4, (1, 2, 4), 7), (3, (1, 2), 3), (1, (1,), 1)],
)
def test_sizes_that_run_out_of_memory_are_left_out(most: int, sizes: tuple[int, ...], num_models: int) -> None:
    _, state, batch = _array()
    found = hfta.plan(_failing(most, torch.OutOfMemoryError("CUDA out of memory"), []), state, batch, limit=30)
    assert (found.sizes, found.num_models) == (sizes, num_models)
    # Steps that do nothing leave it to chance whether chunks of more than one are faster.
    assert num_models > 1 or found.chunk_size == 1
    assert [line.split()[0] for line in str(found).splitlines()[1:-1]] == [*map(str, sorted({*sizes, num_models}))]


def test_one_array_at_a_time_and_none_afterwards() -> None:
    step, state, batch = _array()
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(state: hfta.step.TrainState, batch: Any) -> Any:
        if all(ref() is not state.keys for ref in made):
            made.append(weakref.ref(state.keys))
        assert {len(keys) for ref in made if (keys := ref()) is not None} == {len(state.keys)}
        if len(state.keys) > 4:
            raise MemoryError
        return step(state, batch)

    hfta.plan(watched, state, batch)
    assert hfta.run.max_models(watched, state, batch, limit=8) == 4
    assert len(made) > 8 and all(ref() is None for ref in made)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes."),
        RuntimeError("unable to mmap 80 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("could not create a memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory."),
    ],
    ids=str,
)
def test_words_for_no_memory_left(error: Exception) -> None:
    assert is_out_of_memory(error)


def _groups(folder: pathlib.Path, lines: str, files: dict[str, str]) -> None:
    """A system with 1000 kB available, the process's control groups and their files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _v2(where: str, most: str, current: int, inactive: int) -> dict[str, str]:
    stat = f"anon 3\ninactive_file {inactive}\nactive_file 7\n"
    names = {"memory.max": f"{most}\n", "memory.current": f"{current}\n", "memory.stat": stat}
    return {where + name: text for name, text in names.items()}


@pytest.mark.parametrize(
    ("lines", "files", "free"),
    [
        ("0::/\n", {}, 1_024_000),
        ("0::/a/b\n", _v2("a/b/", "9000", 5000, 700), 4700),
        ("0::/a/b\n", _v2("a/b/", "max", 5000, 700) | _v2("a/", "8000", 6000, 0), 2000),
        ("0::/a/b\n", _v2("a/b/", "9000", 5000, 700) | _v2("a/", "99000", 6000, 0) | _v2("", "6000", 5500, 500), 1000),
        ("0::/a\n", _v2("a/", "900000000", 5000, 700), 1_024_000),
        ("0::/a\n", _v2("a/", "9000", 9500, 0), 0),
        # The limits of others are none of this process's.
        ("0::/a/b\n", _v2("a/c/", "10", 0, 0) | _v2("a/b/c/", "10", 0, 0), 1_024_000),
        # A path of the host's, of which a container sees only the root.
        ("0::/../host/a\n", _v2("", "9000", 5000, 700), 4700),
    ],
)
def test_free_memory_is_what_the_control_groups_leave(
    lines: str, files: dict[str, str], free: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _groups(tmp_path, lines, files)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    assert free_bytes(torch.device("cpu")) == free


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
    (_, state, batch), tried = _array(), []
    assert hfta.run.max_models(_failing(most, error, tried), state, batch, limit=64) == most
    assert len(set(tried)) <= 14


@pytest.mark.exhaustive
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
        most = hfta.run.max_models(step, state, batch, free=2**50)
        _, metrics = step(state, batch)
        print(most, bool(metrics["finite"]))
    """
    most, finite = output(textwrap.dedent(code)).split()
    # A model holds 4 MB, a step its gradient, update and new parameters.
    assert 5 <= int(most) <= 100 and finite == "True"


def test_the_peak_is_the_most_at_one_time() -> None:
    """Sums of sizes that are told apart: whatever is left out or counted twice shows."""
    unit = 1 << 20
    kept = [torch.empty(5 * unit, dtype=torch.uint8)]

    def work() -> None:
        first = torch.empty(unit, dtype=torch.uint8)
        second = torch.empty(unit, dtype=torch.float32)
        del first
        third = torch.empty(2 * unit, dtype=torch.uint8)
        # Four and two at one time; then less.
        del second, third
        kept.append(torch.empty(3 * unit, dtype=torch.uint8))

    assert peak_bytes(work, torch.device("cpu")) == 6 * unit
    # What is there already does not count, nor does what is freed of it.
    assert peak_bytes(lambda: None, torch.device("cpu")) == 0
    assert peak_bytes(kept.clear, torch.device("cpu")) <= 0


class _Trunk(torch.nn.Module):
    """A large trunk, trained by all members or by none, and a small head."""

    def __init__(self, trained: bool):
        super().__init__()
        self.trunk = torch.nn.Linear(256, 256).requires_grad_(trained)
        self.head = torch.nn.Linear(256, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.trunk(x))


def _over_a_trunk(trained: bool, count: int = 2) -> tuple[Any, hfta.step.TrainState, Any]:
    torch.manual_seed(0)
    members = [_Trunk(trained) for _ in range(count)]
    for member in members:
        member.trunk = members[0].trunk
    options: dict[str, Any] = {"shared_params": ["trunk"]} if trained else {"share_frozen": True}
    step = hfta.make_train_step(members[0], lambda m, x: m(x).square().mean(), hfta.adam(lr=1e-3), **options)
    return step, step.init(*hfta.stack_params(members, **options), seeds=range(count)), torch.randn(count, 8, 256)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_what_members_share_is_counted_once(trained: bool) -> None:
    step, state, batch = _over_a_trunk(trained)
    head, trunk = 4 * (256 * 4 + 4), 4 * (256 * 256 + 256)
    found = hfta.plan(step, state, batch, sizes=[2, 4], limit=100)
    # Parameters and two moments each, and some numbers per member.
    assert 3 * head <= found.held < 3 * head + 200
    assert (3 * trunk if trained else 0) <= found.shared < (3 * trunk + 200 if trained else 1)
    members = torch.arange(24) % 2
    larger, data = hfta.take(state, members), hfta.take(batch, members)
    for _ in range(2):
        larger, _ = step(larger, data)
    held = sum(leaf.nbytes for leaf in optree.tree_leaves(larger))
    peak = peak_bytes(functools.partial(step, larger, data), torch.device("cpu"))
    assert found.memory(24) == pytest.approx(held + peak, rel=0.1)
    # A budget for 24 members holds 24, and not as few as if each had a trunk.
    free = int(found.memory(24))
    assert hfta.plan(step, state, batch, sizes=[2, 4], limit=100, free=free).num_models == pytest.approx(24, abs=2)
    assert hfta.run.max_models(step, state, batch, free=free) == pytest.approx(24, abs=2)
