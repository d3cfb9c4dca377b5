"""Metrics of an array over data after every epoch."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch import original
from hfta_func._tree import leaves, per_model, take
from hfta_func._types import BatchError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Metrics
from hfta_func.step.batch import leaf_dims, plain
from hfta_func.step.evaluate import EvalStep, eval_step_like
from hfta_func.step.gradients import num_positional
from hfta_func.step.state import TrainState

Evaluate = Callable[[TrainState], Metrics] | tuple[Callable[..., Any], Any] | tuple[Callable[..., Any], Any, Any]
"""What :func:`fit` takes as ``evaluate``."""


def make_evaluation(step: Any, evaluate: Evaluate | None, state: Any) -> Callable[[TrainState], Metrics] | None:
    """A function of the state for what :func:`fit` takes as ``evaluate``.

    Raises:
        ValueError: if it is none of these, or the metric needs a model and the step has none.
        HyperparameterError: if there is not one list of rows per member.
    """
    if isinstance(evaluate, types.FunctionType) and num_positional(evaluate) > 1:
        raise ValueError(f"evaluate is a function of a model and a batch; pass data, too: ({evaluate.__name__}, data)")
    if evaluate is None or callable(evaluate):
        return evaluate
    if not isinstance(evaluate, tuple) or len(evaluate) not in (2, 3) or not callable(evaluate[0]):
        raise ValueError(
            f"evaluate is a {type(evaluate).__qualname__}; pass a pair (metric, data) of a function metric(model, batch) and "
            f"its data, with rows (metric, data, rows), or a function of the state"
        )
    metric, data, *rows = evaluate
    if rows:
        data = ArrayLoader(data, len(leaves(data)[0]), seeds=state.keys, rows=rows[0])
    own = isinstance(data, ArrayLoader) and not data.shared
    dims = 0 if own else metric.options.batch_dims if isinstance(metric, EvalStep) else None
    return Evaluation(eval_step_like(metric, original(step), dims), data)


class Evaluation:
    """``evaluation(state)``: every member's metrics over data, means over its batches weighted by their rows.

    Args:
        step: The evaluation step.
        data: One batch, as a tree of tensors; an :class:`ArrayLoader`; or an iterable over batches.
    """

    def __init__(self, step: EvalStep, data: Any):
        self._step, self._data = step, data

    def follow(self, positions: list[int], keys: Tensor) -> Evaluation:
        """The evaluation of members that were at ``positions`` before, -1 for new ones."""
        own = isinstance(self._data, ArrayLoader)
        return Evaluation(self._step, self._data.follow(positions, keys, [0] * len(keys))) if own else self

    def __call__(self, state: TrainState) -> Metrics:
        """The metrics of every member.

        Raises:
            BatchError: if a member has no rows.
        """
        members_only = state._replace(opt_state=())
        parts = [
            (
                members,
                self._rows_in(batch),
                self._step(state if members is None else take(members_only, members), batch),
            )
            for members, batch in self._batches()
        ]
        if len(parts) == 1 and parts[0][0] is None and parts[0][1]:
            return parts[0][2]
        rows, totals = torch.zeros(len(state.keys), dtype=torch.float64, device=state.keys.device), {}
        for members, size, metrics in parts:
            chosen = slice(None) if members is None else members.to(rows.device)
            rows[chosen] += size
            for name, value in metrics.items():
                value = value if value.is_floating_point() else value.double()
                total = totals.setdefault(name, value.new_zeros(len(rows), *value.shape[1:]))
                total[chosen] += size * value
        if not bool(rows.all()):
            raise BatchError(
                f"model {int((rows == 0).nonzero()[0])} has no row to evaluate; pass data with rows, or a loader that can be "
                f"iterated over in every epoch, such as a list"
            )
        return {name: total / per_model(rows, total) for name, total in totals.items()}

    def _batches(self) -> Iterator[tuple[Tensor | None, Any]]:
        """Batches, and the members that see them, None for all."""
        data = self._data
        if isinstance(data, ArrayLoader):
            yield from data.once()
        elif is_batch(data):
            yield None, data
        else:
            yield from ((None, batch) for batch in data)

    def _rows_in(self, batch: Any) -> int:
        tree = plain(batch)
        dims = optree.tree_leaves(leaf_dims(self._step.options.batch_dims, tree), none_is_leaf=True)
        for leaf, dim in zip(optree.tree_leaves(tree, none_is_leaf=True), dims, strict=True):
            if isinstance(leaf, Tensor) and leaf.dim() > (axis := 0 if dim is None else 1):
                return leaf.shape[axis]
        return 1


def is_batch(data: Any) -> bool:
    """Whether data is one batch, and not an iterable over batches."""
    listed = isinstance(data, list) and len(data) > 0 and all(isinstance(part, Tensor) for part in data)
    return listed or isinstance(data, Tensor | Mapping | tuple) or not isinstance(data, Iterable)
