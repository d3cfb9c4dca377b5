"""Hyperparameters that depend on the number of updates: ``optimizer(lr=schedule)``.

Every argument is one number or one number per member, kept in the state. The count is the number of updates that a member
has made, from 0: the ``last_epoch`` of ``torch.optim.lr_scheduler`` if ``scheduler.step()`` follows every
``optimizer.step()``. :func:`plateau` depends on a metric instead and is a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._types import PerModel, Schedule, recorded
from hfta_func.optim._base import Hyperparams, Range, check_choice, restrict
from hfta_func.optim._hyperparams import plateau as plateau

restrict(Schedule, step_size=Range.POSITIVE, T_max=Range.POSITIVE, T_0=Range.POSITIVE, T_mult=Range.AT_LEAST_ONE)
restrict(Schedule, total_iters=Range.POSITIVE, total_steps=Range.POSITIVE, steps=Range.POSITIVE)
restrict(Schedule, pct_start=Range.DECAY, div_factor=Range.POSITIVE, final_div_factor=Range.POSITIVE)


def values(schedule: Schedule, counts: Sequence[int]) -> Tensor:
    """The values ``float64[M]`` of a schedule, for example to plot them.

    Args:
        schedule: Any schedule.
        counts: Updates made by each member. A schedule of plain numbers fits any number of members.

    Example:
        >>> values(linear([1.0, 2.0], total_iters=4, start_factor=0.5), [0, 2])
        tensor([0.5000, 1.5000], dtype=torch.float64)
    """
    hyperparams = Hyperparams(Schedule, value=schedule)
    return hyperparams.at(hyperparams.init({"": torch.empty(len(counts), 0)}), torch.tensor(counts))["value"]


@recorded
def constant(value: PerModel) -> Schedule:
    """The same value at every count.

    Args:
        value: The value.

    Example:
        >>> values(constant(0.5), [0, 1000])
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return Schedule({"value": value}, lambda count, value: value)


@recorded
def step_lr(value: PerModel, step_size: PerModel, gamma: PerModel = 0.1) -> Schedule:
    """``value * gamma ** floor(count / step_size)``, as in ``torch.optim.lr_scheduler.StepLR``.

    Args:
        value: Value at count 0.
        step_size: Updates between two changes.
        gamma: Factor of each change.

    Example:
        >>> values(step_lr(1.0, step_size=10, gamma=0.5), [9, 10, 20])
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    return Schedule(locals(), lambda count, value, step_size, gamma: value * gamma ** torch.floor(count / step_size))


@recorded
def multistep(value: PerModel, milestones: Sequence[PerModel], gamma: PerModel = 0.1) -> Schedule:
    """Multiply by ``gamma`` at every milestone, as ``torch.optim.lr_scheduler.MultiStepLR`` does.

    Args:
        value: Value at count 0.
        milestones: Counts, each one number or one per member; ``milestone1``, ``milestone2`` and so on in the state.
        gamma: Factor of each change.

    Example:
        >>> values(multistep(1.0, milestones=[10, 15], gamma=0.5), [9, 10, 15])
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    named = {f"milestone{i}": milestone for i, milestone in enumerate(milestones, 1)}
    return Schedule(
        {"value": value, "gamma": gamma, **named},
        lambda count, value, gamma, **named: value * gamma ** sum((count >= at).double() for at in named.values()),
    )


@recorded
def exponential(value: PerModel, gamma: PerModel) -> Schedule:
    """``value * gamma ** count``, as in ``torch.optim.lr_scheduler.ExponentialLR``.

    Args:
        value: Value at count 0.
        gamma: Factor of each update.

    Example:
        >>> values(exponential(1.0, gamma=0.5), [0, 3])
        tensor([1.0000, 0.1250], dtype=torch.float64)
    """
    return Schedule({"value": value, "gamma": gamma}, lambda count, value, gamma: value * gamma**count)


@recorded
def linear(
    value: PerModel, total_iters: PerModel, start_factor: PerModel = 1 / 3, end_factor: PerModel = 1.0
) -> Schedule:
    """A straight line between two multiples of ``value``, as in ``torch.optim.lr_scheduler.LinearLR``.

    Args:
        value: The value to multiply.
        total_iters: Updates until the end of the line, whose value is then kept.
        start_factor: Factor at count 0.
        end_factor: Factor at the end.

    Example:
        >>> values(linear(1.0, total_iters=10, start_factor=1.0, end_factor=0.0), [0, 5, 20])
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    return Schedule(
        {"value": value, "total_iters": total_iters, "start_factor": start_factor, "end_factor": end_factor},
        lambda count, value, total_iters, start_factor, end_factor: (
            value * _line(start_factor, end_factor, _progress(count, total_iters))
        ),
    )


@recorded
def polynomial(value: PerModel, total_iters: PerModel, power: PerModel = 1.0) -> Schedule:
    """``value * (1 - count / total_iters) ** power``, then 0, as in ``torch.optim.lr_scheduler.PolynomialLR``.

    Args:
        value: Value at count 0.
        total_iters: Updates until 0.
        power: Exponent.

    Example:
        >>> values(polynomial(1.0, total_iters=10, power=2.0), [0, 5, 20])
        tensor([1.0000, 0.2500, 0.0000], dtype=torch.float64)
    """
    return Schedule(
        locals(), lambda count, value, total_iters, power: value * (1 - _progress(count, total_iters)) ** power
    )


@recorded
def cosine(value: PerModel, T_max: PerModel, eta_min: PerModel = 0.0) -> Schedule:
    """``eta_min + (value - eta_min) * (1 + cos(pi * count / T_max)) / 2``, as in ``CosineAnnealingLR`` of PyTorch.

    Args:
        value: Value at count 0.
        T_max: Updates until ``eta_min``, after which the curve rises again.
        eta_min: Lowest value.

    Example:
        >>> values(cosine(1.0, T_max=100), [0, 50, 100])
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    return Schedule(locals(), lambda count, value, T_max, eta_min: _half_cosine(value, eta_min, count / T_max))


@recorded
def cosine_restarts(value: PerModel, T_0: PerModel, T_mult: PerModel = 1, eta_min: PerModel = 0.0) -> Schedule:
    """Half a cosine, restarted periodically, as in ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts``.

    Args:
        value: Value at count 0 and after every restart.
        T_0: Updates until the first restart.
        T_mult: Length of each cosine relative to the previous one, at least 1.
        eta_min: Lowest value.

    Example:
        >>> values(cosine_restarts(1.0, T_0=10, T_mult=2), [5, 10, 20, 30])
        tensor([0.5000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)

    References:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """

    def at(count: Tensor, value: Tensor, T_0: Tensor, T_mult: Tensor, eta_min: Tensor) -> Tensor:
        same = T_mult == 1
        growth = torch.where(same, 2.0, T_mult)
        # Cosine number n, from 0, starts at T_0 (T_mult^n - 1) / (T_mult - 1). The 1e-9 makes up for rounding in the
        # logarithm, which could otherwise place the first count of a cosine at the end of the one before.
        number = torch.floor(torch.log(count / T_0 * (growth - 1) + 1) / torch.log(growth) + 1e-9)
        number = torch.where(same, torch.floor(count / T_0 + 1e-9), number)
        begin = T_0 * torch.where(same, number, (growth**number - 1) / (growth - 1))
        length = T_0 * torch.where(same, 1.0, growth**number)
        return _half_cosine(value, eta_min, (count - begin) / length)

    return Schedule({"value": value, "T_0": T_0, "T_mult": T_mult, "eta_min": eta_min}, at)


@recorded
def one_cycle(
    max_lr: PerModel,
    total_steps: PerModel,
    pct_start: PerModel = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: PerModel = 25.0,
    final_div_factor: PerModel = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise to ``max_lr``, then decay to far below the initial value, as ``torch.optim.lr_scheduler.OneCycleLR`` does.

    PyTorch's also moves ``momentum``, or the first of ``betas``, from 0.95 to 0.85 and back, unless it has
    ``cycle_momentum=False``; :func:`from_torch` takes both from it.

    Args:
        max_lr: Highest value.
        total_steps: Updates in the cycle. The last value is kept after it.
        pct_start: Fraction of the updates until the highest value.
        anneal_strategy: Shape of the curve between two values.
        div_factor: Highest value over initial value.
        final_div_factor: Initial value over last value.
        three_phase: After the rise, return to the initial value at the same speed, then decay to the last value.

    Raises:
        HyperparameterError: if ``anneal_strategy`` is unknown.

    Example:
        >>> schedule = one_cycle(1.0, total_steps=101, pct_start=0.5, anneal_strategy="linear", div_factor=10.0)
        >>> [round(value, 5) for value in values(schedule, [0, 49, 100, 200]).tolist()]
        [0.1, 0.99091, 1e-05, 1e-05]

    References:
        Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019.
    """
    check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
    hyperparams = {"max_lr": max_lr, "total_steps": total_steps, "pct_start": pct_start}
    hyperparams |= {"div_factor": div_factor, "final_div_factor": final_div_factor}
    curve = _half_cosine if anneal_strategy == "cos" else _line

    def at(count: Tensor, **k: Tensor) -> Tensor:
        first = k["max_lr"] / k["div_factor"]
        last, top, end = first / k["final_div_factor"], k["pct_start"] * k["total_steps"] - 1, k["total_steps"] - 1
        back = 2 * top if three_phase else end
        rise = curve(first, k["max_lr"], _progress(count, top))
        fall = curve(k["max_lr"], first if three_phase else last, _progress(count - top, back - top))
        if three_phase:
            fall = torch.where(count <= back, fall, curve(first, last, _progress(count - back, end - back)))
        return torch.where(count <= top, rise, fall)

    return Schedule(hyperparams, at)


@recorded
def warmup(after: PerModel, steps: PerModel, start_factor: PerModel = 1 / 3) -> Schedule:
    """Rise linearly to the initial value of ``after`` in ``steps`` updates, then follow ``after`` from its start.

    As ``torch.optim.lr_scheduler.SequentialLR`` of ``LinearLR`` and another scheduler.

    Args:
        after: The schedule to follow, or a value to keep.
        steps: Updates in the rise.
        start_factor: Fraction of the initial value at count 0.

    Example:
        >>> values(warmup(step_lr(1.0, step_size=10), steps=4, start_factor=0.0), [1, 4, 14])
        tensor([0.2500, 1.0000, 0.1000], dtype=torch.float64)
    """
    after = after if isinstance(after, Schedule) else constant(after)

    def at(count: Tensor, after: Callable[[Tensor], Tensor], steps: Tensor, start_factor: Tensor) -> Tensor:
        return _line(start_factor, 1, _progress(count, steps)) * after((count - steps).clamp(min=0))

    return Schedule({"after": after, "steps": steps, "start_factor": start_factor}, at)


@recorded
def chain(first: Schedule, *others: Schedule) -> Schedule:
    """The product of schedules, as ``torch.optim.lr_scheduler.ChainedScheduler`` of multiplicative ones.

    Args:
        first: The schedule whose initial value ``with_hyperparams`` replaces.
        others: Factors, ``factor1``, ``factor2`` and so on in the state.

    Example:
        >>> values(schedules.chain(exponential(1.0, gamma=0.5), step_lr(1.0, step_size=2)), [1, 2])
        tensor([0.5000, 0.0250], dtype=torch.float64)
    """

    def at(count: Tensor, **factors: Callable[[Tensor], Any]) -> Any:
        return math.prod(factor(count) for factor in factors.values())

    return Schedule({"first": first, **{f"factor{i}": other for i, other in enumerate(others, 1)}}, at)


def _progress(count: Tensor, total: Tensor) -> Tensor:
    """The fraction of ``total`` updates that are made."""
    return (count / total).clamp(0.0, 1.0)


def _line(start: Tensor, end: Tensor | float, progress: Tensor) -> Tensor:
    return start + (end - start) * progress


def _half_cosine(start: Tensor, end: Tensor, progress: Tensor) -> Tensor:
    return end + (start - end) * (1 + torch.cos(math.pi * progress)) / 2
