"""Steps whose batches mix the rows of all members: each row comes with the number of its member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import can_look
from hfta_func._tree import leaves, per_model, tree_map, where
from hfta_func._types import Tree
from hfta_func.errors import BatchError, LossError, StateError
from hfta_func.optim import GradientTransformation
from hfta_func.step.batch import over, plain, restored
from hfta_func.step.gradients import Gradients, StepOutputs
from hfta_func.step.options import Options
from hfta_func.step.state import Taken, TrainState
from hfta_func.step.train import TrainStep
from hfta_func.verify import Trial

# Negative, as all numbers are that this package folds into the keys of a state.
ROWS = -(2**62) - 2**60


def by_index(step: TrainStep) -> TrainStep:
    """A step for batches of rows that belong to different members, as those of requests to many adapters over one base.

    ``step(state, (rows, index))`` or ``step(state, (rows, (index, weights)))``: ``index`` has the number of each row's member
    in the state. Each row passes what members share once, and its member's own parameters, without padding. A member's
    loss is the mean of the loss function over its rows, each a batch of one row; its metrics are means, too, or, of
    integers, sums. A member without a row stays as it is: its metrics are NaN and its ``metrics["rows"]`` 0.

    Args:
        step: The step for batches ``[M, N, ...]``, whose loss and options it has; parameters are read once for each row,
            so those that are large belong to the base, ``share_frozen=True``.

    Raises:
        ValueError: if the step has ``shared_params``, ``carry``, ``collect``, an optimizer that searches or a look-up table
            with ``max_norm``.

    Example:
        >>> trunk = torch.nn.Linear(4, 8).requires_grad_(False)
        >>> models = [torch.nn.Sequential(trunk, torch.nn.Linear(8, 1)) for _ in range(3)]
        >>> loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> step = by_index(make_train_step(models[0], loss, adam(lr=0.01), share_frozen=True))
        >>> state = step.init(*stack_params(models, share_frozen=True), seeds=[0, 1, 2])
        >>> rows, index = (torch.randn(5, 4), torch.randn(5, 1)), torch.tensor([2, 0, 2, 2, 0])
        >>> state, metrics = step(state, (rows, index))
        >>> metrics["rows"], state.step
        (tensor([2, 0, 3]), tensor([1, 0, 1]))
    """
    return IndexedStep(*step._made_from)


def _mixed(batch: Any) -> tuple[Tree, Tensor, Tensor]:
    """The rows of a batch, the members that they belong to, and weights; raises a BatchError if it has other parts."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BatchError("a batch of a step by_index is (rows, index), such as ((inputs, targets), index)")
    rows, index = batch
    index, weights = index if isinstance(index, tuple | list) else (index, torch.ones_like(index, dtype=torch.float32))
    return rows, index, weights


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """The sum ``[M, ...]`` of the rows ``[rows, ...]`` of each member."""
    # Not a product, since 0 times NaN is NaN.
    return values.new_zeros(count, *values.shape[1:]).index_add(0, index, values)


class IndexedGradients(Gradients):
    """Gradients of members as means over their rows, each of which is computed like a member with its parameters."""

    _latest: StepOutputs | None = None

    def __call__(self, state: TrainState, batch: Tree) -> StepOutputs:
        """Losses, gradients and metrics of every member."""
        (_, index, weights), count = _mixed(batch), len(state.keys)
        members, rows = self._by_row(state, batch)
        outputs = super().__call__(members, rows)
        self._latest = outputs if self.oracle.is_comparing else None

        def joined(values: Tensor) -> Tensor:
            if not (values.is_floating_point() or values.is_complex()):
                return _sums(values.long(), index, count)
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
            weight = per_model(weights, wide)
            total = _sums(weight, index, count)
            return (_sums(wide * weight, index, count) / torch.where(total == 0, 1, total)).to(values.dtype)

        params = {path: state.params[path] for path in outputs.params}
        grads, losses, metrics = tree_map(joined, (outputs.grads, outputs.losses, outputs.metrics))
        return StepOutputs(params, grads, losses, metrics, state.buffers, {})

    def check(self, trial: Trial | None, state: TrainState, batch: Tree, outputs: StepOutputs) -> None:
        """Raise a VerifyError if the first or the last row alone computes something else, in a call that is compared."""
        if trial is not None:
            members, rows = self._by_row(state, batch)
            latest, self._latest = self._latest or super().__call__(members, rows), None
            for path, after in latest.buffers.items():
                if not torch.equal(after, members.buffers[path]):
                    raise StateError(f"a row writes '{path}', which belongs to a member; put its module in eval mode")
            super().check(trial, members, rows, latest)

    def _by_row(self, state: TrainState, batch: Tree) -> tuple[TrainState, Tree]:
        """A state and a batch with a member for each row."""
        rows, index, _ = _mixed(batch)

        def alone(dim: int | None, leaf: Any) -> Any:
            if dim is not None and (leaf.dim() == 0 or len(leaf) != len(index)):
                raise BatchError(f"a part of the batch is {[*leaf.shape]}, but the index is of {len(index)} rows")
            return leaf if dim is None else leaf.unsqueeze(1)

        members = tree_map(lambda leaf: leaf[index], state._replace(opt_state=(), carry=()))
        # The noise of a row depends on its place among its member's rows.
        keys = random.fold_in(members.keys, ROWS - (index[:, None] == index).tril(-1).sum(1))
        return members._replace(keys=keys), restored(over(alone, self.options.batch_dims, plain(rows)), rows)


class IndexedStep(TrainStep):
    """``step(state, (rows, index)) -> (state, metrics)``; made by :func:`by_index`."""

    gradients_class: Callable[..., Gradients] = IndexedGradients

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: GradientTransformation, options: Options
    ):
        # All members share the rows, as far as loaders know.
        super().__init__(model, loss_fn, optimizer, replace(options, batch_dims=options.batch_dims or 0))
        self.batch_dims = None
        known = options.shared_params, leaves(options.carry), options.collect, optimizer.search
        if any(known) or self._gradients.rewrites_params:
            refused = "shared_params, carry, collect, lbfgs or a trained Embedding(max_norm=)"
            raise ValueError(f"by_index takes no step with {refused}")

    def __reduce__(self) -> Any:
        return IndexedStep, self._made_from

    def __call__(self, state: TrainState, batch: Tree = None, *, owned: bool = False) -> Taken:
        """Take one step with every active member that has a row; raises a BatchError if an index is none of a member."""
        (rows, index, weights), count = _mixed(batch), len(state.keys)
        if can_look(index) and bool((wrong := (index < 0) | (index >= count)).any()):
            row, cure = int(wrong.nonzero()[0]), f"give numbers from 0 to {count - 1}"
            raise BatchError(f"index[{row}] is {int(index[row])}, but the array has {count} models; {cure}")
        index = index.long()
        mixed = rows, (index, weights)
        number = _sums(torch.ones_like(index), index, count)
        # A copy, because a step with donate=True writes the state.
        present, before = _sums(weights, index, count) > 0, state.active.clone()
        after, metrics = super().__call__(state._replace(active=before & present), mixed, owned=owned)
        if "rows" in metrics:
            raise LossError("metric 'rows' hides what a step by_index reports; give it another name")
        numbers = {name: value for name, value in metrics.items() if value.is_floating_point()}
        absent = where(present, numbers, tree_map(lambda value: torch.full_like(value, torch.nan), numbers))
        return after._replace(active=torch.where(present, after.active, before)), metrics | absent | {"rows": number}
