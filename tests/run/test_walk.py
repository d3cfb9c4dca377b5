"""Steps that are walked without values, and plans for devices that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func._torch import is_walked
from hfta_func.errors import TraceError
from hfta_func.run.memory import peak_bytes
from hfta_func.run.predict import Operator, find_device, walk

Setting = tuple[Any, hfta.step.TrainState, torch.Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 2))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def setting(count: int = 3, loss: Any = loss_fn, **options: Any) -> Setting:
    step = hfta.make_train_step(make_model(), loss, hfta.adam(lr=[0.1 / (i + 1) for i in range(count)]), **options)
    state = step.init(*hfta.init_params(make_model, seeds=range(count)), seeds=range(count))
    return step, state, torch.randn(count, 5, 3, 8, 8)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not is_walked()


def test_a_walk_has_the_work_the_memory_and_the_lowerings_of_a_step() -> None:
    step, state, x = setting()
    walk(step, state, x)
    walked = walk(step, state, x)
    step_choices = [(choice.op, choice.lowering) for choice in hfta.rules.explain(step, state, x)]
    assert [(choice.op, choice.lowering) for choice in walked.choices] == step_choices
    # The convolution and the gradient of its filters; the layer, and the gradients of its input and of its weights. The
    # members' convolutions are one in groups, whose gradient has the work of M and not of M times M.
    conv, linear = 2 * 5 * 8 * 8 * 4 * 3 * 9, 2 * 5 * 256 * 2
    assert sum(operator.flops for operator in walked.operators) == 3 * (2 * conv + 3 * linear)
    # What kernels take besides is theirs: the walk knows the tensors of the step.
    for _ in range(2):
        step(state, x)
    assert walked.peak <= peak_bytes(lambda: step(state, x), torch.device("cpu")) <= 2 * walked.peak
    fresh, *_ = setting()
    for mine, other in zip(*map(hfta._tree.leaves, (step(state, x), fresh(state, x))), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_walk_of_an_mlp_takes_its_memory_to_the_byte() -> None:
    model = lambda: nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3))  # noqa: E731
    step = hfta.make_train_step(model(), loss_fn, hfta.sgd(lr=[0.1, 0.2], momentum=0.9))
    state, x = step.init(*hfta.init_params(model, seeds=[0, 1]), seeds=[0, 1]), torch.randn(2, 500, 7)
    walk(step, state, x)
    for _ in range(3):
        step(state, x)
    assert walk(step, state, x).peak == peak_bytes(lambda: step(state, x), torch.device("cpu"))


def test_a_walk_chooses_as_on_its_device() -> None:
    model = lambda: nn.Sequential(nn.Conv2d(128, 128, 1), nn.Flatten(), nn.Linear(128 * 64, 1))  # noqa: E731
    step = hfta.make_train_step(model(), loss_fn, hfta.sgd(lr=0.1))
    state, x = step.init(*hfta.init_params(model, seeds=[0, 1]), seeds=[0, 1]), torch.randn(2, 8, 128, 8, 8)
    here, there = (walk(step, state, x, device) for device in ("cpu", "cuda"))
    chosen = [{choice.op: choice.lowering for choice in one.choices} for one in (here, there)]
    assert chosen[0]["convolution_weight_grad"] != chosen[1]["convolution_weight_grad"] == "sample_matmul"
    # The kernels of this package in C are for a CPU.
    assert [any(operator.name == "diagnose" for operator in one.operators) for one in (here, there)] == [True, False]
    assert not hfta.rules.explain(step, state, x)[0].reason.startswith("1x1 filters: one batched")


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: loss_fn(model, x) * (2.0 if x.sum() > 0 else 1.0),
        lambda model, x: loss_fn(model, x) * x.sum().item(),
        lambda model, x: model(x)[x[:, 0, 0, 0] > 0].mean(),
    ],
)
def test_a_step_that_reads_values_cannot_be_planned_elsewhere(loss: Any) -> None:
    with pytest.raises(TraceError, match=r"cannot be walked without values .*decide by torch\.where"):
        hfta.plan(*setting(loss=loss), device="H100")


@pytest.mark.exhaustive
def test_a_plan_for_another_device() -> None:
    model = lambda: nn.Linear(64, 32)  # noqa: E731
    step = hfta.make_train_step(model(), loss_fn, hfta.sgd(lr=0.1))
    state, x = step.init(*hfta.init_params(model, seeds=[0, 1]), seeds=[0, 1]), torch.randn(2, 64, 64)
    small, large = (hfta.plan(step, state, x, device=name, sizes=[1, 4], limit=10**6) for name in ("T4", "H200"))
    assert small.free == 16e9 < large.free == 141e9
    assert small.num_models < large.num_models
    assert small.memory(4) == large.memory(4)
    assert all(a >= b > 0 for a, b in zip(small.seconds, large.seconds, strict=True))
    assert "T4" in str(small) and str(small).count("predicted") >= 3


@pytest.mark.exhaustive
def test_plans_that_cannot_be_made_say_why() -> None:
    step, state, x = setting()
    for options, message in (
        ({"device": "H10"}, "the nearest is 'H100'"),
        ({"device": "A100"}, "the nearest is 'A100 80GB'"),
        ({"device": "T4", "sizes": [4, 1]}, "ascending"),
    ):
        with pytest.raises(ValueError, match=message):
            hfta.plan(step, state, x, **options)
    with pytest.raises(ValueError, match="neither compiled nor in chunks"):
        hfta.plan(*setting(chunk_size=1), device="T4")
    evaluate = hfta.make_eval_step(make_model(), loss_fn)
    for call in (hfta.plan, hfta.profile):
        with pytest.raises(ValueError, match="the step evaluates"):
            call(evaluate, state, x)


def test_errors_of_a_step_are_its_own() -> None:
    step, state, _ = setting()
    with pytest.raises(TraceError, match=r"same reduction dim.*if it runs with values"):
        hfta.plan(step, state, torch.randn(3, 5, 3, 9, 9), device="T4")
    with pytest.raises(ZeroDivisionError):
        hfta.plan(*setting(loss=lambda model, x: model(x).mean() * (1 / 0)), device="T4")


def _product(size: int) -> Operator:
    like = torch.empty(1, size, size)
    step = lambda state, batch: (torch.bmm(state, batch), {})  # noqa: E731
    (operator,) = (one for one in walk(step, like, like).operators if one.name == "bmm")
    return operator


def test_a_product_takes_twice_the_least_time_of_the_data_sheet() -> None:
    device, product = find_device("T4"), _product(2048)
    like = torch.empty(1, 2048, 2048)
    walked = walk(lambda state, batch: (torch.bmm(state, batch), {}), like, like)
    least = max(product.flops / 8.1e12, product.bytes / 320e9)
    assert product.bytes == 3 * 4 * 2048**2 and device.seconds(walked, True) == pytest.approx(2 * least, rel=0.01)


def test_the_table_of_devices_is_sound() -> None:
    for name in ("H200", "H100", "A100 80GB", "L4", "V100", "T4", "RTX 4090"):
        device = find_device(name.lower())
        assert device.name == name and device.half >= device.single > 0 and device.memory > 0 and device.source
