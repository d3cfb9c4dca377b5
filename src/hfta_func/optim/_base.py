"""The contract of a functional optimizer and its hyperparameters.

The contract has optax's shape: ``init(params) -> opt_state`` and ``update(grads, opt_state, params) -> (updates,
opt_state)``, all over stacked leaves ``[M, ...]``. Every scalar is one number per member and lives in the state, so that
changing it is changing data. Scalars are float64: bias corrections such as ``1 - beta ** t`` cancel badly in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func._torch import inside_transform
from hfta_func._tree import num_models, per_model, write
from hfta_func._types import Params, PerModel, Schedule, Tree


class Update(Protocol):
    """``update(grads, opt_state, params) -> (updates, opt_state)``."""

    def __call__(self, grads: Params, opt_state: Tree, params: Params, /) -> tuple[Params, Tree]: ...


class UpdateInPlace(Protocol):
    """``update_(grads, opt_state, params, keep, apply) -> updates``, which writes what it was given.

    The new state goes into ``opt_state``, the updates into ``grads`` or, with ``apply``, added to ``params``. Members
    where ``keep`` (``bool[M]``) is False keep state and parameters; None keeps no member back.
    """

    def __call__(
        self, grads: Params, opt_state: Tree, params: Params, keep: Tensor | None, apply: bool, /
    ) -> Params: ...


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: a pair of pure functions over stacked leaves.

    Args:
        init: ``init(params) -> opt_state``.
        update: ``update(grads, opt_state, params) -> (updates, opt_state)``.
        update_: The same in place, if there is a better way to it than to copy what ``update`` returns.
    """

    init: Callable[[Params], Tree]
    update: Update
    update_: UpdateInPlace | None = None


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
    """One update in place: what ``optimizer.update`` and :func:`apply_updates` compute, written into what is given.

    Saves the memory of a second state, and on a CPU more than half of the time of an update of large models.

    Args:
        optimizer: Any optimizer.
        grads: Gradients by path, which may be overwritten too.
        opt_state: The optimizer's state, which becomes the next one.
        params: Parameters by path, which are updated.
        keep: ``bool[M]``; members where it is False keep state and parameters as they are.

    Example:
        >>> from hfta_func import sgd
        >>> optimizer, params = sgd(lr=[0.1, 1.0]), {"w": torch.ones(2, 1)}
        >>> update_(optimizer, {"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> params["w"].flatten()
        tensor([0.9000, 0.0000])
    """
    in_place(optimizer)(grads, opt_state, params, keep, True)


def in_place(transformation: GradientTransformation) -> UpdateInPlace:
    """How a transformation updates in place; compilers and transforms know only how it makes new tensors."""

    def copied(grads: Params, opt_state: Tree, params: Params, keep: Tensor | None, apply: bool, /) -> Params:
        updates, new = transformation.update(grads, opt_state, params)
        write(opt_state, new, keep)
        if apply:
            write(params, apply_updates(params, updates), keep)
        return updates

    compiled = torch.compiler.is_compiling() or inside_transform()
    return copied if compiled else transformation.update_ or copied


class Knobs:
    """The hyperparameters of one transformation: given once, kept in its state, read at each update.

    Args:
        specs: Each a number, one number per member, or a schedule.

    Raises:
        HyperparameterError: if a number is NaN or out of the range that its name stands for.
    """

    def __init__(self, **specs: PerModel):
        self.specs = specs
        for name, spec in specs.items():
            _check(name, spec)

    def __contains__(self, name: str) -> bool:
        return name in self.specs

    def without_zeros(self, *names: str) -> Knobs:
        """The same without those of ``names`` that are the plain number 0, so that their terms need not be computed."""
        off = {name for name in names if isinstance(self.specs[name], int | float) and self.specs[name] == 0}
        return Knobs(**{name: spec for name, spec in self.specs.items() if name not in off})

    def init(self, params: Params) -> dict[str, Any]:
        """Vectors ``float64[M]`` to keep in the state; raises if one has another length than M."""
        count, device = num_models(params), next(iter(params.values())).device
        return {name: _vector(name, spec, count, device) for name, spec in self.specs.items()}

    def at(self, held: Mapping[str, Any], count: Tensor) -> dict[str, Tensor]:
        """The values after ``count`` updates of each member."""
        values = {name: _read(spec, held[name], count) for name, spec in self.specs.items()}
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != count.shape:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__qualname__
                raise HyperparameterError(
                    f"the schedule of {name} returned {got}, not one number per model {list(count.shape)}; compute it from "
                    f"the count, which is {list(count.shape)}"
                )
        return values


class Shaped:
    """Vectors ``[M]`` shaped to broadcast over leaves ``[M, ...]``, once for each dtype and number of axes."""

    def __init__(self, values: Mapping[str, Tensor]):
        self._values = values
        self._stacked: dict[torch.dtype, dict[str, Tensor]] = {}
        self._shaped: dict[tuple[torch.dtype, int], dict[str, Tensor]] = {}

    def like(self, leaf: Tensor) -> dict[str, Tensor]:
        """The values in the leaf's dtype and number of axes."""
        key = (leaf.dtype, leaf.dim())
        if leaf.dtype not in self._stacked:
            # In one tensor, so that the compiler computes them once and not for every element of every leaf.
            columns = torch.stack([value.to(leaf.dtype) for value in self._values.values()]).unbind()
            self._stacked[leaf.dtype] = dict(zip(self._values, columns, strict=True))
        if key not in self._shaped:
            self._shaped[key] = {name: per_model(value, leaf) for name, value in self._stacked[leaf.dtype].items()}
        return self._shaped[key]


def zero_count(params: Params) -> Tensor:
    """No updates made yet: ``int64[M]``."""
    return torch.zeros(num_models(params), dtype=torch.int64, device=next(iter(params.values())).device)


def per_member(name: str, spec: Any, count: int, device: torch.device) -> Tensor:
    """A plain hyperparameter as ``float64[M]``; raises if it is out of range or has another length than M."""
    _check(name, spec)
    return _vector(name, spec, count, device)


# Closed below, open above.
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0.0, math.inf),
    "momentum": (0.0, math.inf),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "rho": (0.0, 1.0),
    "alpha": (0.0, 1.0),
    "eps": (0.0, math.inf),
    "momentum_decay": (0.0, math.inf),
    "lr_decay": (0.0, math.inf),
    "initial_accumulator_value": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "init_scale": (5e-324, math.inf),
    "growth_factor": (1.0, math.inf),
    "backoff_factor": (5e-324, 1.0 + 2**-52),
    "growth_interval": (1.0, math.inf),
    "max_norm": (5e-324, math.inf),
    "clip_value": (5e-324, math.inf),
    "every": (1.0, math.inf),
    "decay": (0.0, 1.0),
    "step_size": (5e-324, math.inf),
    "T_max": (5e-324, math.inf),
    "T_0": (5e-324, math.inf),
    "T_mult": (1.0, math.inf),
    "total_iters": (5e-324, math.inf),
    "total_steps": (5e-324, math.inf),
    "div_factor": (5e-324, math.inf),
    "final_div_factor": (5e-324, math.inf),
    "pct_start": (0.0, 1.0),
    "steps": (5e-324, math.inf),
}


def _check(name: str, spec: Any) -> None:
    """Raise unless every number is allowed for its name; the length is checked where M is known."""
    if isinstance(spec, Schedule):
        first = next(iter(spec.knobs))
        for knob, inner in spec.knobs.items():
            # The first knob is the value itself at some point of the schedule.
            _check(name if knob == first else knob, inner)
        return
    values = torch.as_tensor(spec, dtype=torch.float64)
    if values.dim() > 1:
        raise HyperparameterError(f"{name} has shape {list(values.shape)}; give one number, or one per model")
    low, high = _RANGES.get(name, (-math.inf, math.inf))
    for member, value in enumerate(values.reshape(-1).tolist()):
        if not (math.isfinite(value) and low <= value < high):
            where = f"model {member}: " if values.dim() else ""
            need = f"at least {low:g} and below {high:g}" if low > -math.inf else "a finite number"
            need = "positive" if low == 5e-324 else need
            raise HyperparameterError(f"{where}{name} is {value}; it must be {need}")


def _vector(name: str, spec: Any, count: int, device: torch.device) -> Any:
    if isinstance(spec, Schedule):
        first = next(iter(spec.knobs))
        return {
            knob: _vector(name if knob == first else knob, inner, count, device) for knob, inner in spec.knobs.items()
        }
    if device.type == "meta":
        # Only the structure of the state is asked for, whatever M is.
        return torch.empty(count, dtype=torch.float64, device=device)
    values = torch.as_tensor(spec, dtype=torch.float64).to(device)
    if values.dim() and values.shape[0] != count:
        raise HyperparameterError(
            f"{name} has {values.shape[0]} values but the array has {count} models; give one number, or one per model"
        )
    return values.expand(count).clone()


def _read(spec: Any, held: Any, count: Tensor) -> Tensor:
    if not isinstance(spec, Schedule):
        return held
    knobs: dict[str, Any] = {}
    for knob, inner in spec.knobs.items():
        if isinstance(inner, Schedule):
            # A schedule within a schedule is a function of the count that the outer one chooses.
            knobs[knob] = lambda at, inner=inner, knob=knob: _read(inner, held[knob], at)
        else:
            knobs[knob] = held[knob]
    return spec.value(count, **knobs)
