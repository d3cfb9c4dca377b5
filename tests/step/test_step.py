"""One training step: noise, members that stand still, finite checks, loss scales, rounding, and what is written."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from clocks import CallClock
from comparisons import identical
from hfta_func import random
from hfta_func.run.memory import peak_bytes
from hfta_func.step import commit

M = 3
SEEDS = [11, 7, 1002]
CPU = torch.device("cpu")


def _factory() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)).double()


def _line() -> nn.Module:
    return nn.Linear(4, 2).double()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _array(
    factory: Any = _factory, loss: Any = _loss, optimizer: Any = None, count: int = M, **options: Any
) -> tuple[list[nn.Module], hfta.step.TrainStep, hfta.step.TrainState]:
    models = [factory() for _ in range(count)]
    step = hfta.make_train_step(models[0], loss, optimizer or hfta.sgd(lr=0.1, momentum=0.9), **options)
    return models, step, step.init(*hfta.stack_params(models), seeds=[*SEEDS, *range(count)][:count])


def _x(count: int = M) -> Tensor:
    return torch.randn(count, 5, 4, dtype=torch.float64)


def _draws() -> dict[str, Tensor]:
    return {"mask": F.dropout(torch.ones(24), 0.5), "normal": torch.randn(2)}


def _noisy(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _loss(model, x), _draws()


@pytest.mark.parametrize("size", [None, 1, 2, "auto"])
def test_noise_is_that_of_seed_and_step(size: Any) -> None:
    # A model that draws nothing itself, so that the loss function's are the first call sites.
    _, step, state = _array(_line, _noisy, chunk_size=size)
    state = state._replace(step=torch.tensor([0, 3, 2**40]))
    masks = []
    for _ in range(3):
        keys = random.fold_in(state.keys, state.step - 2**62)
        state, metrics = step(state, _x())
        for i in range(M):
            with hfta.calls.routed(keys[i]):
                expected = _draws()
            for name, value in expected.items():
                assert torch.equal(metrics[name][i], value)
            # The noise of a user who folds in the step is another.
            with hfta.calls.routed(random.fold_in(state.keys[i], state.step[i] - 1)):
                assert not torch.equal(_draws()["normal"], metrics["normal"][i])
        masks += metrics["mask"].tolist()
    # Every member draws another mask at every step.
    assert len(set(map(tuple, masks))) == 3 * M


@pytest.mark.parametrize("fast", [1, 2, 4, 5])
def test_auto_keeps_the_fastest(fast: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CallClock(monkeypatch, 5, fast)

    def counted(model: nn.Module, x: Tensor) -> Tensor:
        clock.call()
        return _loss(model, x)

    models, step, state = _array(_line, counted, count=5, chunk_size="auto")
    plain = hfta.make_train_step(models[0], _loss, hfta.sgd(lr=0.1, momentum=0.9))
    x, held = _x(5), optree.tree_map(torch.clone, state)
    expected = plain(state, x)
    for _ in range(2):
        after = step(state, x)
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-12)
    # Measuring runs the members many times and counts as no step.
    assert identical(state, held)
    clock.check_measured_once(then=2)
    step(state, x[:, :3])
    clock.check_measured_once(then=1)


def test_auto_measures_nothing_inside_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfta_func.step.chunks.now", None)
    _, step, state = _array(_line, chunk_size="auto")
    x = _x()
    nested = hfta.vmap(lambda state, x: step(state, x)[1]["loss"])(
        optree.tree_map(lambda leaf: torch.stack([leaf, leaf]), state), torch.stack([x, x + 1])
    )
    _, plain, _ = _array(_line)
    expected = torch.stack([plain(state, x)[1]["loss"], plain(state, x + 1)[1]["loss"]])
    torch.testing.assert_close(nested, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("nonfinite", ["skip", "freeze", "raise"])
@pytest.mark.parametrize("failing", [False, True])
def test_inactive_members_keep_everything(failing: bool, nonfinite: Any, donate: bool) -> None:
    scale = hfta.step.LossScale(init_scale=[4.0, 8.0, 16.0], growth_interval=1)
    _, step, state = _array(loss_scale=scale, nonfinite=nonfinite, donate=donate)
    state = state._replace(active=torch.tensor([True, False, True]), step=torch.tensor([1, 2, 3]))
    before = optree.tree_map(torch.clone, state)
    x = _x()
    if failing:
        x[1] = float("nan")
    for _ in range(2):
        state, _ = step(state, x)
    assert identical(hfta.take(state, [1]), hfta.take(before, [1]))
    assert state.step.tolist() == [3, 2, 5] and state.active.tolist() == [True, False, True]
    assert state.loss_scale.scale.tolist() == [16.0, 8.0, 64.0]
    for member in (0, 2):
        for part in ("params", "buffers", "opt_state"):
            mine, old = (hfta.take(getattr(one, part), [member]) for one in (state, before))
            assert not identical(mine, old)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("optimizer", [hfta.adamw(lr=0.1, weight_decay=0.5), hfta.sgd(lr=0.1, weight_decay=0.5)])
def test_frozen_parameters_are_not_updated(optimizer: Any, donate: bool) -> None:
    def factory() -> nn.Module:
        model = _factory()
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        model[3].bias.requires_grad_(False)  # type: ignore[index]
        return model

    _, step, state = _array(factory, optimizer=optimizer, donate=donate)
    before = optree.tree_map(torch.clone, state.params)
    for _ in range(3):
        state, _ = step(state, _x())
    changed = {path for path, param in state.params.items() if not torch.equal(param, before[path])}
    assert changed == before.keys() - {"0.weight", "3.bias"}


def test_donating_writes_the_state_alone() -> None:
    def scaled(model: nn.Module, x: Tensor, hparams: dict[str, Tensor]) -> Tensor:
        x.mul_(2.0)
        return model(x).square().mean() * hparams["weight"]

    models, step, _ = _array(loss=scaled, donate=True)
    state = step.init(*hfta.stack_params(models), seeds=SEEDS, hparams={"weight": [1.0, 2.0, 3.0]})
    x = _x()
    held = optree.tree_map(torch.clone, (x, state.keys, state.hparams, state.active))
    given, params = state, dict(state.params)
    for _ in range(2):
        state, _ = step(state, x)
    assert identical((x, state.keys, state.hparams, state.active), held)
    assert state is given and all(state.params[path] is param for path, param in params.items())
    assert state.step.tolist() == [2, 2, 2]


def _slopes(model: Any, slopes: Tensor) -> Tensor:
    """A loss whose gradient is the batch."""
    return (model.weight * slopes).sum()


def _vector() -> nn.Module:
    layer = nn.Linear(8, 1, bias=False)
    nn.init.constant_(layer.weight, 1e-3)
    return layer


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("compiles", [True, False])
def test_a_gradient_whose_sum_overflows_is_finite(
    size: int | None, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles:
        # As on a machine without a compiler, and on a GPU.
        monkeypatch.setattr(commit, "_kernel_for", lambda leaves: None)
    _, step, state = _array(_vector, _slopes, hfta.sgd(lr=1e-38), chunk_size=size)
    slopes = torch.full((M, 1, 8), 1.0)
    slopes[1] = 3e38
    assert slopes[1].sum().isinf()
    after, metrics = step(state, slopes)
    assert metrics["finite"].tolist() == [True] * M and metrics["failure"].tolist() == [hfta.step.Failure.NONE] * M
    torch.testing.assert_close(after.params["weight"][1], state.params["weight"][1] - 3.0)


@pytest.mark.parametrize("nonfinite", ["skip", "freeze", "raise"])
def test_an_overflow_under_a_scale_freezes_nobody(nonfinite: Any) -> None:
    scale = hfta.step.LossScale(init_scale=[1.0, 3e38, 2.0], growth_interval=100)
    _, step, state = _array(_vector, _slopes, hfta.sgd(lr=0.1), loss_scale=scale, nonfinite=nonfinite)
    after, metrics = step(state, torch.full((M, 1, 8), 10.0))
    assert metrics["failure"].tolist() == [hfta.step.Failure.NONE, hfta.step.Failure.OVERFLOW, hfta.step.Failure.NONE]
    assert after.active.tolist() == [True] * M
    assert torch.equal(after.params["weight"][1], state.params["weight"][1])
    assert after.loss_scale.scale[1] == state.loss_scale.scale[1] / 2
    assert metrics["loss_scale"].tolist() == state.loss_scale.scale.tolist()


@pytest.mark.parametrize("start", [2.0**127, 3e38])
def test_a_scale_never_becomes_infinite(start: float) -> None:
    scale = hfta.step.LossScale(init_scale=[start, 1.0], growth_factor=[2.0, 4.0], growth_interval=1)
    state = scale.init(2, CPU)
    first = state.scale[0].item()
    for _ in range(3):
        state = scale.update(state, overflow=torch.tensor([False, False]), active=torch.tensor([True, True]))
    assert state.scale.tolist() == [first, 64.0]
    # It can still go down.
    state = scale.update(state, overflow=torch.tensor([True, False]), active=torch.tensor([True, True]))
    assert state.scale.tolist() == [first / 2, 256.0]


def test_donating_takes_less_room() -> None:
    def peak(donate: bool) -> int:
        _, step, state = _array(lambda: nn.Linear(64, 256), optimizer=hfta.adam(lr=0.1), donate=donate)
        x = torch.randn(M, 2, 64)
        held = [step(state, x)[0]]

        def again() -> None:
            held[0], _ = step(held[0], x)

        return peak_bytes(again, CPU)

    # Parameters and two moments of each are written where they are.
    assert peak(True) + 2 * M * 4 * 64 * 256 <= peak(False)


def test_failures_keep_their_numbers() -> None:
    expected = {"NONE": 0, "LOSS": 1, "GRADIENT": 2, "OVERFLOW": 3, "SEARCH": 4}
    assert {failure.name: failure.value for failure in hfta.step.Failure} == expected


@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_of_a_model_that_a_global_holds_is_refused(count: int) -> None:
    models = [nn.Linear(4, 1) for _ in range(count)]
    step = hfta.make_train_step(models[0], lambda model, x: models[0](x).square().mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.stack_params(models), seeds=range(count))
    with pytest.raises(hfta.errors.LossError, match=r"depends on no parameter of the model .* compute it from model\("):
        step(state, torch.randn(count, 5, 4))
