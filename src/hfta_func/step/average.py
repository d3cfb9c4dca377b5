"""Averages of members, between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hfta_func._tree import num_models, tree_map
from hfta_func.errors import HyperparameterError
from hfta_func.models.stack import Stacked
from hfta_func.step.state import TrainState

T = TypeVar("T")


def average(tree: T, weights: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None) -> T:
    """Give every member the weighted average of all, as federated averaging does after each round.

    A member that is not finite spoils the averages in which it has a weight, and no other.

    Args:
        tree: A stacked tree, or a training state, of which parameters and buffers are averaged and the rest is kept.
            Integers, such as counters, stay each member's own.
        weights: ``[M]``, such as the numbers of rows; equal by default. ``[M, M]`` mixes: row ``i`` holds the weights of
            member ``i``'s own average. Each average is divided by the sum of its weights.

    Raises:
        HyperparameterError: if weights have another shape, are negative or not finite, or sum to 0.

    Example:
        >>> average({"bias": torch.tensor([[1.0], [2.0], [4.0]])}, weights=[1, 1, 2])
        {'bias': tensor([[2.7500], [2.7500], [2.7500]])}
        >>> pairs = [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        >>> average({"bias": torch.tensor([[1.0], [2.0], [4.0]])}, weights=pairs)["bias"].flatten()
        tensor([1.5000, 1.5000, 4.0000])

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
    """
    if isinstance(tree, TrainState):
        stacked = average(Stacked(tree.params, tree.buffers), weights)
        return tree._replace(params=stacked.params, buffers=stacked.buffers)
    count = num_models(tree)
    weight = torch.ones(count) if weights is None else torch.as_tensor(weights)
    if weight.shape not in ((count,), (count, count)):
        raise HyperparameterError(
            f"weights is {list(weight.shape)} for {count} models; give one number per model [{count}], or [{count}, {count}]"
        )
    rows = weight.double().expand(count, count)
    if not bool((rows.isfinite() & (rows >= 0)).all()) or not bool((rows.sum(1) > 0).all()):
        raise HyperparameterError("weights must be finite, not negative, and more than 0 in sum")
    rows = rows / rows.sum(1, keepdim=True)

    def mixed(leaf: Tensor) -> Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        kind = torch.promote_types(leaf.dtype, torch.float32)
        share, flat = rows.to(leaf.device, kind), leaf.reshape(count, -1).to(kind)
        finite = flat.isfinite()
        # A weight of 0 times infinity would be NaN.
        spoilt = (share != 0).to(kind) @ (~finite).to(kind) != 0
        return torch.where(spoilt, torch.nan, share @ torch.where(finite, flat, 0)).to(leaf.dtype).reshape(leaf.shape)

    return tree_map(mixed, tree)
