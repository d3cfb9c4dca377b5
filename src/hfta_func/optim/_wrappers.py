"""Transformations around others: gradient accumulation, parameter averages, parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func._torch import can_look
from hfta_func._tree import per_model, where
from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs, apply_updates, in_place, zero_count


class AccumulateState(NamedTuple):
    """Gradients that each member has gathered, how many it gathers, their mean so far, and the optimizer's state."""

    seen: Tensor
    hyperparams: dict[str, Any]
    grads: Params
    inner: Any


def accumulate(optimizer: GradientTransformation, every: PerModel) -> GradientTransformation:
    """Update once for every ``every`` gradients, with their mean: batches that many times as large.

    Between two updates of a member its parameters, and the state of its optimizer, stay as they are.

    Args:
        optimizer: What updates.
        every: How many gradients, at least 1.

    Example:
        >>> optimizer = accumulate(sgd(lr=1.0), every=[1, 2])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": torch.ones(2, 1)}, state, params)
        >>> updates["w"].flatten() + 0.0
        tensor([-1.,  0.])
        >>> updates, state = optimizer.update({"w": torch.full((2, 1), 3.0)}, state, params)
        >>> updates["w"].flatten()
        tensor([-3., -2.])
    """
    knobs = Knobs(every=every)

    def init(params: Params) -> AccumulateState:
        zeros = {path: torch.zeros_like(param) for path, param in params.items()}
        return AccumulateState(zero_count(params), knobs.init(params), zeros, optimizer.init(params))

    def update(grads: Params, state: AccumulateState, params: Params) -> tuple[Params, AccumulateState]:
        seen = state.seen + 1
        share = 1 / seen
        mean = {path: torch.lerp(state.grads[path], grad, per_model(share, grad)) for path, grad in grads.items()}
        due = seen >= knobs.at(state.hyperparams, state.seen)["every"]
        nothing = {path: torch.zeros_like(grad) for path, grad in grads.items()}
        if can_look(due) and not bool(due.any()):
            return nothing, AccumulateState(seen, state.hyperparams, mean, state.inner)
        updates, inner = optimizer.update(mean, state.inner, params)
        updates, inner, mean, seen = where(
            due, (updates, inner, nothing, torch.zeros_like(seen)), (nothing, state.inner, mean, seen)
        )
        return updates, AccumulateState(seen, state.hyperparams, mean, inner)

    return GradientTransformation(init, update)


class EmaState(NamedTuple):
    """Updates made by each member, its decay, and the average of its parameters."""

    step: Tensor
    hyperparams: dict[str, Any]
    average: Params


def ema(decay: PerModel = 0.999) -> GradientTransformation:
    """Keep an exponential moving average of the parameters, in ``opt_state[-1].average``; updates pass unchanged.

    Stands last in a :func:`chain`, since it averages what the updates lead to. The first average is what the first update
    leads to; from then on ``a = decay * a + (1 - decay) * p``, as ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn`` computes it.

    Args:
        decay: Weight of the average so far.

    Example:
        >>> optimizer = chain(sgd(lr=1.0), ema(decay=[0.0, 0.5]))
        >>> params = {"w": torch.zeros(2, 1)}
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update({"w": torch.ones(2, 1)}, state, params)
        ...     params = apply_updates(params, updates)
        >>> state[-1].average["w"].flatten()
        tensor([-2.0000, -1.5000])

    References:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30(4), 1992.
    """
    knobs = Knobs(decay=decay)

    def init(params: Params) -> EmaState:
        return EmaState(zero_count(params), knobs.init(params), {path: param.clone() for path, param in params.items()})

    def update(updates: Params, state: EmaState, params: Params) -> tuple[Params, EmaState]:
        decay = knobs.at(state.hyperparams, state.step)["decay"]
        share = torch.where(state.step == 0, 1.0, 1 - decay)
        average = {
            path: torch.lerp(state.average[path], param, per_model(share, param))
            for path, param in apply_updates(params, updates).items()
        }
        return updates, EmaState(state.step + 1, state.hyperparams, average)

    return GradientTransformation(init, update)


class PartitionState(NamedTuple):
    """The state of each group's optimizer."""

    groups: dict[str, Any]


def partition(
    label: Callable[[str, torch.Size], str | None] | Mapping[str, str | None],
    groups: Mapping[str, GradientTransformation],
) -> GradientTransformation:
    """An optimizer for each group of parameters; parameters of no group are frozen.

    :func:`with_hyperparams` names a group's hyperparameters ``"group.lr"``, and those of all groups that have it ``lr``.

    Args:
        label: ``label(path, shape)`` of one model's parameter is the name of its group, or None. Or a mapping from paths
            of modules and parameters to names, of which the longest that fits decides; ``""`` fits all.
        groups: The optimizers by name.

    Raises:
        HyperparameterError: at a name without an optimizer, an optimizer without parameters, or a parameter that a mapping
            does not speak of.

    Example:
        >>> optimizer = partition({"": "body", "head": "head", "embed": None}, {"body": sgd(lr=0.1), "head": sgd(lr=1.0)})
        >>> params = {"embed.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2, 1), "body.bias": torch.zeros(2, 1)}
        >>> grads = {path: torch.ones(2, 1) for path in params}
        >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
        >>> {path: update.sum().item() for path, update in updates.items()}
        {'embed.weight': 0.0, 'head.bias': -2.0, 'body.bias': -0.20000000298023224}
    """

    def members(params: Params) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in groups}
        for path, param in params.items():
            name = _longest(label, path) if isinstance(label, Mapping) else label(path, param.shape[1:])
            if name is None:
                continue
            if name not in found:
                raise HyperparameterError(f"'{path}' belongs to '{name}', but the groups are {', '.join(groups)}")
            found[name].append(path)
        empty = [name for name, paths in found.items() if not paths]
        if empty:
            raise HyperparameterError(
                f"group '{empty[0]}' has no parameters; leave it out, or label some of {[*params]}"
            )
        return found

    def init(params: Params) -> PartitionState:
        return PartitionState(
            {name: groups[name].init({path: params[path] for path in paths}) for name, paths in members(params).items()}
        )

    def update(grads: Params, state: PartitionState, params: Params) -> tuple[Params, PartitionState]:
        updates, states = {}, {}
        for name, paths in members(params).items():
            own, values = ({path: tree[path] for path in paths} for tree in (grads, params))
            new, states[name] = groups[name].update(own, state.groups[name], values)
            updates.update(new)
        frozen = {path: torch.zeros_like(grad) for path, grad in grads.items() if path not in updates}
        return {path: updates[path] if path in updates else frozen[path] for path in grads}, PartitionState(states)

    def update_(grads: Params, state: PartitionState, params: Params, keep: Tensor | None, apply: bool, /) -> Params:
        updates = {}
        for name, paths in members(params).items():
            own, values = ({path: tree[path] for path in paths} for tree in (grads, params))
            updates.update(in_place(groups[name])(own, state.groups[name], values, keep, apply))
        return {path: updates[path] if path in updates else grad.zero_() for path, grad in grads.items()}

    return GradientTransformation(init, update, update_)


def _longest(labels: Mapping[str, str | None], path: str) -> str | None:
    fitting = [name for name in labels if not name or path == name or path.startswith(f"{name}.")]
    if not fitting:
        raise HyperparameterError(f"'{path}' is in no group; name it, or all others with '', and None to freeze")
    return labels[max(fitting, key=len)]
