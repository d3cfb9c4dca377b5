"""Optimizers and schedulers of ``torch.optim``, one of each per model, as one optimizer of this package, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hfta_func import optim
from hfta_func._torch import has_step_hooks
from hfta_func._tree import num_models, tree_map
from hfta_func._types import Params, PerModel, Schedule, Tree, recipe, recorded
from hfta_func.errors import StackError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict, vector
from hfta_func.optim._leafwise import FIELDS, PAIRS
from hfta_func.optim._transforms import PartitionState, group_paths
from hfta_func.step.gradients import handed

_NAMES = "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adagrad Adadelta Muon ASGD Rprop Adafactor".split()
_FUNCTIONS: dict[type, Any] = {getattr(torch.optim, name): getattr(optim, name.lower()) for name in _NAMES}
_CLASSES: dict[Any, Any] = {make: kind for kind, make in _FUNCTIONS.items()}
_FUNCTIONS[torch.optim.LBFGS] = optim.lbfgs
_KEYS = {"momentum": "momentum_buffer"}

restrict(Schedule, every=Range.AT_LEAST_ONE, rows=Range.ROWS)


@recorded
def _table(value: PerModel, rows: Tensor, every: PerModel, start: PerModel) -> Schedule:
    """``value`` times the entries of the member's row ``[M, n]``, ``every`` updates each from ``start``; the last is kept."""

    def at(count: Tensor, value: Tensor, rows: Tensor, every: Tensor, start: Tensor) -> Tensor:
        position = torch.floor((count - start) / every).clamp(0, rows.shape[1] - 1).long()
        return value * rows.gather(1, position[:, None])[:, 0]

    return Schedule({"value": value, "rows": rows, "every": every, "start": start}, at)


@recorded
def _resumed(optimizer: GradientTransformation, members: Sequence[Any], counts: Tensor) -> GradientTransformation:
    """The optimizer, with a state that goes on from those of M optimizers of ``torch.optim`` by path."""

    def init(params: Params) -> Any:
        state = optimizer.init(params)
        if state.step.is_meta:
            return state

        def resumed(path: str, name: str, fresh: Tensor) -> Tensor:
            values = [states[path].get(_KEYS.get(name, name)) for states in members]
            return torch.stack([old if new is None else new.to(old) for old, new in zip(fresh, values, strict=True)])

        for name in state._fields[len(FIELDS) :]:
            slot = getattr(state, name)
            is_number, first = isinstance(slot, Tensor), next(iter(params))
            new = resumed(first, name, slot) if is_number else {path: resumed(path, name, slot[path]) for path in slot}
            state = state._replace(**{name: new})
        return state._replace(step=counts.to(state.step, copy=True))

    return optimizer._replace(init=init)


def from_torch(
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[LRScheduler] | None = None,
    *,
    models: Iterable[nn.Module],
    steps: int | Sequence[int] = 0,
    every: int | Sequence[int] = 1,
) -> GradientTransformation:
    """One optimizer for an array from M optimizers of ``torch.optim``, one per model, and their schedulers.

    Groups become those of a :func:`partition`, ``"group0"`` and so on, unless one holds all that is trained. State that
    the optimizers have accumulated is in what ``init`` returns. Whether they are ``fused`` and the like has no effect.

    Args:
        optimizers: One per model, of one class and with the same groups; numbers may differ. Later changes have no effect.
        schedulers: One per optimizer, of any subclass of ``LRScheduler``. Copies of them step from where they are, and all
            numbers that they change are kept in the state, ``float64[M, steps + 1]``; ``with_hyperparams`` sets the highest.
        models: The models whose parameters the optimizers hold, in the same order; parameters in no group are not trained.
        steps: How many times each scheduler steps to the end, one number or one per member; then its last value stays.
        every: Updates between two steps of a scheduler, likewise; in ``accumulate(..., 4)`` an update is four batches.

    Raises:
        StackError: if the optimizers or schedulers cannot be one; it names the member, the difference and the cure.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> optimizers = [torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in zip(models, [0.1, 0.2, 0.3])]
        >>> schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=5) for optimizer in optimizers]
        >>> optimizer = from_torch(optimizers, schedulers, models=models, steps=10, every=100)
        >>> state = optimizer.init({path: torch.zeros(3, *p.shape) for path, p in models[0].named_parameters()})
        >>> state.hyperparams["lr"]["value"]
        tensor([0.1000, 0.2000, 0.3000], dtype=torch.float64)
    """
    optimizers, named = handed(optimizers, schedulers), [dict(model.named_parameters()) for model in models]
    followed = [None] * len(optimizers) if schedulers is None else list(schedulers)
    stages, gaps = (vector(*each, len(named), torch.device("cpu")) for each in (("steps", steps), ("every", every)))
    if schedulers is not None and min(*stages, *gaps) < 1:
        raise StackError(f"steps is {steps} and every is {every}; give e.g. steps=epochs, every=len(loader)")
    for member, why in enumerate(map(_why_not, optimizers, followed, named)):
        if why:
            raise StackError(f"model {member}: {why}")
    _check_same("the optimizer", [f"{type(each).__name__} (groups: {len(each.param_groups)})" for each in optimizers])
    make = _FUNCTIONS[type(optimizers[0])]
    ahead = [_read_ahead(*each, make) for each in zip(optimizers, followed, stages.long().tolist(), strict=True)]
    label: dict[str, str | None] = {}
    groups: dict[str, GradientTransformation] = {}
    for number in range(len(ahead[0])):
        pairs = [_states_of_group(i, number, *pair) for i, pair in enumerate(zip(optimizers, named, strict=True))]
        members, counts = [states for states, _ in pairs], torch.tensor([count for _, count in pairs])
        common = {*members[0]}.intersection(*members)
        _check_same(f"what not all hold in group {number}", [sorted({*states} - common) for states in members])
        if members[0]:
            arguments = _arguments(number, [each[number] for each in ahead], every, counts, schedulers is not None)
            groups[f"group{number}"] = _resumed(make(**arguments), members, counts)
            label |= dict.fromkeys(members[0], f"group{number}")
    if not groups:
        raise StackError("no parameter of the optimizers requires grad, so there is nothing to train")
    if any(param.requires_grad and path not in label for path, param in named[0].items()):
        label[""] = None  # Not path by path: a step of one of several networks has no others.
    return groups.popitem()[1] if len({*label.values()}) == 1 else optim.partition(label, groups)


def _why_not(optimizer: Optimizer, scheduler: Any, params: Mapping[str, nn.Parameter]) -> str:
    """What keeps an optimizer and its scheduler from being a member of an array; empty if nothing does."""
    kind, ids = type(optimizer), {id(param) for param in params.values()}
    if kind not in _FUNCTIONS:
        cure = f"use one of {', '.join(_NAMES)}, LBFGS, or write one as docs/howto/extend.md shows"
        return f"{kind.__module__}.{kind.__qualname__} has no counterpart in this package; {cure}"
    if kind is torch.optim.LBFGS and optimizer.state:
        return "its LBFGS has made steps, whose memory stays there; make a new one, or start from it with hfta.lbfgs"
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks, which no member has for itself; change gradients in a chain(...) instead"
    if any(id(param) not in ids for group in optimizer.param_groups for param in group["params"]):
        order = "pass models and optimizers in the same order, and make parameters of the loss part of the model"
        return f"its optimizer holds a parameter that is not the model's; {order}"
    if isinstance(scheduler, ReduceLROnPlateau):
        return "ReduceLROnPlateau follows a metric; give fit the callback hfta.schedules.plateau(metric, ...) instead"
    if scheduler is not None and scheduler.optimizer is not optimizer:
        return "its scheduler follows another optimizer; pass optimizers and schedulers in the same order"
    return ""


def _check_same(what: str, values: Sequence[Any]) -> None:
    for member, value in enumerate(values):
        if value != values[0]:
            difference = f"model {member}: {what} is {value} but in model 0 it is {values[0]}"
            raise StackError(f"{difference}; members may differ in numbers only, so train an array for each")


def _states_of_group(member: int, number: int, optimizer: Optimizer, params: Mapping[str, Any]) -> tuple[Any, int]:
    """The states of the trained parameters in a group by path, and how many updates made them: any is 1 if nobody counts."""
    inside = {id(param) for param in optimizer.param_groups[number]["params"] if param.requires_grad}
    states = {path: optimizer.state.get(param, {}) for path, param in params.items() if id(param) in inside}
    counts = {path: int(state.get("step", state.get("momentum_buffer") is not None)) for path, state in states.items()}
    for path, count in counts.items():
        if count != counts[first := next(iter(counts))]:
            difference = f"the state of '{path}' is from {count} updates but that of '{first}' from {counts[first]}"
            cure = "give parameters that joined later a group of their own, and freeze those that get no gradient"
            raise StackError(f"model {member}: {difference}; {cure}")
    copied = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, states)
    return copied, next(iter(counts.values()), 0)


def _read_ahead(optimizer: Optimizer, scheduler: Any, steps: int, make: Callable[..., Any]) -> list[dict[str, Any]]:
    """The arguments of ``make`` for each group: of numbers, ``[steps + 1]`` or ``[steps + 1, 2]``, all that they become."""
    known = [each for each in inspect.signature(make).parameters.values() if each.name in optimizer.param_groups[0]]
    numbers = [each.name for each in known if "PerModel" in each.annotation]
    stepped = copy.copy(optimizer)
    # Schedulers write into tensors.
    copied = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in optimizer.param_groups]
    for group in copied if make is optim.adafactor else ():
        # As Adafactor reads None in eps.
        group["eps"] = [torch.finfo(group["params"][0].dtype).eps if x is None else x for x in group["eps"]]
    stepped.param_groups = copied
    follower = None if scheduler is None else copy.deepcopy(scheduler, {id(optimizer): stepped})
    rows: list[list[list[Any]]] = []
    for number in range(steps + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if follower is not None and number:
                follower.step()
        values = [[group[name] for name in numbers] for group in stepped.param_groups]
        rows.append([[value.item() if isinstance(value, Tensor) else value for value in row] for row in values])
    return [
        {each.name: group[each.name] for each in known}
        | {name: torch.tensor([row[number][i] for row in rows], dtype=torch.float64) for i, name in enumerate(numbers)}
        for number, group in enumerate(optimizer.param_groups)
    ]


def _arguments(number: int, members: Sequence[Any], every: PerModel, start: Tensor, follows: bool) -> dict[str, Any]:
    """The arguments that make the optimizer of a group, from those of each member."""

    def spec(name: str, rows: Tensor) -> PerModel:
        values = rows[:, 0]
        if (name == "lr" and follows) or bool((rows != values[:, None]).any()):
            highest = rows.abs().amax(1)
            return _table(highest, rows / torch.where(highest > 0, highest, 1.0)[:, None], every, start.double())
        return float(values[0]) if bool((values == values[0]).all()) else values.tolist()

    arguments: dict[str, Any] = {}
    for name, first in members[0].items():
        values = [member[name] for member in members]
        if isinstance(first, Tensor):
            # Those of members that step less often end earlier, and keep the last one.
            steps = torch.arange(max(map(len, values)))
            table = torch.stack([value[steps.clamp(max=len(value) - 1)] for value in values])
            specs = [spec(name, rows) for rows in table.reshape(*table.shape[:2], -1).unbind(2)]
            arguments[name] = specs[0] if first.dim() == 1 else tuple(specs)
        else:
            _check_same(f"{name} of group {number}", values)
            arguments |= {} if first is None else {name: first}
    return arguments


def to_torch(optimizer: GradientTransformation, state: Tree, models: Iterable[nn.Module]) -> list[Optimizer]:
    """M optimizers of ``torch.optim`` that go on where an array is: the inverse of :func:`from_torch`.

    Args:
        optimizer: The step's optimizer: one with a counterpart in ``torch.optim``, or a :func:`partition` of one kind.
        state: The training state, or the optimizer's.
        models: The models to train, for example from :func:`unstack_params`.

    Returns:
        Optimizers with the accumulated state and the present numbers; make new schedulers over them to go on with one.

    Raises:
        StackError: if there is no counterpart, or not one model per member.
        StateError: if the state is of another optimizer or model.

    Example:
        >>> optimizer, models = optim.sgd(lr=[0.1, 0.2], momentum=0.9), [torch.nn.Linear(4, 1) for _ in range(2)]
        >>> state = optimizer.init({path: torch.zeros(2, *p.shape) for path, p in models[0].named_parameters()})
        >>> to_torch(optimizer, state, models)[1].param_groups[0]["lr"]
        0.2
    """
    state, named = getattr(state, "opt_state", state), [dict(model.named_parameters()) for model in models]
    count = num_models(state)
    params = {path: param.expand(count, *param.shape) for path, param in named[0].items() if param.requires_grad}
    make, call = _call_of(optimizer)
    if make is not optim.partition:
        call, state = {"label": {"": ""}, "groups": {"": optimizer}}, PartitionState({"": state})
    paths, states = [*group_paths(**call, params=params).values()], [*state.groups.values()]
    calls = [_call_of(group) for group in call["groups"].values()]
    kind, *others = {_CLASSES.get(make) for make, _ in calls}
    if kind is None or others:
        known = f"one of {', '.join(_NAMES)}, or a partition with groups of one of them"
        raise StackError(f"to_torch takes {known}; of a chain, pass that part and its state")
    options = [_options_of(kind, *call, group) for call, group in zip(calls, states, strict=True)]
    counted, made = () if kind in (torch.optim.SGD, torch.optim.Muon) else ("step",), []
    for member, leaves in enumerate(named):
        inside = [[leaves[path] for path in group] for group in paths]
        made.append(kind([{"params": group, **rows[member]} for group, rows in zip(inside, options, strict=True)]))
        for group, part in zip(paths, states, strict=True):
            # Before the first update torch.optim has no state, or one that its options make.
            for param, path in [(leaves[path], path) for path in group if part.step[member]]:
                for name in (*counted, *part._fields[len(FIELDS) :]):
                    key, slot = _KEYS.get(name, name), getattr(part, name)
                    if isinstance(slot, Tensor):
                        made[-1].state[param][key] = torch.tensor(float(slot[member]))
                    elif slot and slot[path].numel():  # Adafactor has no rows for vectors.
                        made[-1].state[param][key] = slot[path][member].to(param, copy=True)
    return made


def _call_of(optimizer: GradientTransformation) -> tuple[Any, dict[str, Any]]:
    """The function that made an optimizer, and its arguments."""
    made, arguments = recipe(optimizer)
    if not isinstance(made, functools.partial):
        return None, {}
    bound = inspect.signature(made.func).bind(*arguments, **made.keywords)
    bound.apply_defaults()
    return _call_of(bound.arguments["optimizer"]) if made.func is _resumed else (made.func, bound.arguments)


def _options_of(kind: type[Optimizer], make: Callable[..., Any], arguments: Mapping[str, Any], state: Any) -> list[Any]:
    """The options of a group of ``torch.optim`` for each member, with the present values of schedules."""
    count = len(state.step)

    def present(name: str, spec: Any) -> list[Any]:
        if (values := state.hyperparams.get(name)) is None:
            return [None] * count if spec is None else vector(name, spec, count, state.step.device).tolist()
        return Hyperparams(type(state), **{name: spec}).at({name: values}, state.step)[name].tolist()

    columns: dict[str, Any] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        value = arguments[name]
        if name not in inspect.signature(kind).parameters:
            if value != parameter.default:
                raise StackError(f"torch.optim.{kind.__name__} has no {name}, which is {value} here; leave it out")
        elif parameter.annotation.startswith("tuple[PerModel"):
            columns[name] = [*zip(*map(present, PAIRS[name], value), strict=True)]
        else:
            columns[name] = present(name, value) if "PerModel" in parameter.annotation else [value] * count
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
