"""Everything that training changes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hfta_func._types import Params, Tree


class TrainState(NamedTuple):
    """Everything that training changes, for M members; every leaf is ``[M, ...]``.

    Args:
        params: Parameters by path, including frozen ones.
        buffers: Buffers by path.
        opt_state: The optimizer's state, including its hyperparameters.
        keys: ``int64[M]``, the members' seeds.
        step: ``int64[M]``, the number of batches each member has seen; together with the key it determines a step's noise.
        hparams: The members' own numbers for the loss function, ``[M]`` each.
        active: ``bool[M]``; inactive members stay exactly as they are.
        loss_scale: The members' loss scales, or ``()`` without loss scaling.
    """

    params: Params
    buffers: Params
    opt_state: Tree
    keys: Tensor
    step: Tensor
    hparams: Params
    active: Tensor
    loss_scale: Tree = ()
