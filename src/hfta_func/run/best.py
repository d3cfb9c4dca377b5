"""The best epoch of each member of a run."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._tree import concat, leaves, take, tree_map, where
from hfta_func._types import SIGNS, direction_of
from hfta_func.errors import CheckpointError, HyperparameterError
from hfta_func.run.history import History, Mode, present
from hfta_func.step.state import TrainState


def is_better(value: Tensor, best: Tensor, sign: int) -> Tensor:
    """Where ``value`` is better than ``best``; NaN is never better, and anything else is better than NaN."""
    return ~value.isnan() & ~(sign * value >= sign * best)


class Best:
    """The state of each member after its own best epoch, by the name of a metric, or a pair of it and its mode."""

    def __init__(self, metric: str | tuple[str, Mode]):
        if not isinstance(metric, str) and not (isinstance(metric, tuple | list) and len(metric) == 2):
            raise HyperparameterError(f"restore_best is {metric!r}; pass a metric, or a pair of one and 'max'")
        self._metric, mode = (metric, "min") if isinstance(metric, str) else metric
        self._sign = SIGNS[direction_of(mode)]
        self._state: Any = None
        self._value = torch.empty(0)

    def note(self, state: TrainState, history: History) -> None:
        """Keep the members whose last epoch was their best."""
        value = present(history, self._metric)[-1].double()
        if self._state is None:
            # Copies, because a step with donate=True writes the state.
            self._state, self._value = tree_map(torch.clone, state), value
            return
        better = is_better(value, self._value, self._sign)
        self._state = where(better.to(state.active.device), state, self._state)
        self._value = torch.where(better, value, self._value)

    def follow(self, positions: list[int], state: TrainState) -> None:
        """Go on with the members of ``state``, which were at ``positions`` before; -1 for new ones."""
        if self._state is not None:
            members = [
                len(self._value) + number if position < 0 else position for number, position in enumerate(positions)
            ]
            self._state = take(concat([self._state, state]), members)
            self._value = torch.cat([self._value, self._value.new_full((len(positions),), torch.nan)])[members]

    def restored(self, state: TrainState) -> TrainState:
        """The members as of their best epochs; who is active stays as it is."""
        return state if self._state is None else self._state._replace(active=state.active)

    def state_dict(self) -> dict[str, Any] | None:
        """Value and tensors of the best epochs."""
        return None if self._state is None else {"value": self._value, "leaves": leaves(self._state)}

    def load_state_dict(self, held: Any, like: TrainState) -> None:
        """Restore what :meth:`state_dict` returned."""
        if held is None:
            return
        expected = leaves(like)
        if [leaf.shape[1:] for leaf in held["leaves"]] != [leaf.shape[1:] for leaf in expected]:
            raise CheckpointError(
                "the best epochs in the file are not those of this state; start again with another file"
            )
        moved = [leaf.to(to.device, to.dtype) for leaf, to in zip(held["leaves"], expected, strict=True)]
        structure = optree.tree_structure(like)  # pyright: ignore[reportArgumentType]
        self._state, self._value = optree.tree_unflatten(structure, moved), held["value"]
