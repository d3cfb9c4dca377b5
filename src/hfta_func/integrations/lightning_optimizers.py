"""One optimizer of those that M LightningModules configure, and their schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfta_func import schedules
from hfta_func.errors import StackError
from hfta_func.integrations.lightning_steps import TrainerFacts
from hfta_func.run.history import Callback
from hfta_func.step.exchange import from_torch


def optimizer_of(members: list[Any], core: Any, updates: Sequence[int], epochs: int) -> tuple[Any, list[Callback]]:
    """One optimizer of those that the members configure, and callbacks for schedulers that follow a metric.

    ``updates`` are those of each member in an epoch.
    """
    optimizers, configs = [], []
    for number, member in enumerate(members):
        facts, member.trainer = member.trainer, TrainerFacts(**vars(member.trainer), model=member)
        configured = member.configure_optimizers()
        member.trainer = facts
        if configured is None:
            raise StackError(f"model {number}: configure_optimizers returns None, so there is nothing to train")
        several, schedulers, monitor = core._configure_optimizers(configured)
        if len(several) != 1 or len(schedulers) > 1:
            cure = "several networks train by hfta.joint, and several schedulers as one ChainedScheduler"
            raise StackError(f"model {number}: {len(several)} optimizers and {len(schedulers)} schedulers; {cure}")
        optimizers += several
        configs.append(core._configure_schedulers_automatic_opt(schedulers, monitor))
    if not configs[0]:
        return from_torch(optimizers, models=members), []
    configs = [config for each in configs for config in each]
    kinds = [(each.interval, each.frequency, each.reduce_on_plateau, each.monitor) for each in configs]
    if len(configs) < len(members) or len({*kinds}) > 1:
        raise StackError("members differ in the interval, frequency or monitor of their schedulers; give all the same")
    (interval, frequency, on_plateau, monitor), followed = kinds[0], [config.scheduler for config in configs]
    if on_plateau:
        if (interval, frequency) != ("epoch", 1):
            raise StackError(f"ReduceLROnPlateau has interval={interval!r}, frequency={frequency}; use 'epoch', 1")
        return from_torch(optimizers, models=members), [_plateau(monitor, followed)]
    if not all(updates):
        raise StackError("schedulers need the number of batches, which the dataloader has not; give it a __len__")
    odd = [each for each in updates if interval == "step" and each % frequency]
    if odd:
        raise StackError(f"a scheduler steps every {frequency} of {odd[0]} updates; use a divisor of these")
    stages = [max(1, (epochs if interval == "epoch" else epochs * each) // frequency) for each in updates]
    every = [frequency * (each if interval == "epoch" else 1) for each in updates]
    return from_torch(optimizers, followed, models=members, steps=stages, every=every), []


def _plateau(monitor: str, followed: Sequence[Any]) -> Callback:
    """The callback that reduces learning rates as schedulers of class ReduceLROnPlateau do."""
    numbers = {
        name: [getattr(each, name) for each in followed] for name in ("factor", "patience", "threshold", "cooldown")
    }
    lowest = [{*each.min_lrs} for each in followed]
    modes = {(each.mode, each.threshold_mode) for each in followed}
    if len(modes) > 1 or any(len(values) > 1 for values in lowest):
        raise StackError("members or groups differ in the mode or min_lr of ReduceLROnPlateau; give all the same")
    ((mode, threshold_mode),) = modes
    numbers |= {"min_lr": [values.pop() for values in lowest], "eps": [each.eps for each in followed]}
    return schedules.plateau(monitor, "lr", mode, threshold_mode=threshold_mode, **numbers)
