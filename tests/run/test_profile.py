"""Profiles: lines add up to the step, name its modules and lowerings, and leave the step as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hfta_func as hfta
from hfta_func.run.recording import ITERATION, MARK, PHASES, STEP, Timeline, iterations_of, of_device
from hfta_func.step import replay, train
from hfta_func.step.commit import Commit

SEEDS = [3, 5, 7]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are made at the fourth call."""
    monkeypatch.setattr(replay, "_STEPS", 0)


def make_model() -> nn.Module:
    body = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(24, 3))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def array(**options: Any) -> tuple[Any, hfta.step.TrainState, Any]:
    step = hfta.make_train_step(make_model(), loss_fn, hfta.adam(lr=[0.1, 0.2, 0.3]), **options)
    state = step.init(*hfta.init_params(make_model, SEEDS), seeds=SEEDS)
    return step, state, (torch.randn(3, 5, 2, 8), torch.randint(0, 3, (3, 5)))


def check_sums(result: hfta.run.Profile) -> None:
    # A line that is shorter than what recording its events costs is 0, and none is longer than it was recorded.
    assert min(result.unprofiled, result.profiled) * (1 - 1e-6) <= result.seconds <= result.profiled * (1 + 1e-6)
    assert result.seconds == pytest.approx(sum(result.phases.values()))
    assert {*result.phases} <= {*PHASES}
    assert all(line.kernels >= 0 and line.in_kernels >= 0 for line in result.lines if line.phase not in ("noise",))


@pytest.mark.parametrize("donate", [False, True])
def test_lines_of_an_eager_step(donate: bool) -> None:
    step, state, batch = array(donate=donate)
    before = {path: leaf.clone() for path, leaf in state.params.items()}
    with hfta.rules.override(modules="0.0", conv="loop"):
        result = hfta.profile(step, state, batch, steps=10)
    check_sums(result)
    lines = {phase: {line[1:4] for line in result.lines if line.phase == phase} for phase in result.phases}
    assert result.kind == "eager" and result.num_models == 3
    assert {("0.0", "convolution", "loop"), ("2", "linear", "folded")} <= lines["forward"]
    assert {("0.0", "convolution", "loop"), ("2", "linear", "folded")} <= lines["backward"]
    assert ("", "cross_entropy_loss", "folded") in lines["loss"] & lines["backward"]
    assert {"check", "entering vmap", "noise", "judge", "update", "commit", "Python"} <= lines.keys()
    assert all(torch.equal(state.params[path], leaf) for path, leaf in before.items())
    # Nothing is left of the markers.
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert train.judge.__module__ == Commit.renewed.__module__ == "hfta_func.step.commit"
    text = str(result)
    assert "remaining bias" in text and len(text.splitlines()) < 40


def test_a_replayed_step_has_a_line_for_each_kind_of_operator() -> None:
    step, state, batch = array(replay=True)
    result = hfta.profile(step, state, batch, steps=10)
    check_sums(result)
    assert result.kind == "replayed" and step.status.startswith("replayed")
    operators = {line.operator for line in result.lines if line.phase == "replayed"}
    assert {"relu", "bmm"} <= operators and not any(line.module for line in result.lines)


def test_lines_of_a_compiled_step() -> None:
    step, state, batch = array()
    result = hfta.profile(torch.compile(step), state, batch, steps=5)
    check_sums(result)
    assert result.kind == "compiled" and "graph" in result.phases and "forward" not in result.phases


# On two threads each product waits for both, and beside other work for longer than it computes.
@pytest.mark.usefixtures("one_thread")
def test_the_costly_module_is_the_largest() -> None:
    def slow() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 1))

    step = hfta.make_train_step(slow(), lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(slow, SEEDS), seeds=SEEDS)
    result = hfta.profile(step, state, torch.randn(3, 256, 4), steps=10)
    for phase in ("forward", "backward"):
        lines = [line for line in result.lines if line.phase == phase]
        assert max(lines, key=lambda line: line.in_kernels).module == "2"


class Event:
    """An event as PyTorch's profiler has it."""

    def __init__(self, name: str, start: int, length: int, launched_by: int = 0, number: int = 0, device: str = "CPU"):
        self._values = {"name": name, "start_ns": start, "duration_ns": length, "sequence_nr": -1, "scope": 0}
        self._values |= {"correlation_id": number, "linked_correlation_id": launched_by, "is_user_annotation": False}
        self._device = device

    def device_type(self) -> Any:
        return type("Device", (), {"name": self._device})

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values[name]


def test_kernels_of_a_device_belong_to_what_launched_them() -> None:
    host = [
        Event(f"{MARK}{ITERATION}", 0, 1000),
        Event(f"{MARK}{STEP}", 100, 700),
        Event(f"{MARK}judge", 200, 300),
        Event("aten::add", 250, 100, number=7),
        Event("cudaDeviceSynchronize", 850, 100),
    ]
    device = [Event("kernel", 300, 400, launched_by=7, device="CUDA"), Event("kernel", 600, 200, 7, device="CUDA")]
    launched = of_device([*host, *device])
    assert launched == {7: (600e-9, 2)}
    timeline = Timeline({}, launched)
    (iteration,) = iterations_of([*host, *device])
    timeline.add(iteration)
    # Four events cost 80 ns.
    lines = {line.phase: line for line in timeline.table(1, unprofiled=920e-9, profiled=1000e-9)}
    assert lines["judge"].seconds == pytest.approx(280e-9) and lines["judge"][5:] == pytest.approx((600e-9, 2))
    assert lines["idle"].seconds == pytest.approx(100e-9) and lines["data"].seconds == pytest.approx(160e-9)
    assert lines["Python"].seconds == pytest.approx(380e-9)


def test_bad_input() -> None:
    step, state, batch = array()
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("it fails")
        return loss_fn(model, batch)

    failing_step = hfta.make_train_step(make_model(), failing, hfta.sgd(lr=0.1))
    for wrong, given, steps, error, message in (
        (step, batch, 0, ValueError, "steps is 0; give an integer of at least 1"),
        (step, (rows for rows in ()), 5, hfta.errors.BatchError, "the loader has no batch in epoch 0"),
        (step, (batch[0][:2], batch[1]), 5, hfta.errors.BatchError, None),
        (failing_step, batch, 5, RuntimeError, "it fails"),
    ):
        with pytest.raises(error, match=message):
            hfta.profile(wrong, wrong.init(state.params, seeds=SEEDS), given, steps=steps)
    assert not torch_module._global_forward_hooks and train.judge.__module__ == "hfta_func.step.commit"
