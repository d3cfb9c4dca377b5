"""Decides which calls of a model are cheap enough to be repeated in the backward pass."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func import _torch
from hfta_func.calls.draws import spellings
from hfta_func.calls.recompute import Recalls, recalls
from hfta_func.calls.routing import routed
from hfta_func.rules.loss import cross_entropy_in_parts


def routing(key: Tensor | None, numbers: Sequence[Tensor] = (), padding: Any = None) -> routed:
    """``routed(key)``, or inside a block of :class:`Recalls`, a mode that notes repeatable calls."""
    running = None if numbers or padding is not None else recalls()
    if running is not None:
        return _Noting(key, running)
    mode = routed(key, numbers=numbers)
    mode.padding = padding
    return mode


class _Noting(routed):
    redraws = True

    def __init__(self, key: Tensor | None, recalls: Recalls):
        super().__init__(key)
        self._recalls = recalls
        self._interpreter = _torch.current_interpreter() if self.depth else None
        # With several members, batching rules note normalisations.
        self._noted = _CHEAP if self.depth else _CHEAP_ALONE

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and note its result if it is cheap to recompute."""
        if func is F.cross_entropy and not self.depth:
            # With several members, the batching rule does this.
            func = _cross_entropy
        result = super().call(func, args, kwargs)
        if (elementwise := self._noted.get(func)) is not None and isinstance(result, Tensor):
            given = args, kwargs
            self._note(func, _in_batch(*given) if func is F.batch_norm else given, result, elementwise)
        return result

    def dropped(self, func: Callable[..., Tensor], *args: Any) -> Tensor:
        """See :class:`routed`; the backward pass makes the result again."""
        result = super().dropped(func, *args)
        # A scale of each member's own is no number for all elements.
        self._note(func, (args, {}), result, not isinstance(args[-1], Tensor))
        return result

    def _note(self, func: Callable[..., Any], given: Any, result: Tensor, elementwise: bool) -> None:
        if _torch.depth() != self.depth or not torch.is_grad_enabled():
            return
        leaves, spec = optree.tree_flatten(given, none_is_leaf=True)
        dims: list[int | None] = [None] * len(leaves)
        if (inner := self._interpreter) is not None:
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[position], dims[position] = _torch.unwrap_batched(leaf, self.depth)
            result, dim = _torch.unwrap_batched(result, self.depth)
            if dim is None:
                return
            # An elementwise function needs no level of vmap if all arguments have the model axis in one position, or no axis.
            tensors = (isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves)
            elementwise = elementwise and set(itertools.compress(dims, tensors)) == {dim}

        def call(*leaves: Any) -> Tensor:
            if inner is None or elementwise:
                args, kwargs = optree.tree_unflatten(spec, leaves)
                return func(*args, **kwargs)
            with _torch.vmap_level(inner.batch_size(), inner.randomness()) as level:
                wrapped = (
                    leaf if at is None else _torch.add_batch_dim(leaf, at, level)
                    for leaf, at in zip(leaves, dims, strict=True)
                )
                args, kwargs = optree.tree_unflatten(spec, wrapped)
                return _torch.unwrap_batched(func(*args, **kwargs), level)[0]

        self._recalls.note(call, leaves, result)


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """``F.cross_entropy``, in parts where possible."""
    given = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    given.apply_defaults()
    logits, target, weight, _, ignore_index, _, reduction, smoothing = given.args
    in_parts = None if weight is not None or smoothing else cross_entropy_in_parts(logits, target, ignore_index)
    if in_parts is None:
        return F.cross_entropy(*args, **kwargs)
    # As likelihoods of a single class, which PyTorch's operator sums in the same order.
    return F.nll_loss(-in_parts.unsqueeze(1), torch.where(target == ignore_index, -100, 0), reduction=reduction)


def _in_batch(args: Any, kwargs: Any) -> Any:
    """The arguments of batch normalisation with the statistics of the batch, without updates of running statistics."""
    given = inspect.signature(F.batch_norm).bind(*args, **kwargs)
    if given.arguments.get("training"):
        given.arguments |= {"running_mean": None, "running_var": None}
    return given.args, given.kwargs


_ACTIVATIONS = (
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6",
    "selu", "sigmoid", "silu", "softplus", "softsign", "tanh", "tanhshrink",
)  # fmt: skip
_CHEAP = {
    **{function: True for name in _ACTIVATIONS for function, _ in spellings(name)},
    **{function: False for name in ("contiguous", "flatten", "prelu", "reshape") for function, _ in spellings(name)},
}
"""Functions whose results cost about as much to compute as to read, and whether they are elementwise."""
_CHEAP_ALONE = {**_CHEAP, F.batch_norm: False, F.layer_norm: False}
