"""One model trained in plain PyTorch, for comparison."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.common.errors import BadInput, Interrupted, first_line
from examples.common.flags import Flags
from examples.common.task import (
    Batch,
    Clock,
    Metrics,
    Outcome,
    Task,
    autocast,
    evaluate,
    execute,
    find_device,
    print_epoch,
    save,
)

Generators = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
"""How to read and to write the states of those that noise comes from."""


def train(task: Task, flags: Flags, keep: Path | None) -> Outcome:
    """Train the one member of ``flags``; ``keep`` is the file that holds the run, to go on with if it is there."""
    device, amp = find_device(flags.device), flags.amp
    seed_noise(device, flags.seeds[0])
    model = task.factory().to(device)
    optimizer, scheduler = make_optimizer(task.optimizer, model, flags)
    run: Any = torch.compile(model) if flags.compile else model

    def step(batch: Batch) -> Metrics:
        optimizer.zero_grad()
        batch = task.training_batch(batch)
        with autocast(device, amp):
            loss = task.loss_fn(run, batch)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    @torch.no_grad()
    def test() -> Metrics:
        model.eval()
        with autocast(device, amp):
            metrics = evaluate(
                lambda rows: task.metric_fn(model, task.prepare(rows)), task.test, flags.batch_size, device
            )
        model.train()
        return task.derive(metrics)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    history, last = fit(step, test, task.train, parts, flags, keep, end_of_epoch=scheduler.step)
    return Outcome(history, last, {"model": [model]})


def fit(
    step: Callable[[Batch], Metrics],
    test: Callable[[], Metrics],
    data: Batch,
    parts: dict[str, Any],
    flags: Flags,
    keep: Path | None,
    end_of_epoch: Callable[[], None] = lambda: None,
) -> tuple[list[Metrics], Metrics]:
    """The loop over epochs, with a line for each; returns the history and the last test.

    Args:
        step: Trains on one batch.
        test: Metrics after an epoch.
        data: One row per sample.
        parts: Everything with a ``state_dict`` that ``step`` changes.
        flags: The flags of the one member.
        keep: File that holds the run, to go on with if it is there.
        end_of_epoch: Called after the last step of each epoch.
    """
    device, history, last = find_device(flags.device), [], {}
    generators = _generators(device)

    def tested() -> Metrics:
        # The test draws other noise, so that training draws the same with and without it.
        noise = {name: read() for name, (read, _) in generators.items()}
        seed_noise(device, flags.seeds[0])
        metrics = single(test())
        for name, (_, write) in generators.items():
            write(noise[name])
        return metrics

    try:
        if keep is not None and keep.exists():
            history = _restore(keep, parts, generators)
        data = tuple(leaf.to(device) for leaf in data)
        for epoch in range(len(history) + 1, flags.epochs + 1):
            clock, sums, batches = Clock(device), {}, 0
            for rows in _order(flags, epoch, len(data[0])):
                metrics = step(tuple(leaf[rows.to(device)] for leaf in data))
                execute(device)
                batches += 1
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value
            end_of_epoch()
            metrics = {name: value.float().cpu() / batches for name, value in sums.items()}
            seconds = torch.tensor(clock.seconds())
            last = tested() if flags.eval else {}
            history.append({**single(metrics), **last, **single({"seconds": seconds})})
            print_epoch(epoch, history[-1])
            if keep is not None:
                states = {name: part.state_dict() for name, part in parts.items()}
                noise = {name: read() for name, (read, _) in generators.items()}
                save({"history": history, "noise": noise, **states}, keep)
        return history, last or tested()
    except KeyboardInterrupt:
        raise Interrupted(history) from None


def seed_noise(device: torch.device, seed: int) -> None:
    """Start what plain PyTorch draws from on the CPU and the device; XLA is not reached by ``torch.manual_seed``."""
    torch.manual_seed(seed)
    if device.type == "xla":
        importlib.import_module("torch_xla").manual_seed(seed % 2**63)


def _generators(device: torch.device) -> Generators:
    generators: Generators = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    if device.type == "xla":
        xla = importlib.import_module("torch_xla.core.xla_model")
        generators["xla"] = xla.get_rng_state, xla.set_rng_state
    return generators


def _order(flags: Flags, epoch: int, rows: int) -> Iterator[Tensor]:
    """Numbers of the rows of every full batch, in an order of seed and epoch."""
    generator = torch.Generator().manual_seed((flags.seeds[0] * 1_000_003 + epoch) % 2**63)
    size = min(flags.batch_size, rows)
    return iter(torch.randperm(rows, generator=generator)[: rows // size * size].split(size))


def _restore(keep: Path, parts: dict[str, Any], generators: Generators) -> list[Metrics]:
    try:
        # Each part moves its tensors to the device; states of generators stay on the CPU.
        kept = torch.load(keep, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        for name in kept["noise"].keys() & generators.keys():
            generators[name][1](kept["noise"][name])
        return kept["history"]
    except Exception as error:
        raise BadInput(f"{keep} does not hold this run: {first_line(error)}; remove it to begin anew") from None


def single(metrics: Metrics) -> Metrics:
    """Metrics of one model, as those of an array of one."""
    return {name: value.reshape(1) for name, value in metrics.items()}


def make_optimizer(name: str, model: nn.Module, flags: Flags, **kernels: bool) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of a model, and its schedule by epochs; ``kernels`` is ``fused=True`` or ``foreach=True``."""
    hyperparams = {name: values[0] for name, values in flags.per_model().items()}
    try:
        if name == "adam":
            betas = hyperparams.get("beta1", 0.9), hyperparams.get("beta2", 0.999)
            decay = hyperparams.get("weight_decay", 0.0)
            options = {"lr": hyperparams["lr"], "betas": betas, "weight_decay": decay}
            optimizer = torch.optim.Adam(model.parameters(), **options, **kernels)
        else:
            optimizer = torch.optim.Adadelta(model.parameters(), lr=hyperparams["lr"], **kernels)
    except ValueError as error:
        raise BadInput(str(error)) from None
    every, gamma = hyperparams.get("step_size", 1), hyperparams.get("gamma", 1.0)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, every, gamma)
