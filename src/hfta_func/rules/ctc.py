"""Connectionist temporal classification of M members as one over M times the batch.

Dimension letters: M models, T time, N batch, C classes, K labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import each, fold, models_first, split
from hfta_func.rules._registry import Call, Result, register_each

_NONE, _MEAN = 0, 1


# PyTorch's decomposable operator, so that PyTorch chooses between its kernel and cuDNN's.
@register_each("loss", "ctc_loss.IntList", "ctc_loss.Tensor")
def ctc_loss(
    operator: Any,
    call: Call,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Result:
    """Losses ``[M,T,N,C] -> [M]`` or ``[M,N]`` with lengths ``[M,N]``, or lists that all members share."""
    single = log_probs.dim() - (call.dims[0] is not None) == 2
    log_probs = log_probs.unsqueeze(-2) if single else log_probs
    joined = _join(call.num_models, (log_probs, targets, input_lengths, target_lengths), call.dims)
    losses = split(operator(*joined, blank, _NONE, zero_infinity), 0, call.num_models)
    if reduction == _MEAN:
        # Each loss is divided by the length of its target before the mean is taken.
        lengths = torch.as_tensor(joined[3], device=losses.device).reshape(losses.shape)
        losses = losses / lengths.clamp(min=1)
    if reduction == _NONE:
        return losses.squeeze(1) if single else losses, 0
    return losses.mean(1) if reduction == _MEAN else losses.sum(1), 0


# The operators that a gradient inside ``vmap`` decomposes the loss into.
@register_each("loss", "_ctc_loss", "_ctc_loss.Tensor")
def ctc_loss_forward(operator: Any, call: Call, *args: Any) -> Result:
    """Losses ``[M,N]`` of PyTorch's kernel, and what its gradient needs."""
    outputs = operator(*_join(call.num_models, args[:4], call.dims), *args[4:])
    return tuple(split(output, 0, call.num_models) for output in outputs), (0, 0)


@register_each("loss", "_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(operator: Any, call: Call, grad: Tensor, *args: Any) -> Result:
    """Gradient of the log probabilities ``[M,T,N,C]``."""
    num_models, (grad_dim, *dims) = call.num_models, call.dims
    grad, *saved = each(fold, (grad, *args[4:6]), (grad_dim, *dims[4:6]), 0, num_models)
    return split(operator(grad, *_join(num_models, args[:4], dims), *saved, *args[6:]), 1, num_models), 1


def _join(num_models: int, args: Any, dims: Any) -> list[Any]:
    """Log probabilities ``[T,N,C]``, targets ``[N,K]`` or concatenated ``[K]``, lengths ``[N]``, all with MN for N."""
    log_probs, targets, *lengths = args
    joined: list[Any] = [fold(log_probs, dims[0], 1, num_models), fold(targets, dims[1], 0, num_models)]
    for x, dim in zip(lengths, dims[2:4], strict=True):
        if not isinstance(x, Tensor):
            joined.append([*x] * num_models)
        elif dim is None:
            joined.append(x.reshape(-1).repeat(num_models))
        else:
            # The length of a single sample may have no axis.
            joined.append(models_first(x, dim).flatten())
    return joined
