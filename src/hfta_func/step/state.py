"""Everything that training changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hfta_func._torch import inside_transform, is_captured
from hfta_func._tree import num_models, tree_map, where, write
from hfta_func._types import Params, Shared, Tree
from hfta_func.errors import HyperparameterError, StateError
from hfta_func.models.scalar_attributes import filled
from hfta_func.models.stack import Stacked

T = TypeVar("T")


class Carried(NamedTuple):
    """What losses pass from batch to batch, ``[M, ...]`` each, with ``make_train_step(..., carry=)``."""

    now: Tree
    start: Tree  # what an epoch begins with


class TrainState(NamedTuple):
    """Everything that training changes, for M members; every leaf is ``[M, ...]``, except in ``shared``.

    Args:
        params: Parameters by path, including frozen ones.
        buffers: Buffers by path.
        opt_state: The optimizer's state, including its hyperparameters.
        keys: ``int64[M]``, the members' seeds.
        step: ``int64[M]``, the number of batches each member has seen; together with the key it determines a step's noise.
        hparams: The members' own numbers, ``[M]`` each: those for the loss function, and those in which the models differ,
            such as ``"1.p"``, for which ``buffers`` hold empty tensors ``[M, 0]``.
        active: ``bool[M]``; inactive members stay exactly as they are.
        loss_scale: The members' loss scales, or ``()`` without loss scaling.
        shared: What members share and train together, or ``()`` if the step has no ``shared_params``.
        carry: Anything else that members take along, such as their environments; a step leaves it as it is. Of a step with
            ``carry=`` it is :class:`Carried`. Integers called ``keys`` in it stay a member's own where it copies another in a
            study.
    """

    params: Params
    buffers: Params
    opt_state: Tree
    keys: Tensor
    step: Tensor
    hparams: Params
    active: Tensor
    loss_scale: Tree = ()
    shared: Shared | tuple[()] = ()
    carry: Tree = ()

    def __repr__(self) -> str:
        # Trees of other leaves, such as of axes, are of this class, too.
        if not isinstance(self.keys, Tensor):
            return tuple.__repr__(self)
        text = f"{self.keys.numel()} members"
        if not (self.keys.is_meta or inside_transform() or is_captured(self.keys)):
            steps = " to ".join(str(step) for step in sorted({int(step) for step in self.step.aminmax()}))
            text += f", step {steps}, {int(self.active.sum())} active"
        return f"TrainState({text})"


Taken = tuple[TrainState, dict[str, Tensor]]
"""What a step returns: the new state and the metrics, each ``[M, ...]``."""


def stored(state: T, after: T, donate: bool) -> T:
    """The state ``after`` a step, in the tensors of the one before it with ``donate``."""
    if donate:
        write(state, after)
    return state if donate else after


def restart(state: T) -> T:
    """A state whose active members carry what they started with, as :func:`fit` does at the start of every epoch.

    Args:
        state: A state of a step with ``carry=``; another one is returned as it is.

    Example:
        >>> step = make_train_step(
        ...     torch.nn.Linear(1, 1), lambda model, x, total: (model(x + total).sum(), total + x.sum()), sgd(lr=0.1),
        ...     carry=torch.zeros(()))
        >>> state = step.init(*stack_params([torch.nn.Linear(1, 1) for _ in range(2)]), seeds=[0, 1])
        >>> state, metrics = step(state, torch.ones(2, 3, 1))
        >>> state.carry.now, restart(state).carry.now
        (tensor([3., 3.]), tensor([0., 0.]))
    """
    carry = getattr(state, "carry", ())
    if not isinstance(carry, Carried):
        return state
    return state._replace(carry=carry._replace(now=where(state.active, carry.start, carry.now)))  # pyright: ignore


def stacked(state: Any) -> Stacked:
    """What a training state holds of the models alone, as :func:`stack_params` returns it.

    Args:
        state: A :class:`TrainState`. What members share and train is seen M times, not copied.

    Example:
        >>> models = [torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(rate)) for rate in (0.1, 0.2)]
        >>> step = make_train_step(models[0], lambda model, x: model(x).sum(), sgd(lr=0.1))
        >>> state = step.init(*stack_params(models), seeds=[0, 1])
        >>> [model[1].p for model in unstack_params(models[0], *stacked(state))]
        [0.1, 0.2]
    """
    return Stacked({**state.params, **expanded_shared(state)}, filled(state.buffers, getattr(state, "hparams", {})))


def shared_params(state: Any) -> Params:
    """The parameters that members of a state share and train, without a model axis."""
    shared = getattr(state, "shared", ())
    return shared.params if isinstance(shared, Shared) else {}


def expanded_shared(state: Any) -> Params:
    """The same ``[M, ...]``: seen M times, not copied."""
    return {path: param.expand(state.keys.shape[0], *param.shape) for path, param in shared_params(state).items()}


def refuse_shared(state: Any, option: str) -> None:
    """Raise a StateError if members share and train parameters, where ``option`` needs members that can be trained apart."""
    if shared := shared_params(state):
        why = f"{option} takes members apart, but they share '{next(iter(shared))}', which they train together"
        raise StateError(f"{why}; leave out {option}, or shared_params")


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
        raise HyperparameterError(f"weights is {list(weight.shape)} for {count} models; give one each, or [M, M]")
    rows = weight.double().expand(count, count)
    if not bool((rows.isfinite() & (rows >= 0)).all()) or not bool((rows.sum(1) > 0).all()):
        raise HyperparameterError("weights must be finite, not negative, and more than 0 in sum")
    rows = rows / rows.sum(1, keepdim=True)

    def mixed(leaf: Tensor) -> Tensor:
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        # PyTorch promotes no type of one byte.
        kind = torch.promote_types(leaf.dtype, torch.float32) if leaf.dtype.itemsize > 1 else torch.float32
        share, flat = rows.to(leaf.device, kind), leaf.reshape(count, -1).to(kind)
        finite = flat.isfinite()
        # A weight of 0 times infinity would be NaN.
        spoilt = (share != 0).to(kind) @ (~finite).to(kind) != 0
        return torch.where(spoilt, torch.nan, share @ torch.where(finite, flat, 0)).to(leaf.dtype).reshape(leaf.shape)

    return tree_map(mixed, tree)


def mixing(groups: Tensor | Sequence[int], weights: Tensor | Sequence[float] | None = None) -> Tensor:
    """Groups that average among each other as weights ``[M, M]`` for :func:`average`.

    Args:
        groups: ``[M]`` integers: members with the same number are a group; those with -1 are away and keep what they have.
        weights: ``[M]``, such as numbers of rows; equal by default. A group whose weights are all 0 keeps what it has.

    Raises:
        HyperparameterError: if there is not one weight per member.

    Example:
        >>> mixing([0, 0, -1])
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]], dtype=torch.float64)
    """
    labels = torch.as_tensor(groups)
    weight = torch.ones(len(labels)) if weights is None else torch.as_tensor(weights, device=labels.device)
    together = (labels[:, None] == labels) & (labels >= 0)
    shares = torch.where(together, weight.double(), 0.0)
    # Of itself alone, a member keeps what it has.
    return torch.where((shares == 0).all(1)[:, None], torch.eye(len(labels), device=labels.device), shares)
