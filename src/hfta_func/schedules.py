"""Hyperparameters that follow the number of updates: ``optimizer(lr=schedule)``.

Public: :func:`constant`, :func:`step_lr`, :func:`multistep`, :func:`exponential`, :func:`linear`, :func:`polynomial`,
:func:`cosine`, :func:`cosine_restarts`, :func:`one_cycle`, :func:`warmup`, :func:`chain`; and :func:`plateau`, which follows
a metric instead.

Every argument is a number or one number per member, kept in the state. The count is each member's own number of
updates: what ``torch.optim.lr_scheduler`` calls ``last_epoch`` when ``scheduler.step()`` follows every
``optimizer.step()``. Values agree with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func._types import PerModel, Schedule


def constant(value: PerModel) -> Schedule:
    """The same value at every step.

    Example:
        >>> _at(constant(0.1), 0), _at(constant(0.1), 1000)
        (0.1, 0.1)
    """
    return Schedule({"value": value}, lambda count, value: value)


def step_lr(value: PerModel, step_size: PerModel, gamma: PerModel = 0.1) -> Schedule:
    """Multiply by ``gamma`` every ``step_size`` updates, as ``torch.optim.lr_scheduler.StepLR`` does.

    ``value * gamma ** floor(count / step_size)``

    Args:
        value: Value at count 0.
        step_size: Updates between two changes.
        gamma: Factor of each change.

    Example:
        >>> schedule = step_lr(1.0, step_size=10, gamma=0.5)
        >>> _at(schedule, 9), _at(schedule, 10), _at(schedule, 20)
        (1.0, 0.5, 0.25)
    """

    def at(count: Tensor, value: Tensor, step_size: Tensor, gamma: Tensor) -> Tensor:
        return value * gamma ** torch.floor(count / step_size)

    return Schedule({"value": value, "step_size": step_size, "gamma": gamma}, at)


def multistep(value: PerModel, milestones: Sequence[PerModel], gamma: PerModel = 0.1) -> Schedule:
    """Multiply by ``gamma`` at every milestone, as ``torch.optim.lr_scheduler.MultiStepLR`` does.

    Args:
        value: Value at count 0.
        milestones: Counts, each one number or one number per member; in the state ``milestone1``, ``milestone2`` and so on.
        gamma: Factor of each change.

    Example:
        >>> schedule = multistep(1.0, milestones=[10, 15], gamma=0.5)
        >>> _at(schedule, 9), _at(schedule, 10), _at(schedule, 15)
        (1.0, 0.5, 0.25)
    """

    def at(count: Tensor, value: Tensor, gamma: Tensor, **milestones: Tensor) -> Tensor:
        return value * gamma ** sum((count >= milestone).to(torch.float64) for milestone in milestones.values())

    places = {f"milestone{i}": milestone for i, milestone in enumerate(milestones, 1)}
    return Schedule({"value": value, "gamma": gamma, **places}, at)


def exponential(value: PerModel, gamma: PerModel) -> Schedule:
    """Multiply by ``gamma`` at every update, as ``torch.optim.lr_scheduler.ExponentialLR`` does.

    Args:
        value: Value at count 0.
        gamma: Factor of each update.

    Example:
        >>> schedule = exponential(1.0, gamma=0.5)
        >>> _at(schedule, 0), _at(schedule, 3)
        (1.0, 0.125)
    """
    return Schedule({"value": value, "gamma": gamma}, lambda count, value, gamma: value * gamma**count)


def linear(
    value: PerModel, total_iters: PerModel, start_factor: PerModel = 1 / 3, end_factor: PerModel = 1.0
) -> Schedule:
    """A straight line between two multiples of ``value``, as ``torch.optim.lr_scheduler.LinearLR`` draws it.

    Args:
        value: What the factors multiply.
        total_iters: Updates until the line ends; then its end is held.
        start_factor: Factor at count 0.
        end_factor: Factor at the end.

    Example:
        >>> schedule = linear(1.0, total_iters=10, start_factor=1.0, end_factor=0.0)
        >>> _at(schedule, 0), _at(schedule, 5), _at(schedule, 20)
        (1.0, 0.5, 0.0)
    """

    def at(count: Tensor, value: Tensor, total_iters: Tensor, start_factor: Tensor, end_factor: Tensor) -> Tensor:
        return value * (start_factor + (end_factor - start_factor) * (count / total_iters).clamp(max=1.0))

    knobs = {"value": value, "total_iters": total_iters, "start_factor": start_factor, "end_factor": end_factor}
    return Schedule(knobs, at)


def polynomial(value: PerModel, total_iters: PerModel, power: PerModel = 1.0) -> Schedule:
    """Fall to 0 along a polynomial, as ``torch.optim.lr_scheduler.PolynomialLR`` does.

    ``value * (1 - count / total_iters) ** power``

    Args:
        value: Value at count 0.
        total_iters: Updates until 0.
        power: Exponent.

    Example:
        >>> schedule = polynomial(1.0, total_iters=10, power=2.0)
        >>> _at(schedule, 0), _at(schedule, 5), _at(schedule, 20)
        (1.0, 0.25, 0.0)
    """

    def at(count: Tensor, value: Tensor, total_iters: Tensor, power: Tensor) -> Tensor:
        return value * (1 - (count / total_iters).clamp(max=1.0)) ** power

    return Schedule({"value": value, "total_iters": total_iters, "power": power}, at)


def cosine(value: PerModel, T_max: PerModel, eta_min: PerModel = 0.0) -> Schedule:
    """Half a cosine from ``value`` down to ``eta_min``, as ``torch.optim.lr_scheduler.CosineAnnealingLR`` does.

    ``eta_min + (value - eta_min) * (1 + cos(pi * count / T_max)) / 2``

    Args:
        value: Value at count 0.
        T_max: Updates until ``eta_min``; after them the curve rises again.
        eta_min: Lowest value.

    Example:
        >>> schedule = cosine(1.0, T_max=100)
        >>> _at(schedule, 0), _at(schedule, 50), _at(schedule, 100)
        (1.0, 0.5, 0.0)

    References:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """

    def at(count: Tensor, value: Tensor, T_max: Tensor, eta_min: Tensor) -> Tensor:
        return eta_min + (value - eta_min) * (1 + torch.cos(math.pi * (count / T_max))) / 2

    return Schedule({"value": value, "T_max": T_max, "eta_min": eta_min}, at)


def cosine_restarts(value: PerModel, T_0: PerModel, T_mult: PerModel = 1, eta_min: PerModel = 0.0) -> Schedule:
    """Half a cosine again and again, as ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`` does.

    Args:
        value: Value at count 0 and after every restart.
        T_0: Updates until the first restart.
        T_mult: How many times longer each cosine is than the one before, at least 1.
        eta_min: Lowest value.

    Example:
        >>> schedule = cosine_restarts(1.0, T_0=10, T_mult=2)
        >>> _at(schedule, 5), _at(schedule, 10), _at(schedule, 20), _at(schedule, 30)
        (0.5, 1.0, 0.5, 1.0)

    References:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """

    def at(count: Tensor, value: Tensor, T_0: Tensor, T_mult: Tensor, eta_min: Tensor) -> Tensor:
        same = T_mult == 1
        growth = torch.where(same, 2.0, T_mult)
        # The n-th cosine, from 0, begins at T_0 (T_mult^n - 1) / (T_mult - 1). What the logarithm loses must not make a
        # count that is a beginning end the cosine before.
        number = torch.floor(torch.log(count / T_0 * (growth - 1) + 1) / torch.log(growth) + 1e-9)
        number = torch.where(same, torch.floor(count / T_0 + 1e-9), number)
        begin = T_0 * torch.where(same, number, (growth**number - 1) / (growth - 1))
        length = T_0 * torch.where(same, 1.0, growth**number)
        return eta_min + (value - eta_min) * (1 + torch.cos(math.pi * ((count - begin) / length))) / 2

    return Schedule({"value": value, "T_0": T_0, "T_mult": T_mult, "eta_min": eta_min}, at)


def one_cycle(
    max_lr: PerModel,
    total_steps: PerModel,
    pct_start: PerModel = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: PerModel = 25.0,
    final_div_factor: PerModel = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Up to ``max_lr`` and far down, as ``torch.optim.lr_scheduler.OneCycleLR`` moves the learning rate.

    Args:
        max_lr: Highest value.
        total_steps: Updates of the cycle; its last value is held.
        pct_start: Fraction of them until the highest value.
        anneal_strategy: Shape of the way between two values.
        div_factor: Highest over first value.
        final_div_factor: First over last value.
        three_phase: Come back to the first value as fast as it rose, before the last one.

    Example:
        >>> schedule = one_cycle(1.0, total_steps=101, pct_start=0.5, anneal_strategy="linear", div_factor=10.0)
        >>> _at(schedule, 0), round(_at(schedule, 25), 2), _at(schedule, 100)
        (0.1, 0.55, 1e-05)

    References:
        Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019.
    """

    def way(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
        share = share.clamp(0.0, 1.0)
        if anneal_strategy == "cos":
            return end + (start - end) / 2 * (1 + torch.cos(math.pi * share))
        return start + (end - start) * share

    def at(
        count: Tensor,
        max_lr: Tensor,
        total_steps: Tensor,
        pct_start: Tensor,
        div_factor: Tensor,
        final_div_factor: Tensor,
    ) -> Tensor:
        first = max_lr / div_factor
        last, top, end = first / final_div_factor, pct_start * total_steps - 1, total_steps - 1
        rise = way(first, max_lr, count / top)
        if three_phase:
            back = 2 * top
            fall = way(max_lr, first, (count - top) / (back - top))
            fall = torch.where(count <= back, fall, way(first, last, (count - back) / (end - back)))
        else:
            fall = way(max_lr, last, (count - top) / (end - top))
        return torch.where(count <= top, rise, fall)

    knobs = {"max_lr": max_lr, "total_steps": total_steps, "pct_start": pct_start}
    return Schedule({**knobs, "div_factor": div_factor, "final_div_factor": final_div_factor}, at)


def warmup(after: PerModel, steps: PerModel, start_factor: PerModel = 1 / 3) -> Schedule:
    """Rise linearly to the first value of ``after`` within ``steps`` updates, then follow ``after`` from its start.

    ``torch.optim.lr_scheduler.SequentialLR`` of ``LinearLR`` and the other scheduler.

    Args:
        after: What follows: a schedule, or a value to hold.
        steps: Updates that the rise takes.
        start_factor: Fraction of the first value to start from.

    Example:
        >>> schedule = warmup(step_lr(1.0, step_size=10), steps=4, start_factor=0.0)
        >>> _at(schedule, 1), _at(schedule, 4), _at(schedule, 14)
        (0.25, 1.0, 0.1)
    """
    inner = after if isinstance(after, Schedule) else constant(after)

    def at(count: Tensor, after: Callable[[Tensor], Tensor], steps: Tensor, start_factor: Tensor) -> Tensor:
        rise = start_factor + (1 - start_factor) * (count / steps).clamp(max=1.0)
        return rise * after((count - steps).clamp(min=0))

    return Schedule({"after": inner, "steps": steps, "start_factor": start_factor}, at)


def chain(first: Schedule, *others: Schedule) -> Schedule:
    """The product of schedules, as ``torch.optim.lr_scheduler.ChainedScheduler`` makes one of several multiplying ones.

    Args:
        first: Holds the value, which ``with_hyperparams`` replaces.
        others: Factors; in the state ``factor1``, ``factor2`` and so on.

    Example:
        >>> schedule = schedules.chain(exponential(1.0, gamma=0.5), step_lr(1.0, step_size=2))
        >>> _at(schedule, 1), _at(schedule, 2)
        (0.5, 0.025)
    """

    def at(count: Tensor, **factors: Callable[[Tensor], Tensor]) -> Tensor:
        return functools.reduce(torch.mul, [factor(count) for factor in factors.values()])

    return Schedule({"first": first, **{f"factor{i}": other for i, other in enumerate(others, 1)}}, at)


class PlateauState(NamedTuple):
    """Of each member: its value, its best metric, how many metrics were no better, and how many it still rests."""

    value: Tensor
    best: Tensor
    bad: Tensor
    resting: Tensor


class Plateau(NamedTuple):
    """A pair of pure functions: ``init(num_models) -> state`` and ``update(state, metric) -> state``."""

    init: Callable[[int], PlateauState]
    update: Callable[[PlateauState, Tensor], PlateauState]


def plateau(
    value: float | Sequence[float] | Tensor,
    mode: Literal["min", "max"] = "min",
    factor: float = 0.1,
    patience: float | Sequence[float] | Tensor = 10,
    threshold: float = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: float | Sequence[float] | Tensor = 0,
    min_lr: float | Sequence[float] | Tensor = 0.0,
    eps: float = 1e-8,
) -> Plateau:
    """Reduce a member's value when its own metric stops improving, as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does.

    It follows no count, so it is no argument of an optimizer: hand its value to :func:`hfta_func.with_hyperparams` after
    every evaluation. Each argument that is a number may be one number per member.

    Args:
        value: Where it starts.
        mode: Whether less or more is better.
        factor: What the value is multiplied by.
        patience: How many metrics may be no better.
        threshold: How much better counts.
        threshold_mode: Whether that is a fraction of the best metric.
        cooldown: Metrics after a reduction that count as no worse.
        min_lr: Lowest value.
        eps: Smallest reduction that is made.

    Example:
        >>> schedule = plateau([0.1, 0.2], patience=1)
        >>> state = schedule.init(2)
        >>> for metric in ([1.0, 1.0], [1.0, 0.9], [1.0, 0.8]):
        ...     state = schedule.update(state, torch.tensor(metric))
        >>> state.value
        tensor([0.0100, 0.2000], dtype=torch.float64)
    """
    sign = 1.0 if mode == "min" else -1.0

    def vector(number: Any, like: Tensor) -> Tensor:
        return torch.as_tensor(number, dtype=torch.float64, device=like.device)

    def init(num_models: int) -> PlateauState:
        start = torch.as_tensor(value, dtype=torch.float64)
        if start.dim() and start.shape[0] != num_models:
            raise HyperparameterError(
                f"plateau has {start.shape[0]} values but the array has {num_models} models; give one, or one per model"
            )
        none = torch.zeros(num_models, dtype=torch.float64)
        return PlateauState(start.expand(num_models).clone(), none + sign * math.inf, none, none.clone())

    def update(state: PlateauState, metric: Tensor) -> PlateauState:
        metric = metric.detach().to(state.best)
        margin = vector(threshold, metric) * (state.best if threshold_mode == "rel" else 1.0)
        better = metric < state.best - margin if mode == "min" else metric > state.best + margin
        # Infinity has no fraction.
        better = torch.where(state.best.isinf(), sign * metric < math.inf, better)
        bad = torch.where(better, 0.0, state.bad + 1)
        rests = state.resting > 0
        resting, bad = torch.where(rests, state.resting - 1, state.resting), torch.where(rests, 0.0, bad)
        due = bad > vector(patience, metric)
        reduced = torch.maximum(state.value * vector(factor, metric), vector(min_lr, metric))
        return PlateauState(
            value=torch.where(due & (state.value - reduced > vector(eps, metric)), reduced, state.value),
            best=torch.where(better, metric, state.best),
            bad=torch.where(due, 0.0, bad),
            resting=torch.where(due, vector(cooldown, metric), resting),
        )

    return Plateau(init, update)


def _at(schedule: Schedule, count: int) -> float:
    """One value of a schedule of plain numbers, for the examples above."""

    def read(schedule: Schedule, count: Tensor) -> Tensor:
        knobs = {
            name: (lambda at, knob=knob: read(knob, at))
            if isinstance(knob, Schedule)
            else torch.tensor([knob], dtype=torch.float64)
            for name, knob in schedule.knobs.items()
        }
        return schedule.value(count, **knobs)

    return round(float(read(schedule, torch.tensor([count]))), 12)
