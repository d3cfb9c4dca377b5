"""All members of an array trained as one program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hfta_func as hfta
from examples.common.errors import BadInput, Interrupted, first_line
from examples.common.flags import Flags
from examples.common.task import Batch, Clock, Metrics, Outcome, Task, evaluate, find_device, print_epoch


def train(task: Task, flags: Flags, keep: Path | None) -> Outcome:
    """Train one member per seed.

    Args:
        task: What to train.
        flags: The flags of the array.
        keep: File that holds the run; training continues from it if it exists.
    """
    device, model = find_device(flags.device), task.factory()
    step, state, loader = prepare(task, flags, device, **({"chunk_size": "auto"} if flags.chunk_size == "auto" else {}))
    autocast = torch.bfloat16 if flags.amp else None
    measure = hfta.make_eval_step(
        model, lambda model, batch: task.metric_fn(model, task.prepare(batch)), autocast=autocast
    )

    def test(state: hfta.step.TrainState) -> Metrics:
        # Every batch gets different noise.
        numbers = itertools.count()

        def metrics(rows: Batch) -> Metrics:
            return measure(state._replace(keys=hfta.random.fold_in(state.keys, next(numbers))), rows)

        return task.derive(evaluate(metrics, task.test, flags.batch_size, device))

    state, history, last = fit(step, state, loader, test, flags, keep)
    return Outcome(history, last, {"model": hfta.unstack_params(model, state.params, state.buffers)})


def prepare(
    task: Task, flags: Flags, device: torch.device, **options: Any
) -> tuple[hfta.step.TrainStep, hfta.step.TrainState, hfta.ArrayLoader]:
    """The step of an array, made with further ``options``, the initial state, and the loader."""
    try:
        loader = make_loader(task.train, task.training_batch, flags, device)
        step = hfta.make_train_step(
            task.factory(),
            task.loss_fn,
            OPTIMIZERS[task.optimizer](flags.per_model(), len(loader)),
            autocast=torch.bfloat16 if flags.amp else None,
            **{"donate": True, **options},
        )
        params, buffers = initial(task.factory, flags.seeds, device)
        return step, step.init(params, buffers, seeds=flags.seeds), loader
    except hfta.HFTAError as error:
        raise BadInput(str(error)) from None


def initial(factory: Callable[[], nn.Module], seeds: Sequence[int], device: torch.device) -> hfta.models.Stacked:
    """The models that ``torch.manual_seed(seed); factory()`` makes for the seeds, stacked, on the device."""
    stacked = hfta.init_params(factory, seeds)
    return hfta.models.Stacked(*({path: leaf.to(device) for path, leaf in tree.items()} for tree in stacked))


def make_loader(data: Batch, transform: Callable[[Batch], Batch], flags: Flags, device: torch.device) -> Any:
    """Batches in a different order for every member; a smaller last batch is left out, so that only one shape is compiled."""
    size = min(flags.batch_size, len(data[0]))
    return hfta.ArrayLoader(data, size, seeds=flags.seeds, drop_last=True, device=device, transform=transform)


def fit(
    step: Callable[..., Any], state: Any, loader: Any, test: Callable[[Any], Metrics], flags: Flags, keep: Path | None
) -> tuple[Any, list[Metrics], Metrics]:
    """``hfta.fit`` that prints a line for every epoch; returns the state, the history, and the last test metrics."""
    clock, finished, last = Clock(state.keys.device), [], {}

    def after_epoch(state: Any) -> Metrics:
        nonlocal last
        seconds = torch.full((len(flags.seeds),), clock.seconds())
        last = test(state) if flags.eval else {}
        return {**last, "seconds": seconds}

    def report(state: Any, history: hfta.run.History) -> None:
        finished[:] = history.epochs
        print_epoch(len(history), history.epochs[-1])
        clock.restart()

    options = {"evaluate": after_epoch, "callbacks": [report], "progress": False, "compile": flags.compile}
    try:
        state, history = hfta.fit(step, state, loader, epochs=flags.epochs, resume=keep, **options)
        if history.interrupted:
            finished[:] = history.epochs
            raise KeyboardInterrupt
        return state, history.epochs, last or test(state)
    except KeyboardInterrupt:
        raise Interrupted(finished) from None
    except (hfta.errors.CheckpointError, hfta.errors.StateError) as error:
        raise BadInput(first_line(error)) from None


def adam(hyperparams: dict[str, tuple[Any, ...]], batches: int) -> hfta.GradientTransformation:
    """Adam with one number per member for everything that ``knobs`` has."""
    betas = hyperparams.get("beta1", 0.9), hyperparams.get("beta2", 0.999)
    # The plain number 0 removes weight decay from the program.
    decay = hyperparams.get("weight_decay", (0.0,))
    return hfta.adam(lr=_rate(hyperparams, batches), betas=betas, weight_decay=decay if any(decay) else 0.0)


def adadelta(hyperparams: dict[str, tuple[Any, ...]], batches: int) -> hfta.GradientTransformation:
    """Adadelta with a learning rate per member."""
    return hfta.adadelta(lr=_rate(hyperparams, batches))


def _rate(hyperparams: dict[str, tuple[Any, ...]], batches: int) -> hfta.schedules.PerModel:
    if "gamma" not in hyperparams:
        return hyperparams["lr"]
    # Schedules count updates, the flag counts epochs.
    steps = [epochs * batches for epochs in hyperparams["step_size"]]
    return hfta.schedules.step_lr(hyperparams["lr"], step_size=steps, gamma=hyperparams["gamma"])


OPTIMIZERS = {"adam": adam, "adadelta": adadelta}
