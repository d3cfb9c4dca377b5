"""The ways to train M models that are compared."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import hfta_func
from benchmarks.workloads import OWN, WORKLOADS, Job, Run
from hfta_func.run.kept import graph, options

SERIAL, ONE_THREAD, PROCESSES, PER_CORE = "serial", "serial, one thread", "processes", "process per core"
"""What all others are compared with; the same on one thread, which small models may be faster on; a process for each model;
a process for each core, with its share of the models."""
IN_FIT, RUN = "array in fit", 5000
"""An array as :func:`hfta_func.fit` trains it for so many steps if nothing else is said: these are replayed, and write
only what an earlier one of them has made."""
MANY, STEPS = "array many compiled", 8
"""An array whose calls take so many steps each, a multiple of the batches that come round."""
WORKERS = "array workers", "array workers compiled"
"""An array in a process for each core, with its share of the models, as ``fit(workers=)`` trains it."""
REPLAYED = "serial replayed", "array replayed"
"""The loop and an array, compiled and launched as CUDA graphs."""


def serial(job: Job, compiled: bool | str = False, kernels: str = "fused") -> Run:
    """One model after another in plain PyTorch; ``compiled`` may name a mode of ``torch.compile``."""
    count = len(job.batches[0][0])
    runs = [job.solo(member, compiled, kernels) for member in range(count)]

    def step(batch: Any) -> Tensor:
        return torch.stack([run.step(own) for run, *own in zip(runs, *batch, strict=True)])

    return Run(step, lambda: [run.held() for run in runs])


def dense(job: Job) -> Run:
    """One model on all samples at once: about what the same arithmetic costs at least."""
    run = job.solo(0, False)
    return run._replace(step=lambda batch: run.step(tuple(leaf.flatten(0, 1) for leaf in batch)))


def stock(job: Job, compiled: bool = False) -> Run:
    """An array under PyTorch's own rules of ``vmap``, which the loader has displaced."""
    hfta_func.rules.uninstall()
    run = job.stock(compiled)

    def step(batch: Any) -> Tensor:
        losses = run.step(batch)
        if hfta_func.rules.is_installed():
            raise RuntimeError("the rules of this package are in force")
        return losses

    return run._replace(step=step)


def array(job: Job, compiled: bool = False, replayed: bool = False, steps: int | None = None, **own: Any) -> Run:
    """An array that changes its state in place; of ``steps`` that are replayed; ``own`` are options of its step."""
    step, state = job.array(**own)
    step = step if steps is None else step.replayed(steps)
    run, how = _compiled(step, state, replayed) if compiled else step, dict[str, bool]()
    made = {"owned": True} if steps is not None and isinstance(step, hfta_func.step.TrainStep) else {}

    def train(batch: Any) -> Tensor:
        nonlocal state, how
        state, metrics = run(state, batch, **how)
        how = made
        return metrics["loss"]

    return Run(train, lambda: state)


def _compiled(step: Callable[..., Any], state: Any, replayed: bool = False) -> Callable[..., Any]:
    """As :func:`hfta_func.compile` does it, on a GPU as a CUDA graph or without."""
    first, *others = options(step, state, optree.tree_leaves(state)[0].device.type)
    is_replay = bool(first.get("triton.cudagraphs"))
    return graph(step, others[0] if is_replay and not replayed else first)


def many(job: Job) -> Run:
    """An array whose compiled calls take some steps each, with the batches of these; every step has its own losses."""
    step, state = job.array()
    run, number, losses = _compiled(step.many, state), 0, Tensor()
    batches = itertools.islice(itertools.cycle(job.batches), STEPS)
    ahead = tuple(map(torch.stack, zip(*batches, strict=True)))

    def train(batch: Any) -> Tensor:
        nonlocal state, number, losses
        if number % STEPS == 0:
            state, metrics = run(state, ahead)
            losses = metrics["loss"]
        number += 1
        return losses[(number - 1) % STEPS]

    return Run(train, lambda: state)


def jax(job: Job) -> Run:
    """The same in JAX, for the workloads that are written there too."""
    return _peer("jax_peer", "pip install 'hfta_func[peers]'").run(job)


def hfta(job: Job) -> Run:
    """The same with the operators and optimizers of the original HFTA, for the workloads that are written with them."""
    return _peer("hfta_peer", "pip install git+https://github.com/UofT-EcoSystem/hfta, or --hfta-source DIR").run(job)


def _peer(module: str, cure: str) -> Any:
    try:
        return importlib.import_module(f"benchmarks.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed; {cure}", name=error.name) from None


MODES: dict[str, Callable[[Job], Run]] = {
    SERIAL: serial,
    "array": array,
    "array auto": lambda job: array(job, chunk_size="auto"),
    IN_FIT: lambda job: array(job, steps=RUN, donate=False),
    "array compiled": lambda job: array(job, compiled=True),
    REPLAYED[1]: lambda job: array(job, compiled=True, replayed=True),
    MANY: many,
    WORKERS[0]: array,
    WORKERS[1]: lambda job: array(job, compiled=True),
    PER_CORE: serial,
    PROCESSES: serial,
    "stock vmap": stock,
    "stock vmap compiled": lambda job: stock(job, compiled=True),
    "dense": dense,
    "JAX": jax,
    "HFTA": hfta,
    "serial compiled": lambda job: serial(job, compiled=True),
    REPLAYED[0]: lambda job: serial(job, compiled="reduce-overhead"),
    ONE_THREAD: serial,
    "serial foreach": lambda job: serial(job, kernels="foreach"),
    "serial, default optimizer": lambda job: serial(job, kernels="default"),
    "serial, default allocator": serial,
}
"""In the order in which they take their turns: arrays and their nearest rivals together, where memory does not hold all."""

NOT_FOR = {
    MANY: tuple(name for name in WORKLOADS if name != "mlp"),
    "array auto": ("dcgan",),
    REPLAYED[1]: ("dcgan",),
    "serial foreach": ("resnet", "transformer", "bert"),
    "JAX": tuple(name for name in OWN if name not in ("mlp", "lenet")),
    "HFTA": tuple(name for name in OWN if name != "mlp"),
}
"""Workloads that a mode is not for: those whose graph takes long to compile, and whose calls are little of a step; a step of
its own has no ``chunk_size``; Adadelta has no kernels but ``foreach``; and networks that are not written for the peers."""
