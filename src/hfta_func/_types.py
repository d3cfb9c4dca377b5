"""Types used throughout the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

Tree: TypeAlias = Any
"""Nested tuples, lists, dicts and NamedTuples with tensors as leaves."""

Params: TypeAlias = dict[str, Tensor]
"""Stacked parameters or buffers by their path in the module; axis 0 is the model axis."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A hyperparameter that depends on the number of updates made.

    Args:
        knobs: The schedule's own hyperparameters, each a number, one number per model, or another schedule.
            ``with_hyperparams`` replaces the first one when it is given a plain number.
        value: ``value(count, **knobs) -> Tensor[M]``. ``count`` is the number of updates each member has made; plain
            knobs arrive as ``Tensor[M]``, nested schedules as functions of ``count``.
    """

    knobs: Mapping[str, PerModel]
    value: Callable[..., Tensor]


PerModel: TypeAlias = "float | Sequence[float] | Tensor | Schedule"
"""One value for all members, one value per member, or a schedule."""

HPARAMS = "hparams"
HYPERPARAMS = ("hyperparams", HPARAMS)
"""State fields that hold hyperparameters: of an optimizer or loss scale, and of the loss function."""
