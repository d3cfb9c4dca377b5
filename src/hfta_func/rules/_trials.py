"""Times the lowerings of convolutions, and of layers with their backward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from hfta_func.calls.made import tensors_in
from hfta_func.rules import _measured
from hfta_func.rules._choice import choose, measure
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._lowering import Case, convolution_of
from hfta_func.rules._registry import Call


def time_lowerings(
    case: Case, operator: Any, rule: Any, args: Any, dims: Any, kwargs: dict[str, Any], named_dims: Any
) -> None:
    """Time the lowerings of an operator in training, in a call in which that may be."""
    call = _measured.call(case, tensors := tensors_in(args))
    if not call[-1] or not any(call[-1]) or not _measured.is_open(call, tensors):
        return

    def run(lowering: str) -> Tensor:
        inputs: list[Tensor] = []

        def alike(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return [*map(alike, x)]
            if not isinstance(x, Tensor):
                return x
            # The backward pass ends here.
            x = x.view_as(x) if x.requires_grad else x
            inputs.extend([x] * x.requires_grad)
            return x

        if lowering == "loop":
            outputs, _ = one_by_one(operator, case.num_models, alike(args), dims, kwargs, named_dims)
        else:
            outputs, _ = rule(Call(case.num_models, tuple(dims), named_dims, lowering), *alike(args), **kwargs)
        outputs = [x for x in tensors_in(outputs) if x.requires_grad]
        torch.autograd.grad(outputs, inputs, [*map(torch.ones_like, outputs)], allow_unused=True)
        return outputs[0].detach()

    # An estimate for layers whose weights follow their input.
    takes = tensors[0].numel() * max(max(x.shape, default=1) for x in tensors[1:] or tensors) * 3e-10
    if measure(case, (), run, takes):
        _measured.close(call)


CONVOLUTION_GRADS = "convolution_input_grad", "convolution_weight_grad"


def time_convolution(
    case: Case, impossible: Collection[str], x: Tensor, weight: Tensor, forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
) -> bool:  # fmt: skip
    """Time the lowerings of a convolution, and of the gradients that are needed, on some samples ``[M,N,GI,S]``.

    Args:
        case: The convolution.
        impossible: The lowerings that it cannot have.
        x: The input of all members.
        weight: Their filters.
        forward: ``forward(lowering, x, weight)``.
        backward: ``backward(of, lowering, grad, x, weight)``, the gradient of the input, 0, or of the filters, 1.

    Returns:
        Whether there is nothing left to time.
    """
    one = convolution_of(case)
    products = max(1, case.num_models * one.fewer_pixels * math.prod(one.weight))
    count = min(one.x[0], max(4, 2**26 // products))
    few = x.narrow(1, 0, count), weight

    @functools.cache
    def gradient() -> Tensor:
        return forward(choose(case).lowering, *few)

    runs: dict[str, Callable[[str], Tensor]] = {case.op: lambda name: forward(name, *few)}
    for of, op in enumerate(CONVOLUTION_GRADS):
        if torch.is_grad_enabled() and few[of].requires_grad:
            runs[op] = lambda name, of=of: backward(of, name, gradient(), *few)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(
            measure(case._replace(op=op), impossible, run, products * count * 2**-34) for op, run in runs.items()
        )
