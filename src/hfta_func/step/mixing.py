"""Who averages with whom: groups of members, round after round, for :func:`hfta_func.callbacks.averaging`.

Groups are ``[M]`` integers: members with the same number average among each other, and those with -1 are away and keep what
they have. What changes from round to round is a function of the round's number, so that a resumed run goes on with the same
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hfta_func import random
from hfta_func.errors import HyperparameterError

Groups = Callable[[int], Tensor]


def grid(*sizes: int) -> Groups:
    """Peers on a grid, who average along one dimension in each round and along the next one in the next round.

    After as many rounds as there are dimensions each of the M = prod(sizes) members has the average of all, though none has
    met more than ``sum(sizes) - len(sizes)`` others.

    Args:
        sizes: The grid; ``grid(16, 16)`` are 256 peers, in groups of 16.

    Example:
        >>> rows = mixing.grid(2, 3)
        >>> rows(0), rows(1)
        (tensor([0, 1, 2, 0, 1, 2]), tensor([0, 0, 0, 1, 1, 1]))

    References:
        Ryabinin et al., "Moshpit SGD: communication-efficient decentralized training on heterogeneous unreliable devices",
        NeurIPS 2021.
    """
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)

    def groups(turn: int) -> Tensor:
        # A member's position in the grid without its coordinate along the dimension of this turn.
        along = turn % len(sizes)
        rest = torch.arange(numbers.numel() // sizes[along]).reshape(numbers.select(along, 0).shape)
        return rest.unsqueeze(along).expand(sizes).flatten().clone()

    return groups


def at_random(num_models: int, count: int, seed: int = 0) -> Groups:
    """A number of groups of sizes as equal as can be, drawn anew in each round; ``M // 2`` groups are pairs, as in gossip.

    The mean-square distance to the average of all falls in expectation by ``(count - 1) / (M - 1)`` per round.

    Args:
        num_models: Number of members.
        count: How many groups.
        seed: Decides them, with the round.

    Example:
        >>> at_random(7, 3)(0).bincount()
        tensor([3, 2, 2])
    """
    (key,) = random.keys([seed])
    return lambda turn: random.permutation(random.fold_in(key, turn), num_models) % count


def dropouts(groups: Tensor | Sequence[int] | Groups, rate: float, seed: int = 0) -> Groups:
    """The same groups without the members that are away in a round, each with some probability.

    Args:
        groups: Groups, or a function of the round.
        rate: How probable it is that a member is away; the others average without it.
        seed: Decides who is away, with the round.

    Raises:
        HyperparameterError: if ``rate`` is no probability.

    Example:
        >>> dropouts(mixing.grid(2, 3), rate=0.5)(0)
        tensor([ 0,  1,  2,  0, -1,  2])
    """
    if not 0.0 <= rate <= 1.0:
        raise HyperparameterError(f"rate is {rate}; it is a probability, from 0 to 1")
    (key,) = random.keys([seed])

    def there(turn: int) -> Tensor:
        labels = at(groups, turn)
        away = random.bernoulli(random.fold_in(key, turn), rate, labels.shape)
        return torch.where(away, -1, labels)

    return there


def at(groups: Tensor | Sequence[int] | Groups, turn: int) -> Tensor:
    """The groups ``[M]`` of a round.

    Raises:
        HyperparameterError: if they are no integers, one per member.
    """
    labels = torch.as_tensor(groups(turn) if callable(groups) else groups)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise HyperparameterError(
            f"groups is {labels.dtype} {list(labels.shape)}; give one integer per model, -1 is away"
        )
    return labels


def matrix(groups: Tensor | Sequence[int], weights: Tensor | Sequence[float] | None = None) -> Tensor:
    """Groups as weights ``[M, M]`` for :func:`hfta_func.step.average`.

    Args:
        groups: ``[M]`` integers.
        weights: ``[M]``, such as numbers of rows; equal by default. A group whose weights are all 0 keeps what it has.

    Raises:
        HyperparameterError: if groups are no integers, or there is not one weight per member.

    Example:
        >>> matrix([0, 0, -1])
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]], dtype=torch.float64)
    """
    labels = at(torch.as_tensor(groups), 0)
    weight = torch.ones(len(labels)) if weights is None else torch.as_tensor(weights, device=labels.device)
    if weight.shape != labels.shape:
        raise HyperparameterError(f"weights is {list(weight.shape)} for {len(labels)} models in groups; give one each")
    together = (labels[:, None] == labels) & (labels >= 0)
    shares = torch.where(together, weight.double(), 0.0)
    alone = (shares == 0).all(1)
    return torch.where(alone[:, None], torch.eye(len(labels), dtype=torch.float64, device=labels.device), shares)
