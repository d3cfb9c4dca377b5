"""Autocast of arrays is PyTorch's own of members alone: every module of torch.nn behind a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

import hfta_func as hfta
from oracle import KEYS, M, _tensors, for_every, stack
from test_modules import _module, _samples
from test_modules import pytestmark as MARKS

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")]

ROWS = [
    pytest.param(
        info, training, dtype, id=f"{info.name.removeprefix('nn.')}-{mode}-{str(dtype).removeprefix('torch.')}"
    )
    for info in module_db
    for mode, training in (("train", True), ("eval", False))[: 1 + info.train_and_eval_differ]
    for dtype in (torch.bfloat16, torch.float16)
    if torch.float32 in info.dtypes
]


LOOSE = {**dict.fromkeys(("nn.GRU", "nn.GRUCell", "nn.LSTM", "nn.RNN"), 1e-1), "nn.LayerNorm": 2e-1}
"""Tolerances: errors of recurrent layers add up, and PyTorch's kernel adds the gradients of weights in lower precision."""


class Behind(nn.Module):
    """A module whose first tensor comes out of a linear layer, in the lower precision of autocast."""

    def __init__(self, module: nn.Module, member: int) -> None:
        super().__init__()
        self.front = nn.Linear(1, 1)
        self.module = module
        with torch.no_grad():
            self.front.weight.fill_(1 - member / 64)
            self.front.bias.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            args = self.front(args[0].unsqueeze(-1)).squeeze(-1), *args[1:]
        return self.module(*args, **kwargs)


def _check(info: ModuleInfo, training: bool, dtype: torch.dtype, made: Any, called: list[Any]) -> None:
    modules = [
        Behind(_module(info, made, called[i], training, torch.float32, "cpu", i), i).train(training) for i in range(M)
    ]
    params, buffers = hfta.stack_params(modules)
    arguments, rebuild = stack(called)
    apply, names = hfta.functional(modules[0]), [*params, *buffers]

    def member(key: Tensor, arguments: list[Tensor], *tensors: Tensor) -> Any:
        own = dict(zip(names, tensors, strict=True))
        args, kwargs = rebuild(arguments)
        return apply(
            {path: own[path] for path in params}, {path: own[path] for path in buffers}, *args, key=key, **kwargs
        )

    def outcome(run: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in (*params.values(), *buffers.values())]
        with torch.autocast("cpu", dtype):
            outputs = _tensors(run(leaves))
        total = sum((x.double().square().sum() for x in outputs if x.requires_grad), torch.zeros(()))
        wanted = [x for x in leaves if x.requires_grad]
        grads = (
            torch.autograd.grad(total, wanted, materialize_grads=True, allow_unused=True) if total.requires_grad else ()
        )
        return [x.detach() for x in outputs], [*grads]

    def alone(i: int, leaves: list[Tensor]) -> list[Tensor]:
        own, before = dict(zip(names, [x[i] for x in leaves], strict=True)), torch.get_rng_state()
        args, kwargs = rebuild([x[i] for x in arguments])
        state = {**own, **{path: own[path].clone() for path in buffers}}
        outputs = torch.func.functional_call(modules[i], state, args, kwargs), {path: state[path] for path in buffers}
        if not torch.equal(before, torch.get_rng_state()):
            outputs = member(KEYS[i], [x[i] for x in arguments], *own.values())
        return _tensors(outputs)

    def loop(leaves: list[Tensor]) -> list[Tensor]:
        return [torch.stack(column) for column in zip(*(alone(i, leaves) for i in range(M)), strict=True)]

    try:
        expected, wanted = outcome(loop)
    except RuntimeError:
        # PyTorch itself does not run it under autocast.
        return
    outputs, grads = outcome(lambda leaves: hfta.vmap(member)(KEYS, arguments, *leaves))
    # PyTorch's loss in chunks, which is made without chunks for an array, is not among the operators that autocast casts.
    assert info.name == "nn.LinearCrossEntropyLoss" or [x.dtype for x in outputs] == [x.dtype for x in expected]
    # Roundings of a lower precision fall differently; 2e-2 is about five of them in bfloat16.
    tolerance = LOOSE.get(info.name, 2e-2)
    finite = [x.detach().nan_to_num(0, 0, 0).abs().max() for x in (*expected, *wanted) if x.numel()]
    scale = max((float(x) for x in finite if x.is_floating_point()), default=1.0)
    for found, other in zip((*outputs, *grads), (*expected, *wanted), strict=True):
        if other.is_floating_point():
            limits = {"rtol": tolerance, "atol": tolerance * scale, "equal_nan": True}
            torch.testing.assert_close(found.to(other.dtype), other, **limits)


@pytest.mark.soak(ids="^LinearCrossEntropyLoss")
@pytest.mark.exhaustive(ids="^LinearCrossEntropyLoss|^Transformer(|Encoder|Decoder)-")
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize(("info", "training", "dtype"), ROWS)
def test_module(info: ModuleInfo, training: bool, dtype: torch.dtype) -> None:
    samples = _samples(info, training, torch.float32, "cpu")
    for_every(samples, lambda sample: _check(info, training, dtype, *sample))
