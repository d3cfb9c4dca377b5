"""What a loss function takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hfta_func._errors import LossError

_REPORTED = ("loss", "finite", "failure", "loss_scale")


def check_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of one model; raises a LossError unless they are a scalar and a dict of tensors."""
    if isinstance(result, tuple) and len(result) != 2:
        raise LossError(f"the loss function returned {len(result)} results; return (loss, dict of metrics)")
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss is a {type(loss).__qualname__}; return a scalar tensor, or (loss, dict of metrics)")
    if loss.dim() != 0:
        raise LossError(f"the loss of one model has shape {list(loss.shape)}; reduce it to a scalar, e.g. with .mean()")
    if not loss.dtype.is_floating_point:
        raise LossError(f"the loss is {loss.dtype}; it must be floating point to have a gradient")
    if not isinstance(metrics, dict):
        raise LossError(f"the loss function returned (loss, {type(metrics).__qualname__}); metrics must be a dict")
    for name, value in metrics.items():
        if name in _REPORTED:
            raise LossError(f"metric '{name}' hides what the step reports; name it none of {', '.join(_REPORTED)}")
        if not isinstance(value, Tensor):
            raise LossError(f"metric '{name}' is a {type(value).__qualname__}; metrics must be tensors")
    return loss, metrics


def num_positional(func: Callable[..., Any]) -> int:
    """How many arguments a function takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        for parameter in inspect.signature(func).parameters.values()
    )
