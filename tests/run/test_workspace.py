"""Bytes that kernels on a CPU allocate besides their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.run.memory import peak_bytes
from hfta_func.run.predict import Predictor, find_device, measured, workspace
from hfta_func.run.walk import walk

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
has_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN's blocks are as wide as vectors of AVX-512"
)


def extra(call: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Bytes that a call allocates besides its results: said and measured."""
    leaves = [arg for arg in args if isinstance(arg, Tensor)]

    def step(state: tuple[Tensor, ...], batch: Any) -> Any:
        tensors = iter(state)
        call(*(next(tensors) if isinstance(arg, Tensor) else arg for arg in args))
        return state, {}

    (operator,) = (one for one in walk(step, tuple(leaves), ()).operators if one.is_kernel)
    call(*args)
    results = sum(like.bytes for like in operator.results)
    return workspace(operator, torch.get_num_threads()), peak_bytes(lambda: call(*args), CPU) - results


@has_avx512
@pytest.mark.parametrize(
    ("shape", "filters", "options", "is_channels_last"),
    [
        ((8, 64, 16, 16), (32, 64, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1), False),
        ((8, 64, 16, 16), (128, 64, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), False),
        ((32, 64, 16, 16), (128, 64, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), False),
        ((8, 64, 16, 16), (64, 16, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 4), False),
        ((8, 64, 16, 16), (64, 1, 3, 3), ([2, 2], [1, 1], [1, 1], False, [0, 0], 64), False),
        ((8, 8, 16, 16), (16, 8, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1), False),
        ((8, 64, 8, 8), (64, 32, 4, 4), ([2, 2], [1, 1], [1, 1], True, [0, 0], 1), False),
        # Fifteen of sixteen channels that the gradient of these filters fills in are zero.
        ((8, 64, 16, 16), (64, 1, 5, 5), ([1, 1], [2, 2], [1, 1], False, [0, 0], 64), True),
        ((8, 32, 16, 16), (64, 8, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 4), True),
    ],
)
def test_a_convolution_takes_its_blocks(
    shape: list[int], filters: list[int], options: tuple[Any, ...], is_channels_last: bool
) -> None:
    x, weight = torch.randn(shape), torch.randn(filters)
    if is_channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    y = torch.ops.aten.convolution(x, weight, None, *options)
    said, taken = extra(torch.ops.aten.convolution, x, weight, None, *options)
    assert said == pytest.approx(taken, abs=0.01 * (x.nbytes + y.nbytes))
    said, taken = extra(torch.ops.aten.convolution_backward, y, x, weight, None, *options, [True, True, False])
    assert said == pytest.approx(taken, rel=0.01)


def test_operands_are_converted_and_gradients_of_norms_allocated_twice() -> None:
    ones = torch.ones(4, 8, 128)
    assert extra(torch.mul, ones, ones > 0) == (ones.nbytes, ones.nbytes)
    assert (
        extra(torch.mul, ones, ones)
        == extra(torch.where, ones > 0, ones, ones)
        == extra(torch.masked_fill, ones, ones > 0, 1)
        == (0, 0)
    )
    scale = torch.ones(8)
    statistics = ones, ones, scale, scale, scale, scale, scale, True, 1e-5, [True, True, True]
    assert extra(torch.ops.aten.native_batch_norm_backward, *statistics) == (ones.nbytes, ones.nbytes)


def test_double_precision_unfolds_all_images() -> None:
    x, weight = torch.randn(8, 16, 8, 8).double(), torch.randn(32, 16, 3, 3).double()
    said, taken = extra(torch.ops.aten.convolution, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert said == taken == 8 * (16 * 9) * 64 * 8


@has_avx512
@pytest.mark.parametrize("count", [1, 4])
def test_the_memory_of_a_step_with_many_kinds_of_convolutions(count: int) -> None:
    def make_model() -> nn.Module:
        layers = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 5, 2, 2, groups=16), nn.BatchNorm2d(16), nn.ReLU()
        return nn.Sequential(*layers, nn.Conv2d(16, 32, 1), nn.Flatten(), nn.Linear(2048, 4))

    loss: Any = lambda model, x: model(x).square().mean()  # noqa: E731
    step = hfta.make_train_step(make_model(), loss, hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(make_model, seeds=range(count)), seeds=range(count))
    x = torch.randn(count, 8, 3, 32, 32)
    walk(step, state, x)
    for _ in range(2):
        step(state, x)
    said = Predictor(find_device("EPYC 9755"), measured("cpu"), 1).step(walk(step, state, x), 8)[1]
    assert said == pytest.approx(peak_bytes(lambda: step(state, x), CPU), rel=0.02)
