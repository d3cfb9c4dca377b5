"""Connectionist temporal classification of M members as one over M times the batch.

Dimension letters: M models, T time, N batch, C classes, K labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func.rules._layout import fold, models_first, split
from hfta_func.rules._registry import Call, Result, register_each, register_looped

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
    # [T,N,C], [N,K] or concatenated [K], and lengths [N], all with MN for N
    num_models, dims, lengths = call.num_models, call.dims, []
    for x, dim in zip((input_lengths, target_lengths), dims[2:4], strict=True):
        if not isinstance(x, Tensor):
            lengths.append([*x] * num_models)
        elif dim is None:
            lengths.append(x.reshape(-1).repeat(num_models))
        else:
            # The length of a single sample may have no axis.
            lengths.append(models_first(x, dim).flatten())
    folded = fold(log_probs, dims[0], 1, num_models), fold(targets, dims[1], 0, num_models)
    losses = split(operator(*folded, *lengths, blank, _NONE, zero_infinity), 0, num_models)
    if reduction == _MEAN:
        # Each loss is divided by the length of its target before the mean is taken.
        lengths = torch.as_tensor(lengths[1], device=losses.device).reshape(losses.shape)
        losses = losses / lengths.clamp(min=1)
    if reduction == _NONE:
        return losses.squeeze(1) if single else losses, 0
    return losses.mean(1) if reduction == _MEAN else losses.sum(1), 0


# What a gradient inside ``vmap`` decomposes the loss into.
register_looped("loss", "_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor")
