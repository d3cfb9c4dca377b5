"""Transformations to combine with optimizers: chains, clipping, weight decay, accumulation, averages, parameter groups."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import can_look
from hfta_func._tree import per_model, where
from hfta_func._types import Params, PerModel, recorded
from hfta_func.errors import HyperparameterError
from hfta_func.optim import _base
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, apply_updates, by_renew, restrict


@recorded
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations in order: the updates of each are the gradients of the next.

    Args:
        transformations: Any number of them, usually with the optimizer last.

    Example:
        >>> optimizer = chain(clip_grad_norm(1.0), sgd(lr=0.1))
        >>> params = {"w": torch.zeros(1, 2)}
        >>> updates, _ = optimizer.update({"w": torch.tensor([[3.0, 4.0]])}, optimizer.init(params), params)
        >>> updates["w"]
        tensor([[-0.0600, -0.0800]])
    """
    if not transformations:
        raise HyperparameterError("a chain has no parts; pass at least one")

    def init(params: Params) -> tuple[Any, ...]:
        return tuple(transformation.init(params) for transformation in transformations)

    def run(grads: Params, state: Any, params: Params, keep: Any, donate: bool, apply: bool) -> tuple[Params, Any]:
        states = []
        for number, (transformation, part) in enumerate(zip(transformations, state, strict=True), 1):
            applies = apply and number == len(transformations)
            grads, part = _base.renew(transformation, grads, part, params, keep, donate=donate, apply=applies)
            states.append(part)
        return grads, tuple(states)

    return by_renew(init, run)


HyperparamState = namedtuple("HyperparamState", ["step", "hyperparams"])
"""Number of updates, and hyperparameters."""
restrict(HyperparamState, max_norm=Range.POSITIVE, clip_value=Range.POSITIVE)


@recorded
def clip_grad_norm(max_norm: PerModel) -> GradientTransformation:
    """Scale each member's gradients so that their total L2 norm is at most its ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: the factor is ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        max_norm: Maximum norm, positive.

    Example:
        >>> clip = clip_grad_norm([5.0, 10.0])
        >>> params = {"w": torch.zeros(2, 2)}
        >>> grads = {"w": torch.tensor([[6.0, 8.0], [6.0, 8.0]])}
        >>> clip.update(grads, clip.init(params), params)[0]["w"]
        tensor([[3.0000, 4.0000], [6.0000, 8.0000]])

    References:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.
    """

    def rule(grads: Params, params: Params, limit: Tensor) -> Params:
        norms = [torch.linalg.vector_norm(grad.reshape(grad.shape[0], -1), dim=1) for grad in grads.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms, 1), dim=1)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        return {path: grad * per_model(factor, grad) for path, grad in grads.items()}

    return _with_hyperparam(rule, max_norm=max_norm)


@recorded
def clip_grad_value(clip_value: PerModel) -> GradientTransformation:
    """Clamp each member's gradients to between minus and plus its ``clip_value``.

    As ``torch.nn.utils.clip_grad_value_``.

    Args:
        clip_value: Maximum magnitude, positive.

    Example:
        >>> clip = clip_grad_value([1.0, 7.0])
        >>> params = {"w": torch.zeros(2, 2)}
        >>> clip.update({"w": torch.tensor([[6.0, -8.0], [6.0, -8.0]])}, clip.init(params), params)[0]["w"]
        tensor([[ 1., -1.], [ 6., -7.]])
    """

    def rule(grads: Params, params: Params, limit: Tensor) -> Params:
        limits = {path: per_model(limit, grad) for path, grad in grads.items()}
        return {path: grad.maximum(-limits[path]).minimum(limits[path]) for path, grad in grads.items()}

    return _with_hyperparam(rule, clip_value=clip_value)


@recorded
def add_decayed_weights(weight_decay: PerModel) -> GradientTransformation:
    """Add ``weight_decay * p``: before an optimizer, an L2 penalty.

    Args:
        weight_decay: Factor of the parameters.

    Example:
        >>> decay = add_decayed_weights([0.0, 0.5])
        >>> params = {"w": torch.ones(2, 1)}
        >>> decay.update({"w": torch.ones(2, 1)}, decay.init(params), params)[0]["w"].flatten()
        tensor([1.0000, 1.5000])
    """

    def rule(grads: Params, params: Params, decay: Tensor) -> Params:
        return {path: grad + per_model(decay, grad) * params[path] for path, grad in grads.items()}

    return _with_hyperparam(rule, weight_decay=weight_decay)


def _with_hyperparam(rule: Callable[[Params, Params, Tensor], Params], **spec: PerModel) -> GradientTransformation:
    """A transformation from ``rule(grads, params, value)`` with one hyperparameter ``float64[M]``."""
    hyperparams = Hyperparams(HyperparamState, **spec)

    def init(params: Params) -> HyperparamState:
        return HyperparamState(_base.zero_count(params), hyperparams.init(params))

    def update(grads: Params, state: HyperparamState, params: Params) -> tuple[Params, HyperparamState]:
        (value,) = hyperparams.at(state.hyperparams, state.step).values()
        return rule(grads, params, value), state._replace(step=state.step + 1)

    return GradientTransformation(init, update)


AccumulateState = namedtuple("AccumulateState", ["seen", "hyperparams", "grads", "inner"])
"""Number of gradients since the last update, ``every``, the mean of these gradients, and the optimizer's state."""
restrict(AccumulateState, every=Range.AT_LEAST_ONE)


@recorded
def accumulate(optimizer: GradientTransformation, every: PerModel) -> GradientTransformation:
    """Update once per ``every`` gradients, with their mean, as with batches that are larger by this factor.

    Between updates, a member's parameters and optimizer state do not change.

    Args:
        optimizer: The optimizer that gets the means.
        every: Number of gradients per update, at least 1.

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
    hyperparams = Hyperparams(AccumulateState, every=every)

    def init(params: Params) -> AccumulateState:
        count, grads = _base.zero_count(params), {path: torch.zeros_like(param) for path, param in params.items()}
        return AccumulateState(count, hyperparams.init(params), grads, optimizer.init(params))

    def update(grads: Params, state: AccumulateState, params: Params) -> tuple[Params, AccumulateState]:
        seen = state.seen + 1
        mean = _lerp(state.grads, grads, 1 / seen.double())
        due = seen >= hyperparams.at(state.hyperparams, state.seen)["every"]
        nothing = {path: torch.zeros_like(grad) for path, grad in grads.items()}
        if can_look(due) and not bool(due.any()):
            return nothing, AccumulateState(seen, state.hyperparams, mean, state.inner)
        done = *optimizer.update(mean, state.inner, params), nothing, torch.zeros_like(seen)
        updates, inner, mean, seen = where(due, done, (nothing, state.inner, mean, seen))
        return updates, AccumulateState(seen, state.hyperparams, mean, inner)

    return GradientTransformation(init, update)


EmaState = namedtuple("EmaState", ["step", "hyperparams", "average"])
"""Number of updates, ``decay``, and the averages of the parameters."""
restrict(EmaState, decay=Range.DECAY)


@recorded
def ema(decay: PerModel = 0.999) -> GradientTransformation:
    """Keep an exponential moving average of the parameters in ``opt_state[-1].average``; updates pass unchanged.

    Put it last in a :func:`chain`, because it averages the updated parameters p: ``a = p`` after the first update, then
    ``a = decay * a + (1 - decay) * p``, as ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn`` does.

    Args:
        decay: Weight of the previous average.

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
    hyperparams = Hyperparams(EmaState, decay=decay)

    def init(params: Params) -> EmaState:
        average = {path: param.clone() for path, param in params.items()}
        return EmaState(_base.zero_count(params), hyperparams.init(params), average)

    def update(updates: Params, state: EmaState, params: Params) -> tuple[Params, EmaState]:
        share = torch.where(state.step == 0, 1.0, 1 - hyperparams.at(state.hyperparams, state.step)["decay"])
        average = _lerp(state.average, apply_updates(params, updates), share)
        return updates, EmaState(state.step + 1, state.hyperparams, average)

    return GradientTransformation(init, update)


PartitionState = namedtuple("PartitionState", ["groups"])
"""The state of each group's optimizer, by name."""


@recorded
def partition(
    label: Callable[[str, torch.Size], str | None] | Mapping[str, str | None],
    groups: Mapping[str, GradientTransformation],
) -> GradientTransformation:
    """One optimizer per group of parameters; parameters labelled None are frozen.

    In :func:`with_hyperparams`, ``"group.lr"`` is the ``lr`` of one group and ``lr`` that of all groups.

    Args:
        label: ``label(path, shape)`` returns the group of a parameter, given its shape in one model, or None to freeze it.
            Or a mapping from paths of modules and parameters to groups, where the longest matching path counts; ``""``
            matches all.
        groups: The optimizers by name.

    Raises:
        HyperparameterError: if a mapping leaves out a parameter or names a path that no parameter has.

    Example:
        >>> optimizer = partition({"": "body", "head": "head", "embed": None}, {"body": sgd(lr=0.1), "head": sgd(lr=1.0)})
        >>> params = {"embed.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2, 1), "body.bias": torch.zeros(2, 1)}
        >>> grads = {path: torch.ones(2, 1) for path in params}
        >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
        >>> {path: update.sum().item() for path, update in updates.items()}
        {'embed.weight': 0.0, 'head.bias': -2.0, 'body.bias': -0.20000000298023224}
    """

    def parts(params: Params, *trees: Params) -> Iterator[tuple[str, Any]]:
        for name, paths in group_paths(label, groups, params).items():
            yield name, [{path: tree[path] for path in paths} for tree in trees]

    def init(params: Params) -> PartitionState:
        for name in label if isinstance(label, Mapping) else ():
            if not any(covers(name, path) for path in params):
                why = f"'{name}' is not the path of a module or parameter that is trained; use one of {[*params]}"
                raise HyperparameterError(f"{why} or its beginning, or pass a function of path and shape")
        return PartitionState({name: groups[name].init(group) for name, (group,) in parts(params, params)})

    def run(grads: Params, state: Any, params: Params, keep: Any, donate: bool, apply: bool) -> tuple[Params, Any]:
        results, states = {}, {}
        for name, (group_grads, group_params) in parts(params, grads, params):
            given = groups[name], group_grads, state.groups[name], group_params, keep
            new, states[name] = _base.renew(*given, donate=donate, apply=apply)
            results.update(new)
        for path in [path for path in grads if path not in results]:
            results[path] = params[path] if apply else torch.zeros_like(grads[path])
        return {path: results[path] for path in grads}, PartitionState(states)

    return by_renew(init, run)


def group_paths(label: Any, groups: Iterable[str], params: Params) -> dict[str, list[str]]:
    """The paths of the parameters in each group of a :func:`partition`, by its name."""
    paths_of: dict[str, list[str]] = {name: [] for name in groups}
    for path, param in params.items():
        if not isinstance(label, Mapping):
            name = label(path, param.shape[1:])
        elif matching := [name for name in label if covers(name, path)]:
            name = label[max(matching, key=len)]
        else:
            how = "name it, or label all others with '', None to freeze them"
            raise HyperparameterError(f"'{path}' is in no group; {how}")
        if name is not None:
            paths_of[name].append(path)
    return paths_of


def covers(name: str, path: str) -> bool:
    """Whether a path is that of the module or parameter ``name``, or inside it; ``""`` covers all."""
    return not name or path == name or path.startswith(f"{name}.")


def _lerp(old: Params, new: Params, share: Tensor) -> Params:
    """``(1 - share) * old + share * new``, with one share per member."""
    return {path: torch.lerp(old[path], leaf, per_model(share, leaf)) for path, leaf in new.items()}
