"""Hyperparameters that follow the number of updates: ``optimizer(lr=schedule)``.

Public: :func:`constant`, :func:`step_lr`, :func:`cosine`, :func:`warmup`.

Every argument is a number or one number per member, kept in the state. The count is each member's own number of
updates: what ``torch.optim.lr_scheduler`` calls ``last_epoch`` when ``scheduler.step()`` follows every
``optimizer.step()``. Values agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

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
