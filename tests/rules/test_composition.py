"""Rules under everything that they are composed with: tangents, autocast, layouts, odd batches, dynamic shapes, inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hfta_func as hfta
from rule_cases import BATCH_AXES, FAMILIES, RECURRENT, RULE_CASES, RuleCase
from rule_checks import as_tuple, member_inputs, outputs_of_loop

# PyTorch says that it takes another way for LSTMs with projections.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")

BY_NAME = {case.name: case for case in RULE_CASES}
BATCHED = [pytest.param(BY_NAME[name], axes, id=name) for name, axes in BATCH_AXES.items()]
EVERY = [pytest.param(case, id=case.name) for case in RULE_CASES]


def _close(got: object, expected: object, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _grads(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    total = sum((output.double().square().sum() for output in outputs if output.requires_grad), torch.zeros(()))
    wanted = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(total, wanted, materialize_grads=True, allow_unused=True)) if wanted else []


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", EVERY)
def test_tangents(case: RuleCase) -> None:
    if case.name == "gaussian_nll_loss":
        pytest.skip(
            "PyTorch's own tangents stop at variances that it has clamped, its gradients do not; these do not either"
        )
    inputs = member_inputs(case)
    moved = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    primals, tangents = tuple(inputs[i] for i in moved), tuple(torch.randn_like(inputs[i]) for i in moved)

    def pushed(func: Any) -> Any:
        def along(*values: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(moved, values, strict=True))
            return as_tuple(func(*(given.get(i, x) for i, x in enumerate(inputs))))

        return torch.func.jvp(along, primals, tangents)

    try:
        expected = pushed(lambda *x: outputs_of_loop(case, x))
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"PyTorch has no tangent for it: {str(error)[:80]}")
    _close(pushed(hfta.vmap(case.func)), expected)


def check_autocast(case: RuleCase, dtype: torch.dtype, device: str) -> None:
    """Outputs, their dtypes, and gradients under autocast are those of members alone."""
    inputs = [x.float().requires_grad_() if x.is_floating_point() else x for x in member_inputs(case)]
    try:
        with torch.autocast(device, dtype):
            expected = outputs_of_loop(case, inputs)
        wanted = _grads(expected, inputs)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"PyTorch itself does not run it under autocast: {str(error)[:80]}")
    with torch.autocast(device, dtype):
        got = as_tuple(hfta.vmap(case.func)(*inputs))
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    # Roundings of a lower precision fall differently; 2e-2 is about five of them in bfloat16. Where tanh saturates, its
    # derivative is a small difference of two rounded numbers.
    tolerance = 1e-1 if case in RECURRENT else 2e-2
    scale = max(float(x.detach().abs().max()) for x in (*expected, *wanted) if x.numel() and x.is_floating_point())
    for mine, theirs in zip((*got, *_grads(got, inputs)), (*expected, *wanted), strict=True):
        if theirs.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", EVERY)
def test_autocast(case: RuleCase, dtype: torch.dtype) -> None:
    check_autocast(case, dtype, "cpu")


@pytest.mark.parametrize("case", [param for param in EVERY if any(x.dim() == 4 for x in param.values[0].make())])
def test_channels_last(case: RuleCase) -> None:
    inputs = [x.movedim(2, -1).contiguous().movedim(-1, 2) if x.dim() == 5 else x for x in member_inputs(case)]
    inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    try:
        expected = outputs_of_loop(case, inputs)
        wanted = _grads(expected, inputs)
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself does not run it on this layout: {str(error)[:80]}")
    got = as_tuple(hfta.vmap(case.func)(*inputs))
    _close(got, expected)
    _close(_grads(got, inputs), wanted)


def _with_batch(x: Tensor, axis: int | None, size: int) -> Tensor:
    """The stacked input with another batch size along the member's ``axis``."""
    if axis is None:
        return x
    repeats = -(-size // x.shape[axis + 1]) if size else 1
    return torch.cat([x] * repeats, axis + 1).narrow(axis + 1, 0, size).clone()


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(("case", "axes"), BATCHED)
def test_batches_of_none_and_one(case: RuleCase, axes: tuple[int | None, ...], size: int) -> None:
    inputs = [_with_batch(x, axis, size) for x, axis in zip(member_inputs(case), axes, strict=True)]
    inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    try:
        expected = outputs_of_loop(case, inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            hfta.vmap(case.func)(*inputs)
        pytest.skip(f"PyTorch itself refuses it: {str(error)[:80]}")
    got = as_tuple(hfta.vmap(case.func)(*inputs))
    _close(got, expected)
    _close(_grads(got, inputs), _grads(expected, inputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "axes"), BATCHED)
def test_dynamic_batches(case: RuleCase, axes: tuple[int | None, ...]) -> None:
    torch._dynamo.reset()
    inputs = member_inputs(case)
    wanted = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def step(*values: Tensor) -> tuple[object, object]:
        def total(*values: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            outputs, loss = as_tuple(hfta.vmap(case.func)(*values)), torch.zeros((), dtype=torch.float64)
            for output in outputs:
                if output.is_floating_point():
                    loss = loss + output.square().sum()
            return loss, outputs

        return torch.func.grad(total, wanted, has_aux=True)(*values)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (4, 5, 7):
        values = [_with_batch(x, axis, size) for x, axis in zip(inputs, axes, strict=True)]
        got = compiled(*values)
        _close(got, step(*values))
        _close(got[1], outputs_of_loop(case, values))


@pytest.mark.exhaustive
@pytest.mark.soak(ids="recurrent|attention")
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor(family: str) -> None:
    torch._dynamo.reset()
    # Every sixth row of a family, all in one graph: forward and the gradient of everything.
    cases = FAMILIES[family][::6]
    inputs = [member_inputs(case) for case in cases]
    wanted = [[i for i, x in enumerate(values) if x.is_floating_point()] for values in inputs]

    def step(inputs: list[list[Tensor]]) -> tuple[object, object]:
        def total(leaves: list[list[Tensor]]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
            outputs, loss = [], torch.zeros((), dtype=torch.float64)
            for case, values, chosen, own in zip(cases, inputs, wanted, leaves, strict=True):
                filled = list(values)
                for i, leaf in zip(chosen, own, strict=True):
                    filled[i] = leaf
                outputs.append(as_tuple(hfta.vmap(case.func)(*filled)))
                for output in outputs[-1]:
                    if output.is_floating_point():
                        loss = loss + output.square().sum()
            return loss, outputs

        leaves = [[values[i] for i in chosen] for values, chosen in zip(inputs, wanted, strict=True)]
        return torch.func.grad(total, has_aux=True)(leaves)

    _close(torch.compile(step, fullgraph=True)(inputs), step(inputs), 1e-9)
