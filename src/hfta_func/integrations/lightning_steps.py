"""How steps of a LightningModule are called for one member, and one optimizer of those that M of them configure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import schedules
from hfta_func._types import ROWS
from hfta_func.errors import StackError, TraceError
from hfta_func.models.scalar_attributes import is_number
from hfta_func.run.history import Callback
from hfta_func.step.exchange import from_torch

Logged = dict[str, tuple[Tensor, "int | Tensor | None"]]
"""By name, a value and the ``batch_size`` that it was logged with."""


class TrainerFacts:
    """What a module finds as ``self.trainer``: what is known before training, and nothing in a step."""

    def __init__(self, **facts: Any):
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(vars(self)) or "nothing in a step; use self.log, hparams, or a schedule"
        raise TraceError(f"the module reads self.trainer.{name}, which an array does not have; it has {known}")


class _NoBatchIndex:
    """Stands for ``batch_idx`` in a step, which is one program for all batches."""

    def _refuse(self, *_: Any) -> Any:
        raise TraceError("the step computes with batch_idx, but it is one program for all batches; leave that out")

    # Python itself refuses other operators.
    __eq__ = __mod__ = __bool__ = __index__ = __format__ = _refuse


class _Hparams(dict[str, Any]):
    """``self.hparams`` in a step: common values, and numbers in which members differ."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"hparams has no '{name}' in a step, or it is no number and members differ in it")
        return self[name]


def share_hparams(members: list[Any]) -> dict[str, list[float]]:
    """Give all members one ``hparams`` with their common values; returns the numbers in which they differ."""
    columns = {name: [member.hparams.get(name) for member in members] for name in members[0].hparams}
    differing = {name: values for name, values in columns.items() if any(value != values[0] for value in values)}
    common = _Hparams({name: values[0] for name, values in columns.items() if name not in differing})
    for member in members:
        vars(member).update(_hparams=common, _hparams_initial=common)
    return {name: values for name, values in differing.items() if all(map(is_number, values))}


def record_into(model: Any, logged: Logged) -> None:
    """Let ``self.log`` and ``self.log_dict`` of a module fill a dict."""

    def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", batch_size: Any = None, **__: Any) -> None:
        if reduce_fx not in ("mean", torch.mean):
            raise StackError(f"'{name}' is logged with reduce_fx={reduce_fx!r}; an epoch's value is a mean over rows")
        value = torch.as_tensor(value).detach()
        if value.numel() != 1:
            raise StackError(f"'{name}' is logged with shape {list(value.shape)}; log one number, such as its mean")
        logged[name] = value.squeeze().double(), batch_size

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **options)

    model.log, model.log_dict = log, log_dict


Hooks = Mapping[str, Callable[..., Any]]
_BATCH_HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"


def batch_hooks(datamodule: Any, base: type) -> Hooks:
    """The hooks by which a datamodule, not the module, changes batches: those that it overrides."""
    names = [name for name in _BATCH_HOOKS if getattr(type(datamodule), name, None) not in (None, getattr(base, name))]
    return {name: getattr(datamodule, name) for name in names}


def _call(name: str, hooks: Hooks, model: Any, batch: Any, hparams: Mapping[str, Any]) -> tuple[Any, Logged]:
    """What a step returns, and what it logs."""
    before, logged = (model._trainer, model._hparams), {}
    start, move, end = (hooks.get(hook) or getattr(model, hook) for hook in _BATCH_HOOKS)
    given = end(move(start(batch, 0), model.device, 0), 0), _NoBatchIndex()
    step, numbers = getattr(model, name), {path: value for path, value in hparams.items() if "." not in path}
    model._trainer, model._hparams = TrainerFacts(), _Hparams(model._hparams | numbers)
    record_into(model, logged)
    try:
        return step(*given[: len(inspect.signature(step).parameters)]), logged
    finally:
        model._trainer, model._hparams = before
        del model.log, model.log_dict


def loss_of(rows_of: Callable[[Any], int], hooks: Hooks, model: Any, batch: Any, hparams: Any) -> tuple[Any, Any]:
    """The loss of ``training_step``, and the sums over rows of what it logs."""
    loss, logged = _call("training_step", hooks, model, batch, hparams)
    sums: dict[str, Tensor] = {}
    for name, (value, size) in logged.items():
        sums[name + ROWS] = torch.as_tensor(rows_of(batch) if size is None else size, device=value.device).double()
        sums[name] = value * sums[name + ROWS]
    return loss["loss"] if isinstance(loss, Mapping) else loss, sums


def metrics_of(rows_of: Callable[[Any], int], hooks: Hooks, model: Any, batch: Any, hparams: Any) -> dict[str, Tensor]:
    """What ``validation_step`` logs, to be weighted by the rows of batches."""
    _, logged = _call("validation_step", hooks, model, batch, hparams)
    metrics = {name: value for name, (value, _) in logged.items()}
    for name, (value, size) in logged.items():
        if size is not None:
            metrics[name + ROWS] = torch.as_tensor(size / rows_of(batch), device=value.device).double()
            metrics[name] = value * metrics[name + ROWS]
    return metrics


def optimizer_of(members: list[Any], core: Any, updates: Sequence[int], epochs: int) -> tuple[Any, list[Callback]]:
    """One optimizer of those that the members configure, and callbacks for schedulers that follow a metric.

    ``updates`` are those of each member in an epoch.
    """
    optimizers, configs = [], []
    for number, member in enumerate(members):
        facts, member.trainer = member.trainer, TrainerFacts(**vars(member.trainer), model=member)
        several, schedulers, monitor = core._configure_optimizers(member.configure_optimizers())
        member.trainer = facts
        if len(several) != 1 or len(schedulers) > 1:
            cure = "several networks train by hfta.joint, and several schedulers as one ChainedScheduler"
            raise StackError(f"model {number}: {len(several)} optimizers and {len(schedulers)} schedulers; {cure}")
        optimizers += several
        configs += core._configure_schedulers_automatic_opt(schedulers, monitor)
    if not configs:
        return from_torch(optimizers, models=members), []
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
    # Lightning asks after each update whether the number of the batch is a multiple of the frequency.
    batches = members[0].trainer.accumulate_grad_batches if interval == "step" else 1
    frequency = math.lcm(frequency, batches) // batches
    if interval == "step" and any(each % frequency for each in updates):
        raise StackError(f"a scheduler steps every {frequency} of {updates} updates; use a divisor of these")
    stages = [max(1, (epochs if interval == "epoch" else epochs * each) // frequency) for each in updates]
    every = [frequency * (each if interval == "epoch" else 1) for each in updates]
    return from_torch(optimizers, followed, models=members, steps=stages, every=every), []


def _plateau(monitor: str, followed: Sequence[Any]) -> Callback:
    """The callback that reduces learning rates as schedulers of class ReduceLROnPlateau do."""
    names = "factor", "patience", "threshold", "cooldown", "eps"
    numbers = {name: [getattr(each, name) for each in followed] for name in names}
    lowest = [{*each.min_lrs} for each in followed]
    modes = {(each.mode, each.threshold_mode) for each in followed}
    if len(modes) > 1 or any(len(values) > 1 for values in lowest):
        raise StackError("members or groups differ in the mode or min_lr of ReduceLROnPlateau; give all the same")
    ((mode, threshold_mode),) = modes
    numbers["min_lr"] = [values.pop() for values in lowest]
    return schedules.plateau(monitor, "lr", mode, threshold_mode=threshold_mode, **numbers)
