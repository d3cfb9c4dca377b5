"""Times the lowerings of layers with their backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.calls.captured import tensors_in
from hfta_func.rules import _measured
from hfta_func.rules._choice import measure
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._lowering import Case
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
