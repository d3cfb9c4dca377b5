"""Lowerings that are timed where they run: what is chosen, what is kept, and where nothing is measured."""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import hfta_func as hfta
from hfta_func import _torch
from hfta_func._kernels import convolution, native
from hfta_func.rules import _choice, _direct, _lowering, _measured, conv
from hfta_func.workers.process import settings, settle
from ways import loss, seeded, start

GROUPED, PRODUCT, LOOP = "grouped", "matmul", "loop"


class Machine:
    """A machine on which each lowering takes a known time, products the least, and its processes, one after another."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: pathlib.Path):
        self._patch, self.costs, self.time, self.calls = patch, {GROUPED: 1e-3, PRODUCT: 0.5e-3, LOOP: 1e-3}, 0.0, []
        self.computed, self.waits = 0.0, 1.0
        self.noise: Callable[[], float] = lambda: 1.0
        patch.setenv("HFTA_FUNC_CACHE", str(folder))
        # As without a compiler, for the same candidates on every machine.
        for module in (_direct, _lowering):
            patch.setattr(module, "program", lambda dtype: None)
        patch.delenv("HFTA_FUNC_MEASURE")
        for name in ("now", "seconds"):
            patch.setattr(_measured, name, lambda: self.time)
        patch.setattr(_measured, "thread_seconds", lambda: self.computed)
        forward, gradients = conv._forward, conv._gradients
        patch.setattr(conv, "_forward", lambda *args: self._ran(args[-1][0]) or forward(*args))
        patch.setattr(conv, "_gradients", lambda *args: self._ran(args[0]) or gradients(*args))
        self.process()

    def _ran(self, lowering: str) -> None:
        self.calls.append(lowering)
        computed = self.costs.get(lowering, 9e-3) * self.noise()
        self.computed += computed
        self.time += computed * self.waits

    def process(self) -> None:
        """Begin a new process."""
        for name in ("_settled", "_waiting"):
            self._patch.setattr(_measured, name, {})
        for name, value in {"closed": set(), "_began": 0.0, "_spent": 0.0, "_lent": None, "pinned": ""}.items():
            self._patch.setattr(_measured, name, value)
        _measured._kept.cache_clear()
        _measured.version += 1
        _choice._set(())
        self.calls.clear()

    def chosen(self, size: int = 16, op: str = "convolution", channels: int = 8) -> tuple[str, str]:
        """The lowering of a convolution that is trained, after one eager call, and the reason."""
        x, weight = torch.randn(3, 1, channels, size, size), torch.randn(3, 8, channels, 3, 3, requires_grad=True)
        explained = hfta.rules.explain(hfta.vmap(torch.conv2d), x.requires_grad_(), weight)
        return next((choice.lowering, choice.reason) for choice in explained if choice.op == op)

    def measured(self) -> bool:
        """Whether anything was timed since the process began, or since this was asked."""
        calls, self.calls = self.calls, []
        return bool(calls)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Machine]:
    yield Machine(monkeypatch, tmp_path)
    _measured.version += 1
    _measured._kept.cache_clear()
    monkeypatch.undo()
    _choice._set(())


def test_the_fastest_wins_and_says_why(machine: Machine) -> None:
    assert machine.chosen() == (PRODUCT, "measured here: 2.0x of grouped")
    assert machine.chosen(op="convolution_weight_grad") == (PRODUCT, "measured here: 2.0x of grouped")
    machine.process()
    assert machine.chosen() == (PRODUCT, "measured here: 2.0x of grouped")
    assert not machine.measured()


def test_a_busy_machine_does_not_decide(machine: Machine) -> None:
    # Every other run takes longer than it needs.
    durations = itertools.cycle([3.0, 1.0])
    machine.noise = lambda: next(durations)
    assert machine.chosen() == (PRODUCT, "measured here: 2.0x of grouped")


def test_equals_do_not_replace_the_tables_choice(machine: Machine, tmp_path: pathlib.Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    generator, chosen = random.Random(0), []
    machine.costs[PRODUCT] = 1e-3
    machine.noise = lambda: generator.uniform(1.0, 1.8)
    for i in range(25):
        monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / str(i)))
        machine.process()
        chosen.append(machine.chosen()[0])
    assert chosen.count(GROUPED) >= 23


def test_while_others_have_the_cores_nothing_is_kept(machine: Machine) -> None:
    machine.waits = 3.0
    assert machine.chosen() == (GROUPED, "one group per member") and machine.measured()
    machine.process()
    machine.waits = 1.0
    assert machine.chosen() == (PRODUCT, "measured here: 2.0x of grouped") and machine.measured()
    machine.process()
    assert machine.chosen()[0] == PRODUCT and not machine.measured()


def test_measuring_takes_a_small_share_of_the_time_and_no_case_twice(machine: Machine, tmp_path: pathlib.Path) -> None:
    machine.costs = {GROUPED: 2e-3, PRODUCT: 1e-3, LOOP: 3e-3}
    sizes, numbers = range(16, 22), [0]
    for _ in range(12):
        machine.process()
        for size in sizes:
            machine.chosen(size)
        # The first run of a gradient makes what it is the gradient of.
        assert _measured._spent <= 0.05 + 2 * machine.costs[GROUPED]
        numbers.append(len(_measured._kept(_measured.threads())))
    # What had no time in one process is measured in a later one, and then nothing is.
    assert 0 < numbers[1] < numbers[2] and numbers[-2] == numbers[-1] == 3 * len(sizes) and _measured._spent == 0
    (file,) = (tmp_path / "lowerings").iterdir()
    assert file.read_text().count("measured here") == 3 * len(sizes)
    assert [machine.chosen(size)[0] for size in sizes] == [PRODUCT] * 6


@pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")
def test_the_kernel_in_c_is_a_candidate(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_direct, _lowering):
        monkeypatch.setattr(module, "program", convolution.program)
    machine.costs["direct"] = 0.25e-3
    assert machine.chosen(channels=16)[0] == machine.chosen(channels=5)[0] == "direct"
    machine.process()
    machine.costs |= {"direct": 1e-3, PRODUCT: 0.5e-3}
    assert machine.chosen(size=17, channels=5) == (PRODUCT, "measured here: 2.0x of direct")


@pytest.mark.parametrize("harm", ["other content", "shortened", "unknown lowering"])
def test_a_damaged_file_is_measured_again(machine: Machine, tmp_path: pathlib.Path, harm: str) -> None:
    machine.chosen()
    (file,) = (tmp_path / "lowerings").iterdir()
    whole = file.read_bytes()
    unknown = whole.replace(PRODUCT.encode(), b"fastest")
    contents = {"other content": b"\x00\xff\nnull\n[1]\n{}\n", "shortened": whole[: len(whole) // 6]}
    file.write_bytes(contents.get(harm, unknown))
    machine.process()
    machine.costs = {GROUPED: 1e-3, PRODUCT: 1e-3, LOOP: 0.5e-3}
    expected = GROUPED if harm == "unknown lowering" else LOOP
    assert machine.chosen()[0] == expected
    machine.process()
    assert machine.chosen()[0] == expected and not machine.measured()


def test_a_folder_that_cannot_be_written(machine: Machine, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "file"))
    assert machine.chosen()[0] == PRODUCT and machine.measured()
    assert machine.chosen()[0] == PRODUCT and not machine.measured()


@pytest.mark.parametrize("change", ["threads", "processor", "release"])
def test_choices_are_those_of_the_machine(machine: Machine, change: str, set_threads: Any, monkeypatch: Any) -> None:
    machine.chosen()
    machine.process()
    machine.costs = {GROUPED: 1e-3, PRODUCT: 1e-3, LOOP: 0.5e-3}
    before = torch.get_num_threads()
    if change == "threads":
        set_threads(before + 1)
    elif change == "processor":
        monkeypatch.setattr(native, "processor", lambda: "another")
    else:
        monkeypatch.setattr(torch, "__version__", "9.9")
    assert machine.chosen()[0] == LOOP
    if change == "threads":
        set_threads(before)
        assert machine.chosen()[0] == PRODUCT


def test_records_measure_nothing_and_choices_stay_as_recorded(machine: Machine) -> None:
    x, weight = torch.randn(3, 1, 8, 17, 17), torch.randn(3, 8, 8, 3, 3)
    with _torch.Recorder([x, weight]):
        hfta.vmap(torch.conv2d)(x, weight)
    assert machine.chosen(17)[0] == GROUPED and not machine.calls
    # A record takes what was measured before.
    assert machine.chosen(16)[0] == PRODUCT
    machine.calls.clear()
    x = x[..., :16, :16].contiguous()
    recorder = _torch.Recorder([x, weight])
    with recorder:
        hfta.vmap(torch.conv2d)(x, weight)
    assert not machine.calls and f"'{PRODUCT}'" in str(recorder.calls)


def test_compilers_measure_nothing_and_take_what_is_known(machine: Machine) -> None:
    x, weight = torch.randn(3, 1, 8, 16, 16), torch.randn(3, 8, 8, 3, 3)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def compiled() -> str:
        torch.compiler.reset()
        torch.compile(hfta.vmap(torch.conv2d), backend=aot_autograd(fw_compiler=backend), fullgraph=True)(x, weight)
        return graphs[-1]

    before = compiled()
    assert not machine.calls
    hfta.vmap(torch.conv2d)(x, weight)
    assert machine.measured()
    after = compiled()
    assert not machine.calls
    assert "aten.bmm" in after and "aten.bmm" not in before


def test_an_override_wins_and_the_table_can_be_asked_for(machine: Machine) -> None:
    with hfta.rules.override(conv="loop"):
        assert machine.chosen() == (LOOP, "overridden") and not machine.measured()
    with hfta.rules.override(all="table"):
        assert machine.chosen() == (GROUPED, "one group per member") and not machine.measured()
    assert machine.chosen()[0] == PRODUCT
    with hfta.rules.override(conv="table"):
        assert machine.chosen() == (GROUPED, "one group per member")


def test_a_worker_takes_the_choices_of_its_parent(machine: Machine) -> None:
    machine.chosen()
    sent = settings()
    machine.process()
    machine.costs = {GROUPED: 1e-3, PRODUCT: 1e-3, LOOP: 0.5e-3}
    settle(sent)
    assert machine.chosen()[0] == PRODUCT and machine.chosen(17)[0] == GROUPED and not machine.calls


def _run(path: pathlib.Path, epochs: int) -> Any:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))

    step, state = start(seeded(make, range(3)), loss, hfta.sgd(lr=0.1))
    data = torch.randn(8, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = hfta.ArrayLoader(data, 4, seeds=range(3))
    return hfta.fit(step, state, loader, epochs=epochs, resume=path, progress=False).state.params


def test_a_resumed_run_keeps_its_choices(machine: Machine, tmp_path: pathlib.Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    whole = _run(tmp_path / "whole", 2)
    machine.process()
    _run(tmp_path / "half", 1)
    machine.process()
    # Another machine, on which another lowering is faster.
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "other"))
    machine.costs = {GROUPED: 1e-3, PRODUCT: 1e-3, LOOP: 0.1e-3}
    before = _choice.state
    resumed = _run(tmp_path / "half", 2)
    assert all(torch.equal(resumed[path], leaf) for path, leaf in whole.items())
    assert LOOP not in machine.calls and _choice.state != before
