"""Types used throughout the package, and what all rooms need: optional packages, directions, tables of text."""

from __future__ import annotations

import functools
import html
import importlib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

from hfta_func.errors import HyperparameterError

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

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        value = make(*args, **kwargs)
        _function(value).recipe = made, args, kwargs, _parts(value)
        return value

    return made


def recipe(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``value.__reduce__`` returns: the call that made it, else its class and its parts."""
    make, args, kwargs, parts = getattr(_function(value), "recipe", (None, (), {}, ()))
    # A value of a user's own may hold a function that a constructor made for another value.
    if make is None or any(part is not other for part, other in zip(_parts(value), parts, strict=True)):
        return type(value), _parts(value)
    return functools.partial(make, **kwargs), args


_short = reprlib.Repr()
_short.maxother = 120


def call_text(value: Any) -> str:
    """The call that made a value, or its class and parts, in short: for its ``__repr__``.

    Example:
        >>> call_text(Schedule({"value": 0.1}, lambda count, value: value))
        "Schedule({'value': 0.1}, <function <lambda> at ...>)"
    """
    make, args = recipe(value)
    kwargs = make.keywords if isinstance(make, functools.partial) else {}
    shown = [*map(_short.repr, args), *(f"{name}={_short.repr(each)}" for name, each in kwargs.items())]
    return f"{getattr(getattr(make, 'func', make), '__name__', make)}({', '.join(shown)})"


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value.knobs, value.value)


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
        return recipe(self)

    def __repr__(self) -> str:
        return call_text(self)


PerModel: TypeAlias = "float | Sequence[float] | Tensor | Schedule"
"""One value for all members, one value per member, or a schedule."""

HPARAMS = "hparams"
HYPERPARAMS = ("hyperparams", HPARAMS)
"""State fields that hold hyperparameters: of an optimizer or loss scale, and of the loss function."""


ROWS = ":rows"
"""A metric with this after the name of another holds the rows that the other is a sum over; runs record their ratio."""


Direction: TypeAlias = Literal["minimize", "maximize"]
"""Whether small or large values of a metric are better."""

SIGNS: Mapping[Direction, int] = {"minimize": 1, "maximize": -1}
"""What a metric is multiplied by so that smaller is better."""


def direction_of(mode: str) -> Direction:
    """The direction that PyTorch calls ``"min"`` or ``"max"``; raises a HyperparameterError if ``mode`` is neither."""
    directions: dict[str, Direction] = {"min": "minimize", "max": "maximize"}
    if mode not in directions:
        raise HyperparameterError(f"mode is {mode!r}; it must be 'min' or 'max'")
    return directions[mode]


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package; an ImportError names the extra of this package that installs it."""
    try:
        importlib.import_module(module.partition(".")[0])
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error.name or module} is not installed; pip install 'hfta_func[{extra}]'") from error


def check_counts(**counts: Any) -> None:
    """Raise a ValueError unless arguments, by their names, are integers of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; give an integer of at least 1")


def text_table(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Rows of cells as lines of text; ``sides`` has ``"<"`` or ``">"``, where its cells are aligned, for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first one of headings, as a table for notebooks; pictures stay as they are."""
    lines = []
    for number, row in enumerate(rows):
        kind = "td" if number else "th"
        cells = (cell if cell.startswith("<svg ") else html.escape(cell) for cell in row)
        lines.append(f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def sparkline(values: Sequence[float]) -> str:
    """A small picture of a line through the values that are finite."""
    points = [(at, value) for at, value in enumerate(values) if math.isfinite(value)] or [(0, 0.0)]
    low, high = min(value for _, value in points), max(value for _, value in points)
    places = [(2 + 96 * x / max(1, len(values) - 1), 18 - 16 * (y - low) / ((high - low) or 1)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<svg width="100" height="20"><polyline fill="none" stroke="#0072B2" stroke-width="1.5" points="{line}"/></svg>'
