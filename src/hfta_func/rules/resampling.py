"""Resampling of M members' images as one with M times the batch, if PyTorch has no rule.

Dimension letters: M models, N batch, C channels, S space.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, split
from hfta_func.rules._registry import Call, Result, register


def _nearest_exact(name: str) -> None:
    forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward").default

    for op, operator in ((name, forward.default), (f"{name}.vec", forward.vec)):

        @register(op, "resampling")
        def resample(call: Call, x: Tensor, *options: Any, operator: Any = operator) -> Result:
            """Members join the batch."""
            # [M,N,C,S] -> [MN,C,S]
            return split(operator(fold(x, call.dims[0], 0, call.num_models), *options), 0, call.num_models), 0

    @register(f"{name}_backward", "resampling")
    def resample_backward(call: Call, grad: Tensor, output_size: Any, input_size: Any, *scales: Any) -> Result:
        """Members join the batch."""
        size = [call.num_models * input_size[0], *input_size[1:]]
        grad = fold(grad, call.dims[0], 0, call.num_models)
        return split(backward(grad, output_size, size, *scales), 0, call.num_models), 0


for _space in (1, 2, 3):
    _nearest_exact(f"_upsample_nearest_exact{_space}d")
