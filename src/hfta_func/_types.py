"""Types used throughout the package, and its errors.

Each error also derives from a built-in one, so that ``except ValueError`` and the like keep working.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

Tree: TypeAlias = Any
"""Nested tuples, lists, dicts and NamedTuples with tensors as leaves."""

Params: TypeAlias = dict[str, Tensor]
"""Stacked parameters or buffers by their path in the module; axis 0 is the model axis."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def recorded(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have what a constructor makes be pickled as the call that made it, since its own functions have no names to find.

    The call is noted on a function that the result holds, see :func:`recipe`.
    """
    function = _function

    def made(*args: Any, **kwargs: Any) -> Any:
        value: Any = make(*args, **kwargs)
        function(value).recipe = public, args, kwargs
        return value

    # With the globals of the constructor's module, by which tools tell where a function is from.
    public = types.FunctionType(made.__code__, make.__globals__, closure=made.__closure__)  # pyright: ignore
    return functools.update_wrapper(public, make)


def recipe(value: Any, *parts: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``value.__reduce__`` returns: the call that made it, else its class and its parts."""
    make, args, kwargs = getattr(_function(value), "recipe", (type(value), parts, {}))
    return functools.partial(make, **kwargs), args


def _function(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value.value


class Shared(NamedTuple):
    """Parameters that all members share and train together, without a model axis.

    Args:
        params: Parameters by path, in the model's own shapes.
        opt_state: The state of their optimizer, which sees them as an array of one.
    """

    params: Params
    opt_state: Tree


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

    def __reduce__(self) -> Any:
        return recipe(self, self.knobs, self.value)


PerModel: TypeAlias = "float | Sequence[float] | Tensor | Schedule"
"""One value for all members, one value per member, or a schedule."""

HPARAMS = "hparams"
HYPERPARAMS = ("hyperparams", HPARAMS)
"""State fields that hold hyperparameters: of an optimizer or loss scale, and of the loss function."""


class HFTAError(Exception):
    """Base class of this package's own errors."""


class StackError(HFTAError, ValueError):
    """Models, trees or members that cannot form one array."""


class HyperparameterError(HFTAError, ValueError):
    """A hyperparameter or seed that is unknown, out of range or of the wrong length."""


class BatchError(HFTAError, ValueError):
    """A batch that does not fit the array."""


class LossError(HFTAError, ValueError):
    """A loss function whose result cannot be minimised per member."""


class StateError(HFTAError, ValueError):
    """A state that belongs to another model, optimizer or step."""


class NonFiniteError(HFTAError, FloatingPointError):
    """A member whose loss or gradient is NaN or infinite, under ``nonfinite="raise"``."""


class CheckpointError(HFTAError, OSError):
    """A file that is not a complete checkpoint, or cannot be written."""


class RandomnessError(HFTAError, RuntimeError):
    """A random call that cannot draw from the member's own key."""


class TraceError(HFTAError, RuntimeError):
    """Model code that reads the value of a tensor while all members run together."""


class WorkerError(HFTAError, RuntimeError):
    """A process that trains a part of an array and cannot go on."""


class CompileWarning(UserWarning):
    """A step that cannot be compiled in the background and goes on eagerly; given once."""


class LoopWarning(UserWarning):
    """Members that run apart: at an operator without a batching rule, or where they branch differently; given once each."""


class VersionWarning(UserWarning):
    """A release of PyTorch newer than those that this package is tested with; given once, at import."""
