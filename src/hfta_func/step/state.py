"""Everything that training changes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hfta_func._types import Params, Shared, StateError, Tree


class TrainState(NamedTuple):
    """Everything that training changes, for M members; every leaf is ``[M, ...]``, except in ``shared``.

    Args:
        params: Parameters by path, including frozen ones.
        buffers: Buffers by path.
        opt_state: The optimizer's state, including its hyperparameters.
        keys: ``int64[M]``, the members' seeds.
        step: ``int64[M]``, the number of batches each member has seen; together with the key it determines a step's noise.
        hparams: The members' own numbers for the loss function, ``[M]`` each.
        active: ``bool[M]``; inactive members stay exactly as they are.
        loss_scale: The members' loss scales, or ``()`` without loss scaling.
        shared: What members share and train together, or ``()`` if the step has no ``shared_params``.
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


def spread_shared(state: Any) -> Params:
    """The parameters of a state or a :class:`Stacked`, ``[M, ...]``; what members share is seen M times, not copied."""
    shared = getattr(state, "shared", ())
    if not isinstance(shared, Shared):
        return state.params
    count = state.keys.shape[0]
    return {**state.params, **{path: param.expand(count, *param.shape) for path, param in shared.params.items()}}


def refuse_shared(state: Any, option: str) -> None:
    """Raise a StateError if members share and train parameters, where ``option`` needs members that can be trained apart."""
    shared = getattr(state, "shared", ())
    if isinstance(shared, Shared):
        raise StateError(
            f"{option} takes members apart, but they share '{next(iter(shared.params))}', which they train together; leave "
            f"out {option}, or shared_params"
        )
