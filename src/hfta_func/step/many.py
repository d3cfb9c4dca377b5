"""Several steps in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import Compiled
from hfta_func._tree import leaves, tree_map, write
from hfta_func._types import BatchError, Tree
from hfta_func.calls.scan import scan
from hfta_func.step.batch import plain, restored
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState


class ManySteps(Compiled):
    """``many(state, batches) -> (state, metrics)``, see :attr:`TrainStep.many`."""

    def __init__(self, step: Any):
        self._step = step

    def __reduce__(self) -> Any:
        return ManySteps, (self._step,)

    @property
    def options(self) -> Options:
        """Those of the step."""
        return self._step.options

    @property
    def base(self) -> dict[str, Tensor]:
        """What all members share."""
        return self._step.base

    def __call__(self, state: TrainState, batches: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """Take a step with each batch in turn.

        Args:
            state: The state before the first one.
            batches: Batches stacked along a new first axis: every leaf ``[K, M, N, ...]``, or ``[K, N, ...]`` of what members
                share.

        Returns:
            The state after the last one, and the metrics of all, each ``[K, M, ...]``.

        Raises:
            BatchError: if the leaves do not have the same number of batches.
            Exception: what the step raises.
        """
        tree = plain(batches)
        counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves(tree)}
        if len(counts) != 1 or 0 in counts:
            raise BatchError(
                f"the batches have {sorted(counts)} as their first axes; stack as many batches in every leaf, [K, M, N, ...]"
            )

        def take_step(state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
            return step(state, restored(batch, batches))

        step = self._step
        if not torch.compiler.is_dynamo_compiling():
            return scan(take_step, state, tree)
        # In a graph, what a loop carries can neither be written nor looked at.
        step, gradients = step.without_donating, self._step._gradients
        first = restored(tree_map(lambda leaf: leaf[0], tree), batches)
        gradients.members.rehearse(gradients.tensors(state), first)
        after, metrics = scan(take_step, state, tree)
        if not self.options.donate:
            return after, metrics
        write(state, after)
        return state, metrics
