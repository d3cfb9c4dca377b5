"""Every module of torch.nn, on every sample input of PyTorch's own table, as an array of members that differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import ModuleInfo, module_db

import hfta_func as hfta
from oracle import M, assert_array_is_loop, for_every, stack

ROWS = [
    pytest.param(
        info, training, dtype, id=f"{info.name.removeprefix('nn.')}-{mode}-{str(dtype).removeprefix('torch.')}"
    )
    for info in module_db
    for mode, training in (("train", True), ("eval", False))[: 1 + info.train_and_eval_differ]
    for dtype in (torch.float64, torch.float32)
    if dtype in info.dtypes
]

# What PyTorch says about some samples, to a member alone as well.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*linear_cross_entropy. ``options`` ignored",
        "LSTM with projections is not supported with oneDNN",
        "enable_nested_tensor is True",
        "reduction. 'mean' divides the total loss by both the batch size and the support size",
    )
]

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}

CONSTANTS = {"nn.SoftMarginLoss": 1}
"""Floating-point arguments, by place, that PyTorch does not differentiate."""


def _samples(
    info: ModuleInfo, training: bool, dtype: torch.dtype, device: str
) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
    """What the constructor of each sample gets, the same for all members, and what each member is called with."""
    draws = []
    for member in range(M):
        torch.manual_seed(member)
        draws.append(info.module_inputs_func(info, device, dtype, requires_grad=False, training=training))
    for index, (first, *others) in enumerate(zip(*draws, strict=True)):
        if first.forward_input is not None:
            made = first.constructor_input.args, first.constructor_input.kwargs
            called = [(x.forward_input.args, x.forward_input.kwargs) for x in (first, *others)]
            yield f"sample {index} {first.desc} {made}", (made, called)


def _module(
    info: ModuleInfo, made: Any, called: Any, training: bool, dtype: torch.dtype, device: str, member: int
) -> nn.Module:
    """A member with parameters and buffers of its own."""
    # A copy, because a module may hold tensors and modules that it is given.
    args, kwargs = copy.deepcopy(made)
    torch.manual_seed(100 + member)
    module = info.module_cls(*args, **kwargs).to(device, dtype).train(training)
    if any(is_lazy(x) for x in module.parameters()):
        args, kwargs = called
        module(*args, **kwargs)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            # Towards noise in [0, 1), which keeps variances positive and fractions below one. Others are counters, whose
            # value members that run as one share.
            tensor.data.lerp_(torch.rand_like(tensor), 0.2)
    return module


def _check(info: ModuleInfo, training: bool, dtype: torch.dtype, device: str, made: Any, called: list[Any]) -> None:
    modules = [_module(info, made, called[member], training, dtype, device, member) for member in range(M)]
    params, buffers = hfta.stack_params(modules)
    arguments, rebuild = stack(called)
    apply = hfta.functional(modules[0])

    def parts(tensors: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        end = len(params) + len(buffers)
        own = dict(zip(params, tensors, strict=False)), dict(zip(buffers, tensors[len(params) :], strict=False))
        return *own, rebuild(tensors[end:])

    def array(key: Tensor, *tensors: Tensor) -> Any:
        params, buffers, (args, kwargs) = parts(tensors)
        return apply(params, buffers, *args, key=key, **kwargs)

    def alone(member: int, *tensors: Tensor) -> Any:
        params, buffers, (args, kwargs) = parts(tensors)
        # What is compared are the buffers afterwards, not how they are written.
        state = {**params, **{path: buffer.clone() for path, buffer in buffers.items()}}
        output = torch.func.functional_call(modules[member], state, args, kwargs)
        return output, {path: state[path] for path in buffers}

    inputs = [*params.values(), *buffers.values(), *arguments]
    differentiated = [x for place, x in enumerate(arguments) if place != CONSTANTS.get(info.name)]
    for tensor in (*params.values(), *differentiated):
        tensor.requires_grad_(tensor.is_floating_point())
    assert_array_is_loop(array, alone, inputs, TOLERANCES[dtype])


def test_every_module_is_there() -> None:
    assert len(module_db) == 114
    modes = {
        (info.name, training) for info in module_db for training in (True, False)[: 1 + info.train_and_eval_differ]
    }
    rows = [row.values for row in ROWS]
    assert {(info.name, training) for info, training, _ in rows} == modes and len(modes) == 126


def check_every_sample(info: ModuleInfo, training: bool, dtype: torch.dtype, device: str) -> None:
    """Arrays of a module against its members alone, on a device."""
    samples = _samples(info, training, dtype, device)
    for_every(samples, lambda sample: _check(info, training, dtype, device, *sample))


@pytest.mark.exhaustive(ids="-float32|^LinearCrossEntropyLoss|^Transformer(|Encoder|Decoder)-")
@pytest.mark.soak(ids="^LinearCrossEntropyLoss-train-float32")
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize(("info", "training", "dtype"), ROWS)
def test_module(info: ModuleInfo, training: bool, dtype: torch.dtype) -> None:
    check_every_sample(info, training, dtype, "cpu")
