"""A rule against a loop over members: inputs, outputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hfta_func as hfta
from rule_cases import RuleCase

M = 3


def member_inputs(case: RuleCase, mask: tuple[bool, ...] = ()) -> list[Tensor]:
    """Inputs of all members, which share those where ``mask`` is False; without one they share none."""
    mask = mask or (True,) * len(case.make())
    members = [case.make() for _ in range(M)]
    return [
        torch.stack(column) if batched else column[0]
        for batched, column in zip(mask, zip(*members, strict=True), strict=True)
    ]


def as_tuple(output: object) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)  # type: ignore[return-value]


def weighted_sum(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar whose gradient reaches every entry of every differentiable output with another weight."""
    total = outputs[0].new_zeros(())
    for output in outputs:
        if output.is_floating_point() and output.requires_grad:
            weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
            total = total + (output * output * weights).sum()
    return total


def outputs_of_loop(case: RuleCase, inputs: Sequence[Tensor], mask: tuple[bool, ...] = ()) -> tuple[Tensor, ...]:
    mask = mask or (True,) * len(inputs)
    members = [
        as_tuple(case.func(*(x[i] if batched else x for batched, x in zip(mask, inputs, strict=True))))
        for i in range(M)
    ]
    return tuple(torch.stack(column) for column in zip(*members, strict=True))


def grads_of(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    wanted = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(weighted_sum(outputs), wanted, materialize_grads=True, allow_unused=True))


def assert_close(got: object, expected: object, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def check_against_loop(case: RuleCase, mask: tuple[bool, ...], tolerance: float = 1e-11) -> None:
    """Outputs and gradients of an array, where ``mask`` says which inputs are per member, are those of a loop."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in member_inputs(case, mask)]
    expected = outputs_of_loop(case, inputs, mask)
    got = as_tuple(hfta.vmap(case.func, in_dims=tuple(0 if batched else None for batched in mask))(*inputs))
    assert_close(got, expected, tolerance)
    assert_close(grads_of(got, inputs), grads_of(expected, inputs), tolerance)
