"""Connectionist temporal classification of M members as one over M times the batch.

Dimension letters: M models, T time, N batch, C classes, K labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, front, split
from hfta_func.rules._registry import Call, Result, register

_NONE, _MEAN = 0, 1


@register("ctc_loss.IntList", "loss")
def ctc_loss_of_lists(call: Call, *args: Any) -> Result:
    """Connectionist temporal classification ``[M,T,N,C]`` with lengths that all members share."""
    return _loss(torch.ops.aten.ctc_loss.IntList, call, *args)


@register("ctc_loss.Tensor", "loss")
def ctc_loss_of_tensors(call: Call, *args: Any) -> Result:
    """Connectionist temporal classification ``[M,T,N,C]`` with lengths ``[M,N]``."""
    return _loss(torch.ops.aten.ctc_loss.Tensor, call, *args)


def _loss(
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
    # The composite, so that PyTorch chooses between its kernel and cuDNN's.
    single = log_probs.dim() - (call.dims[0] is not None) == 2
    joined = _join(call, (log_probs.unsqueeze(-2) if single else log_probs, targets, input_lengths, target_lengths))
    losses = split(operator(*joined, blank, _NONE, zero_infinity), 0, call.num_models)
    if reduction == _MEAN:
        # Each loss is divided by the length of its target before the mean is taken.
        lengths = torch.as_tensor(joined[3], device=losses.device).reshape(losses.shape)
        losses = losses / lengths.clamp(min=1)
    if reduction == _NONE:
        return losses.squeeze(1) if single else losses, 0
    return losses.mean(1) if reduction == _MEAN else losses.sum(1), 0


@register("_ctc_loss", "loss")
def ctc_loss_forward_of_lists(call: Call, *args: Any) -> Result:
    """Losses ``[M,N]`` of PyTorch's own kernel, and what its gradient needs."""
    return _forward(torch.ops.aten._ctc_loss.default, call, *args)


@register("_ctc_loss.Tensor", "loss")
def ctc_loss_forward_of_tensors(call: Call, *args: Any) -> Result:
    """The same with lengths ``[M,N]``."""
    return _forward(torch.ops.aten._ctc_loss.Tensor, call, *args)


@register("_ctc_loss_backward", "loss")
def ctc_loss_backward_of_lists(call: Call, *args: Any) -> Result:
    """Gradient of the log probabilities ``[M,T,N,C]``."""
    return _backward(torch.ops.aten._ctc_loss_backward.default, call, *args)


@register("_ctc_loss_backward.Tensor", "loss")
def ctc_loss_backward_of_tensors(call: Call, *args: Any) -> Result:
    """The same with lengths ``[M,N]``."""
    return _backward(torch.ops.aten._ctc_loss_backward.Tensor, call, *args)


def _forward(operator: Any, call: Call, *args: Any) -> Result:
    losses, log_alpha = operator(*_join(call, args[:4]), *args[4:])
    return (split(losses, 0, call.num_models), split(log_alpha, 0, call.num_models)), (0, 0)


def _backward(operator: Any, call: Call, *args: Any) -> Result:
    num_models, dims = call.num_models, call.dims
    grad, losses, log_alpha = (fold(args[i], dims[i], 0, num_models) for i in (0, 5, 6))
    joined = _join(call._replace(dims=dims[1:]), args[1:5])
    return split(operator(grad, *joined, losses, log_alpha, *args[7:]), 1, num_models), 1


def _join(call: Call, args: Any) -> list[Any]:
    """Log probabilities ``[T,N,C]``, targets ``[N,K]`` or joined ``[K]``, and lengths ``[N]``, all with MN for N."""
    num_models, (log_probs, targets, *lengths) = call.num_models, args
    joined: list[Any] = [fold(log_probs, call.dims[0], 1, num_models), fold(targets, call.dims[1], 0, num_models)]
    for x, dim in zip(lengths, call.dims[2:4], strict=True):
        if not isinstance(x, Tensor):
            joined.append([*x] * num_models)
        elif dim is None:
            joined.append(x.reshape(-1).repeat(num_models))
        else:
            # The length of a single sample may have no axis.
            joined.append(front(x, dim).flatten())
    return joined
