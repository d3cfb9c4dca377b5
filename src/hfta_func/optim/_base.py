"""The contract of a functional optimizer and its hyperparameters.

As in optax: ``init(params) -> opt_state`` and ``update(grads, opt_state, params) -> (updates, opt_state)``, all over
stacked leaves ``[M, ...]``. Every scalar is one number per member and lives in the state, so changing it changes only
data. Scalars are float64, because bias corrections such as ``1 - beta ** t`` lose too many digits in float32.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from hfta_func._torch import inside_transform
from hfta_func._tree import num_models, where, write
from hfta_func._types import Params, PerModel, Schedule, Tree, call_text, recipe
from hfta_func.errors import HyperparameterError

is_padded: ContextVar[bool] = ContextVar("is_padded", default=False)
"""Whether an optimizer's state is made for models of different size, whose parameters are padded."""

Update = Callable[[Params, Tree, Params], tuple[Params, Tree]]
"""``update(grads, opt_state, params) -> (updates, opt_state)``."""

Renew = Callable[[Params, Tree, Params, "Tensor | None", bool, bool], tuple[Params, Tree]]
"""``renew(grads, opt_state, params, keep, donate, apply) -> (params, opt_state)``: a whole update in one call.

Members where ``keep`` (``bool[M]``; None updates all) is False retain their parameters and state. With ``donate`` the results
may be written into the arguments. Without ``apply`` the first result is the updates, and parameters do not change.
"""


class GradientTransformation(NamedTuple):
    """An optimizer or a part of one: a pair of pure functions over stacked leaves.

    Args:
        init: ``init(params) -> opt_state``.
        update: ``update(grads, opt_state, params) -> (updates, opt_state)``.
        renew: A :data:`Renew`, if it is faster than calling ``update`` and applying the result.
        search: ``search(opt_state, params, active)``, of an optimizer that evaluates losses itself, as :func:`lbfgs` does.
    """

    init: Callable[[Params], Tree]
    update: Update
    renew: Renew | None = None
    search: Callable[[Tree, Params, Tensor], Any] | None = None

    def __reduce__(self) -> Any:
        return recipe(self)

    def __repr__(self) -> str:
        return call_text(self)


def by_renew(init: Callable[[Params], Tree], run: Renew) -> GradientTransformation:
    """A transformation whose ``update`` is its :data:`Renew` without writing or applying anything."""

    def update(grads: Params, opt_state: Tree, params: Params) -> tuple[Params, Tree]:
        return run(grads, opt_state, params, None, False, False)

    return GradientTransformation(init, update, run)


def is_of_package(value: GradientTransformation | Schedule, *, closed: bool = False) -> bool:
    """Whether only constructors of this package have made an optimizer and its parts; these draw no random numbers.

    One that is ``closed`` is made of numbers alone, schedules included: it reads only its state.
    """
    make, parts = recipe(value)
    if not (isinstance(make, functools.partial) and (make.func.__module__ or "").startswith("hfta_func.")):
        return False
    kinds, arguments = (GradientTransformation, *([Schedule] if closed else [])), (parts, make.keywords)
    inner = optree.tree_leaves(arguments, is_leaf=lambda part: isinstance(part, kinds))  # pyright: ignore
    return all(
        is_of_package(part, closed=closed) if isinstance(part, kinds) else not (closed and callable(part))
        for part in inner
    )


def check_transformation(name: str, value: Any) -> None:
    """Raise a TypeError unless ``value``, called ``name``, is an optimizer of this package or a part of one."""
    if not isinstance(value, GradientTransformation):
        what = getattr(value, "__qualname__", type(value).__qualname__)
        why = f"{name} is {what}, not a GradientTransformation; call one of hfta_func, e.g. hfta.sgd(lr=0.1)"
        raise TypeError(f"{why}; from_torch makes one of M optimizers of torch.optim")


def apply_updates(params: Params, updates: Params) -> Params:
    """``params + updates``, leaf by leaf.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
    """
    return {path: (param + updates[path]).to(param.dtype) for path, param in params.items()}


def update_(
    optimizer: GradientTransformation, grads: Params, opt_state: Tree, params: Params, keep: Tensor | None = None
) -> None:
    """Run ``optimizer.update`` and :func:`apply_updates` in place.

    This needs no memory for a second state, and on a CPU it takes less than half the time for large models.

    Args:
        optimizer: Any optimizer.
        grads: Gradients by path. They may be overwritten too.
        opt_state: The optimizer's state, overwritten with the next one.
        params: Parameters by path, overwritten with the updated ones.
        keep: ``bool[M]``; members where it is False retain their state and parameters.

    Example:
        >>> from hfta_func import sgd
        >>> optimizer, params = sgd(lr=[0.1, 1.0]), {"w": torch.ones(2, 1)}
        >>> update_(optimizer, {"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> params["w"].flatten()
        tensor([0.9000, 0.0000])
    """
    write((params, opt_state), renew(optimizer, grads, opt_state, params, keep, donate=True))


def renew(
    transformation: GradientTransformation,
    grads: Params,
    opt_state: Tree,
    params: Params,
    keep: Tensor | None = None,
    *,
    donate: bool = False,
    apply: bool = True,
) -> tuple[Params, Tree]:
    """Call a transformation's :data:`Renew`, or do the same with its ``update``.

    Inside transforms ``donate`` has no effect: the caller writes the results at the end.
    """
    donate = donate and not inside_transform()
    if transformation.renew is not None:
        return transformation.renew(grads, opt_state, params, keep, donate, apply)
    updates, new = transformation.update(grads, opt_state, params)
    before, after = ((params, opt_state), (apply_updates(params, updates), new)) if apply else ((opt_state,), (new,))
    if keep is not None:
        after = where(keep, after, before)
    if donate:
        write(before, after)
        after = before
    return (after[0] if apply else updates), after[-1]


class Range(enum.Enum):
    """The values that a hyperparameter may take: ``low <= value < high``, and the same in words."""

    FINITE = -math.inf, math.inf, "a finite number"
    NONNEGATIVE = 0.0, math.inf, "at least 0 and finite"
    NONPOSITIVE = -math.inf, math.ulp(0.0), "at most 0 and finite"
    POSITIVE = math.ulp(0.0), math.inf, "positive and finite"
    AT_LEAST_ONE = 1.0, math.inf, "at least 1 and finite"
    DECAY = 0.0, 1.0, "at least 0 and below 1"
    FACTOR = math.ulp(0.0), 1.0 + math.ulp(1.0), "positive and at most 1"
    ROWS = -math.inf, math.inf, "finite numbers, a row of them per model"


_DEFAULT_RANGES: dict[str, Range] = {
    **dict.fromkeys(("lr", "eps", "eps1", "eps2", "weight_decay", "momentum"), Range.NONNEGATIVE),
    **dict.fromkeys(("beta1", "beta2"), Range.DECAY),
}
"""Ranges of names that many optimizers use, unless an optimizer declares another range."""

_RANGES: dict[type, dict[str, Range]] = {}


def restrict(owner: type, **ranges: Range) -> None:
    """Declare the ranges of an optimizer's hyperparameters; one without a range may be any finite number.

    Args:
        owner: The class of the optimizer's state, by which :func:`with_hyperparams` looks the ranges up; for the
            hyperparameters of schedules, :class:`~hfta_func.schedules.Schedule`.
        ranges: The range of each hyperparameter, by name.

    Example:
        >>> from collections import namedtuple
        >>> from hfta_func.optim.extend import FIELDS, Hyperparams, Range, restrict
        >>> SlowState = namedtuple("SlowState", [*FIELDS, "average"])
        >>> restrict(SlowState, alpha=Range.DECAY)
        >>> Hyperparams(SlowState, lr=0.1, alpha=2.0)
        Traceback (most recent call last):
        hfta_func.errors.HyperparameterError: alpha is 2.0; it must be at least 0 and below 1
    """
    _RANGES.setdefault(owner, {}).update(ranges)


def range_of(owner: type, name: str) -> Range:
    """The range of a hyperparameter of an optimizer whose state is of class ``owner``."""
    return _RANGES.get(owner, {}).get(name) or _DEFAULT_RANGES.get(name, Range.FINITE)


class Hyperparams:
    """The hyperparameters of one transformation: given when it is made, kept in its state, read at each update.

    Args:
        owner: The class of the state, for which :func:`restrict` has declared ranges.
        specs: By name, a number, one number per member, or a schedule.

    Raises:
        HyperparameterError: if a number is NaN or out of its range.
    """

    def __init__(self, owner: type, /, **specs: PerModel):
        self.owner, self.specs = owner, specs
        for name, spec in specs.items():
            _check_spec(name, spec, range_of(owner, name))

    def without_zeros(self, *names: str) -> Hyperparams:
        """The same without each of ``names`` that is the plain number 0, so that its term is not computed."""
        plain = {name for name in names if isinstance(self.specs.get(name), int | float) and self.specs[name] == 0}
        return Hyperparams(self.owner, **{name: spec for name, spec in self.specs.items() if name not in plain})

    def init(self, params: Params) -> dict[str, Any]:
        """Vectors ``float64[M]`` to keep in the state; raises if a length is not M."""
        count, device = num_models(params), next(iter(params.values())).device
        return {name: vector(name, spec, count, device) for name, spec in self.specs.items()}

    def at(self, held: Mapping[str, Any], count: Tensor) -> dict[str, Tensor]:
        """The numbers ``float64[M]`` after ``count`` (``int64[M]``) updates, from the values ``held`` in a state."""
        return {name: _read(spec, held[name], count) for name, spec in self.specs.items()}


def zero_count(params: Params) -> Tensor:
    """The number of updates at the start, ``int64[M]``."""
    return torch.zeros(num_models(params), dtype=torch.int64, device=next(iter(params.values())).device)


def per_member(name: str, spec: Any, count: int, device: torch.device, allowed: Range) -> Tensor:
    """A plain hyperparameter as ``float64[M]``; raises if it is a schedule, out of range, or its length is not M."""
    check(name, spec, allowed)
    return vector(name, spec, count, device)


def _check_spec(name: str, spec: PerModel, allowed: Range) -> None:
    if not isinstance(spec, Schedule):
        return check(name, spec, allowed)
    for inner, label, limits in labelled(name, allowed, spec.knobs):
        _check_spec(label, spec.knobs[inner], limits)


def labelled(name: str, allowed: Range, knobs: Iterable[str]) -> list[tuple[str, str, Range]]:
    """Each hyperparameter of a schedule with its name in errors and its range: the first is the hyperparameter itself."""
    return [(key, key, range_of(Schedule, key)) if at else (key, name, allowed) for at, key in enumerate(knobs)]


_FORMS = "give one number, or one per model"


def check(name: str, spec: Any, allowed: Range) -> None:
    """Raise unless every number is in the range. :func:`vector` checks the length, once M is known."""
    try:
        values = torch.as_tensor(spec, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise HyperparameterError(f"{name} is {spec!r}; {_FORMS}") from None
    if values.dim() > 1 and allowed is not Range.ROWS:
        raise HyperparameterError(f"{name} has shape {list(values.shape)}; {_FORMS}")
    if values.dim() > 1 or (isinstance(spec, Tensor) and (torch.compiler.is_compiling() or inside_transform())):
        return  # rows are many, and a graph or a transform cannot read values
    low, high, words = allowed.value
    for member, value in enumerate(values.reshape(-1).tolist()):
        if not (math.isfinite(value) and low <= value < high):
            where = f"model {member}: " if values.dim() else ""
            raise HyperparameterError(f"{where}{name} is {value}; it must be {words}")


def check_choice(name: str, value: str | None, choices: Collection[str | None]) -> None:
    """Raise unless an option is one of its choices."""
    if value not in choices:
        raise HyperparameterError(f"{name} is {value!r}; it must be {' or '.join(map(repr, choices))}")


def vector(name: str, spec: Any, count: int, device: torch.device) -> Any:
    """One number or row of numbers per member, ``float64[count, ...]``; for a schedule, its hyperparameters by name."""
    if isinstance(spec, Schedule):
        labels = labelled(name, Range.FINITE, spec.knobs)
        return {inner: vector(label, spec.knobs[inner], count, device) for inner, label, _ in labels}
    if device.type == "meta":
        # Only the structure of the state is needed, so the length may differ from M.
        return torch.empty(count, *getattr(spec, "shape", ())[1:], dtype=torch.float64, device=device)
    values = torch.as_tensor(spec, dtype=torch.float64).to(device)
    if values.dim() and values.shape[0] != count:
        raise HyperparameterError(f"{name} has {len(values)} values but the array has {count} models; {_FORMS}")
    return values.expand(count, *values.shape[1:]).clone()


def _read(spec: Any, values: Any, count: Tensor) -> Tensor:
    if not isinstance(spec, Schedule):
        return values
    # The outer schedule chooses the count at which it reads the inner one.
    arguments = {
        name: functools.partial(_read, inner, values[name]) if isinstance(inner, Schedule) else values[name]
        for name, inner in spec.knobs.items()
    }
    return spec.value(count, **arguments)
