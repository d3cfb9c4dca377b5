"""Hyperparameters that depend on the number of updates: ``optimizer(lr=schedule)``.

Every argument is one number or one number per member, kept in the state. Each member counts its own updates, from 0: the
``last_epoch`` of ``torch.optim.lr_scheduler`` if ``scheduler.step()`` follows every ``optimizer.step()``. :func:`plateau`
depends on a metric instead and is a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hfta_func._errors import HyperparameterError
from hfta_func._types import PerModel, Schedule
from hfta_func.optim._base import Knobs, Range, check, check_choice, restrict, vector
from hfta_func.optim._hyperparams import with_hyperparams

S = TypeVar("S")
Numbers = float | Sequence[float] | Tensor

restrict(step_size=Range.POSITIVE, T_max=Range.POSITIVE, T_0=Range.POSITIVE, T_mult=Range.AT_LEAST_ONE)
restrict(total_iters=Range.POSITIVE, total_steps=Range.POSITIVE, steps=Range.POSITIVE, pct_start=Range.DECAY)
restrict(div_factor=Range.POSITIVE, final_div_factor=Range.POSITIVE)


def values(schedule: Schedule, counts: Sequence[int]) -> Tensor:
    """The values ``float64[M]`` of a schedule, for example to plot them.

    Args:
        schedule: Any schedule.
        counts: Updates made by each member. A schedule of plain numbers fits any number of members.

    Example:
        >>> values(linear([1.0, 2.0], total_iters=4, start_factor=0.5), [0, 2])
        tensor([0.5000, 1.5000], dtype=torch.float64)
    """
    knobs = Knobs(value=schedule)
    return knobs.at(knobs.init({"": torch.empty(len(counts), 0)}), torch.tensor(counts))["value"]


def constant(value: PerModel) -> Schedule:
    """The same value at every count.

    Args:
        value: The value.

    Example:
        >>> values(constant(0.5), [0, 1000])
        tensor([0.5000, 0.5000], dtype=torch.float64)
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
        >>> values(step_lr(1.0, step_size=10, gamma=0.5), [9, 10, 20])
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    return Schedule(
        {"value": value, "step_size": step_size, "gamma": gamma},
        lambda count, value, step_size, gamma: value * gamma ** torch.floor(count / step_size),
    )


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
    places = {f"milestone{i}": milestone for i, milestone in enumerate(milestones, 1)}
    return Schedule(
        {"value": value, "gamma": gamma, **places},
        lambda count, value, gamma, **places: (
            value * gamma ** sum((count >= place).double() for place in places.values())
        ),
    )


def exponential(value: PerModel, gamma: PerModel) -> Schedule:
    """Multiply by ``gamma`` at every update, as ``torch.optim.lr_scheduler.ExponentialLR`` does.

    Args:
        value: Value at count 0.
        gamma: Factor of each update.

    Example:
        >>> values(exponential(1.0, gamma=0.5), [0, 3])
        tensor([1.0000, 0.1250], dtype=torch.float64)
    """
    return Schedule({"value": value, "gamma": gamma}, lambda count, value, gamma: value * gamma**count)


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
            value * _line(start_factor, end_factor, _share(count, total_iters))
        ),
    )


def polynomial(value: PerModel, total_iters: PerModel, power: PerModel = 1.0) -> Schedule:
    """Decay to 0 along a polynomial, as ``torch.optim.lr_scheduler.PolynomialLR`` does.

    ``value * (1 - count / total_iters) ** power``

    Args:
        value: Value at count 0.
        total_iters: Updates until 0.
        power: Exponent.

    Example:
        >>> values(polynomial(1.0, total_iters=10, power=2.0), [0, 5, 20])
        tensor([1.0000, 0.2500, 0.0000], dtype=torch.float64)
    """
    return Schedule(
        {"value": value, "total_iters": total_iters, "power": power},
        lambda count, value, total_iters, power: value * (1 - _share(count, total_iters)) ** power,
    )


def cosine(value: PerModel, T_max: PerModel, eta_min: PerModel = 0.0) -> Schedule:
    """Half a cosine from ``value`` down to ``eta_min``, as in ``torch.optim.lr_scheduler.CosineAnnealingLR``.

    ``eta_min + (value - eta_min) * (1 + cos(pi * count / T_max)) / 2``

    Args:
        value: Value at count 0.
        T_max: Updates until ``eta_min``, after which the curve rises again.
        eta_min: Lowest value.

    Example:
        >>> values(cosine(1.0, T_max=100), [0, 50, 100])
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)

    References:
        Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """
    return Schedule(
        {"value": value, "T_max": T_max, "eta_min": eta_min},
        lambda count, value, T_max, eta_min: _half_cosine(value, eta_min, count / T_max),
    )


def cosine_restarts(value: PerModel, T_0: PerModel, T_mult: PerModel = 1, eta_min: PerModel = 0.0) -> Schedule:
    """Half a cosine again and again, as in ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts``.

    Args:
        value: Value at count 0 and after every restart.
        T_0: Updates until the first restart.
        T_mult: Length of each cosine relative to the one before, at least 1.
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


def one_cycle(
    max_lr: PerModel,
    total_steps: PerModel,
    pct_start: PerModel = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: PerModel = 25.0,
    final_div_factor: PerModel = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise to ``max_lr`` and decay to far below the initial value, as ``torch.optim.lr_scheduler.OneCycleLR`` does.

    Args:
        max_lr: Highest value.
        total_steps: Updates in the cycle. The last value is kept after it.
        pct_start: Fraction of the updates until the highest value.
        anneal_strategy: Shape of the curve between two values.
        div_factor: Highest value over initial value.
        final_div_factor: Initial value over last value.
        three_phase: Return to the initial value as fast as it rose, before decaying to the last one.

    Raises:
        HyperparameterError: if ``anneal_strategy`` is unknown.

    Example:
        >>> schedule = one_cycle(1.0, total_steps=101, pct_start=0.5, anneal_strategy="linear", div_factor=10.0)
        >>> values(schedule, [0, 49, 100]).tolist()
        [0.1, 0.982, 1e-05]

    References:
        Smith and Topin, "Super-convergence: very fast training of neural networks using large learning rates", 2019.
    """
    check_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))

    knobs = {"max_lr": max_lr, "total_steps": total_steps, "pct_start": pct_start}
    knobs |= {"div_factor": div_factor, "final_div_factor": final_div_factor}
    curve = _half_cosine if anneal_strategy == "cos" else _line

    def at(count: Tensor, **k: Tensor) -> Tensor:
        first = k["max_lr"] / k["div_factor"]
        last, top, end = first / k["final_div_factor"], k["pct_start"] * k["total_steps"] - 1, k["total_steps"] - 1
        back = 2 * top if three_phase else end
        rise = curve(first, k["max_lr"], _share(count, top))
        fall = curve(k["max_lr"], first if three_phase else last, _share(count - top, back - top))
        if three_phase:
            fall = torch.where(count <= back, fall, curve(first, last, _share(count - back, end - back)))
        return torch.where(count <= top, rise, fall)

    return Schedule(knobs, at)


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
    return Schedule(
        {"after": after, "steps": steps, "start_factor": start_factor},
        lambda count, after, steps, start_factor: (
            _line(start_factor, 1, _share(count, steps)) * after((count - steps).clamp(min=0))
        ),
    )


def chain(first: Schedule, *others: Schedule) -> Schedule:
    """The product of schedules, as ``torch.optim.lr_scheduler.ChainedScheduler`` of multiplicative ones.

    Args:
        first: The schedule whose initial value ``with_hyperparams`` replaces.
        others: Factors, ``factor1``, ``factor2`` and so on in the state.

    Example:
        >>> values(schedules.chain(exponential(1.0, gamma=0.5), step_lr(1.0, step_size=2)), [1, 2])
        tensor([0.5000, 0.0250], dtype=torch.float64)
    """
    return Schedule(
        {"first": first, **{f"factor{i}": other for i, other in enumerate(others, 1)}},
        lambda count, **factors: math.prod(factor(count) for factor in factors.values()),
    )


def plateau(
    metric: str,
    hyperparameter: str = "lr",
    mode: Literal["min", "max"] = "min",
    factor: Numbers = 0.1,
    patience: Numbers = 10,
    threshold: Numbers = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: Numbers = 0,
    min_lr: Numbers = 0.0,
    eps: Numbers = 1e-8,
) -> Callable[[S, Any], S]:
    """Reduce a hyperparameter where the metric stops improving, as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` does.

    The result is a callback for ``fit(callbacks=[...])``. It keeps no state: it determines from all epochs so far which
    members are due now. In a hand-written loop, call it once per epoch with a dict of metrics ``[epochs, M]``.

    Args:
        metric: Name in the history, one number per member.
        hyperparameter: Name of what to reduce; in a schedule, its initial value.
        mode: Whether lower or higher is better.
        factor: Factor of each reduction, below 1. This and the other numbers may be one per member.
        patience: Epochs without improvement before the one that causes a reduction.
        threshold: Smallest change that counts as an improvement.
        threshold_mode: Whether the threshold is relative to the best value.
        cooldown: Epochs after a reduction in which the lack of improvement does not count.
        min_lr: Lower bound of the hyperparameter.
        eps: Reductions up to this are not made.

    Returns:
        ``callback(state, history) -> state``, for training and optimizer states.

    Raises:
        HyperparameterError: if a number is out of range or a mode unknown, or (by the callback) if the metric is not one
            number per member or the state has no such hyperparameter.

    Example:
        >>> reduce, losses = plateau("loss", patience=1), []
        >>> state = sgd(lr=[0.1, 0.2]).init({"w": torch.zeros(2, 1)})
        >>> for loss in ([1.0, 1.0], [1.0, 0.9], [1.0, 0.8]):
        ...     losses.append(torch.tensor(loss))
        ...     state = reduce(state, {"loss": torch.stack(losses)})
        >>> state.hyperparams["lr"]
        tensor([0.0100, 0.2000], dtype=torch.float64)
    """
    check_choice("mode", mode, ("min", "max"))
    check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
    numbers = {"factor": factor, "patience": patience, "threshold": threshold, "cooldown": cooldown}
    numbers |= {"min_lr": min_lr, "eps": eps}
    for name, number in numbers.items():
        check(name, number, Range.DECAY if name == "factor" else Range.FINITE)
    sign = 1 if mode == "min" else -1

    def is_due(metrics: Tensor, k: dict[str, Tensor]) -> Tensor:
        best, bad = torch.full_like(k["eps"], math.inf), torch.zeros_like(k["eps"])
        resting, due = bad, bad > 0
        for value in sign * metrics:
            limit = best * (1 - sign * k["threshold"]) if threshold_mode == "rel" else best - k["threshold"]
            better = value < limit
            best = torch.where(better, value, best)
            bad = torch.where(better | (resting > 0), 0.0, bad + 1)
            due = bad > k["patience"]
            bad, resting = bad * ~due, torch.where(due, k["cooldown"], (resting - 1).clamp(min=0))
        return due

    def callback(state: S, history: Any) -> S:
        metrics = history[metric].detach().double()

        def reduced(held: Tensor) -> Tensor:
            if metrics.shape[1:] != held.shape:
                raise HyperparameterError(
                    f"metric '{metric}' has shape {list(metrics.shape[1:])} per epoch but {hyperparameter} has "
                    f"{list(held.shape)}; plateau needs one number per model"
                )
            k = {name: vector(name, number, len(held), held.device) for name, number in numbers.items()}
            lower = torch.maximum(held * k["factor"], k["min_lr"])
            return torch.where(is_due(metrics.to(held.device), k) & (held - lower > k["eps"]), lower, held)

        return with_hyperparams(state, **{hyperparameter: reduced})

    return callback


def _share(count: Tensor, total: Tensor) -> Tensor:
    return (count / total).clamp(0.0, 1.0)


def _line(start: Tensor, end: Tensor | float, share: Tensor) -> Tensor:
    return start + (end - start) * share


def _half_cosine(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    return end + (start - end) * (1 + torch.cos(math.pi * share)) / 2
