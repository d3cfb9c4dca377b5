"""A module as a pure function of its parameters, buffers and key.

Public: :func:`functional`. :func:`bind` is what it and the training step are made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._routing import routed
from hfta_func._types import Params


def functional(model: nn.Module) -> Callable[..., tuple[Any, Params]]:
    """The model's forward pass as a pure function.

    Args:
        model: A module; its code, settings and train mode are copied, its parameters are not kept.

    Returns:
        ``apply(params, buffers, *args, key=None, **kwargs) -> (output, new_buffers)`` for ONE member's parameters.
        Nothing passed in is written: running statistics come back in ``new_buffers``. With a ``key`` every random
        call of the model draws from it; without one, the model draws from PyTorch's generator as it always does.

    Raises:
        RandomnessError: from ``apply`` with a key, at a random operator that is not routed.

    Example:
        >>> params, buffers = stack_params([torch.nn.BatchNorm1d(2) for _ in range(3)])
        >>> apply = functional(torch.nn.BatchNorm1d(2))
        >>> output, new_buffers = vmap(apply)(params, buffers, torch.randn(3, 8, 2))
        >>> output.shape, new_buffers["num_batches_tracked"], buffers["num_batches_tracked"]
        (torch.Size([3, 8, 2]), tensor([1, 1, 1]), tensor([0, 0, 0]))
    """

    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return bind(model, forward)


def bind(model: nn.Module, func: Callable[..., Any]) -> Callable[..., tuple[Any, Params]]:
    """``func(model, *args, **kwargs)`` as a pure function ``(params, buffers, *args, key=None, **kwargs)``.

    ``func`` sees an ordinary module that holds the given tensors, so it may call it any number of times, use its
    submodules and methods, and read its parameters.
    """
    body = _Body(skeleton(model), func)

    def apply(params: Params, buffers: Params, *args: Any, key: Tensor | None = None, **kwargs: Any) -> Any:
        tensors = {f"model.{path}": tensor for path, tensor in params.items()}
        # Modules write running statistics in place, so they get copies; the call leaves the new ones in `tensors`.
        tensors.update({f"model.{path}": tensor.clone() for path, tensor in buffers.items()})
        with routed(key):
            output = torch.func.functional_call(body, tensors, args, kwargs)
        return output, {path: tensors[f"model.{path}"] for path in buffers}

    return apply


class _Body(nn.Module):
    """A function of a module, as a module."""

    def __init__(self, model: nn.Module, func: Callable[..., Any]):
        super().__init__()
        self.model = model
        self.func = func
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(self.model, *args, **kwargs)


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have shapes but no storage."""
    memo: dict[int, Any] = {}
    for own in model.parameters():
        memo[id(own)] = nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=own.requires_grad)
    for own in model.buffers():
        memo[id(own)] = torch.empty_like(own, device="meta")
    return copy.deepcopy(model, memo)
