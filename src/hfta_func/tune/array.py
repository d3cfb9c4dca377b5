"""Arrays of one architecture, and the function that trains them, in this process or in a worker."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.run.background import replayed
from hfta_func.run.evaluation import Evaluate, make_evaluation
from hfta_func.run.fit import check_loader, ctrl_c
from hfta_func.run.run import Run
from hfta_func.run.trainer import END, LocalTrainer

Build = Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], "Array"]
"""``build(fixed, members) -> Array``: makes the members of an array."""


class Array(NamedTuple):
    """What trains an array: the arguments of :func:`hfta_func.fit`.

    Args:
        step: A training step, compiled or not, that works for any number of members.
        state: ``step.init(...)`` of the members asked for, in their order.
        loader: An :class:`~hfta_func.ArrayLoader` for these members, or, for steps with ``batch_dims=None``, any
            iterable over the batches of an epoch.
        evaluate: As that of :func:`hfta_func.fit`, for any number of members.
        model: Any module of the architecture, which exported models are made of.
    """

    step: Callable[[Any, Any], tuple[Any, dict[str, Tensor]]]
    state: Any
    loader: Iterable[Any]
    evaluate: Evaluate | None = None
    model: nn.Module | None = None

    @classmethod
    def of(
        cls,
        experiment: hfta.Experiment,
        data: Any,
        batch_size: int | None = None,
        *,
        evaluate: Any = None,
        **options: Any,
    ) -> Array:
        """The array of an :class:`~hfta_func.Experiment`, with the arguments of its ``fit`` that say what it trains on.

        Args:
            experiment: It trains what it was made from; its own state stays as it is.
            data: A tree of tensors with one row per sample, or an iterable over batches.
            batch_size: Rows per member and batch.
            evaluate: Data for the experiment's metric, or what :func:`hfta_func.fit` takes.
            options: Further arguments of :class:`~hfta_func.ArrayLoader`.
        """
        given = experiment.arguments(data, batch_size, evaluate=evaluate, **options)
        return cls(experiment.step, experiment.state, given["loader"], given["evaluate"], experiment.model)


class Segment(NamedTuple):
    """The result of a :class:`Trainer`: the state, metrics of every epoch with one value per member, and seconds."""

    state: Any
    epochs: list[dict[str, list[float]]]
    seconds: float
    interrupted: bool


class Trainer:
    """Trains members of each group by the group's array; a copy in another process builds these arrays there."""

    label = "build"

    def __init__(self, build: Build):
        self.build = build
        self.arrays: dict[int, Array] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Every process builds its arrays, because parts of them may be impossible to send.
        return {"build": self.build, "arrays": {}}

    def __call__(
        self,
        group: tuple[int, Mapping[str, Any], Mapping[str, Any]],
        state: Any,
        keys: Tensor | None,
        starts: Sequence[int],
        epochs: int,
        size: int,
        seconds: float | None,
    ) -> Segment:
        """Train members, each from its start, for some more epochs, or until the first one that ends after some seconds.

        ``group`` is their group's number, its non-fusible values and the configuration of one of its members. ``state`` is
        not written. Without ``keys`` for the loader, all see the same batches. Inactive members are added up to ``size``.
        """
        number, fixed, first = group
        if number not in self.arrays:
            row = {name: [value] for name, value in first.items() if name not in fixed}
            self.arrays[number] = self.build(dict(fixed), row)
        step, like, loader, evaluate, _ = self.arrays[number]
        count, state = len(starts), moved(state, like.keys.device)
        # A step that writes its state must not write what is needed if it fails.
        members = [*range(count)] + [0] * (size - count)
        if size > count or getattr(getattr(step, "options", None), "donate", True):
            state = hfta.take(state, members)
        if size > count:
            state = state._replace(active=state.active & (torch.arange(size, device=state.active.device) < count))
        if isinstance(loader, hfta.ArrayLoader) and keys is not None:
            loader = loader.of_members(keys[members], [starts[member] for member in members])
        elif isinstance(loader, hfta.ArrayLoader):
            loader.load_state_dict({"epoch": starts[0], "batches": 0})
        check_loader(loader, step, state)
        began, run = time.perf_counter(), Run(state, loader, evaluate=make_evaluation(step, evaluate, state))
        trainer = LocalTrainer(replayed(step, epochs * operator.length_hint(loader) or None))
        with ctrl_c() as pressed:
            # Members that are not active any more are measured, too, as they would be beside others.
            while len(run.history) < epochs and not pressed():
                run.begin_epoch(step)
                if trainer.segment(run, END, pressed):
                    run.end_epoch()
                if seconds is not None and time.perf_counter() - began >= seconds:
                    break
        seen = run.history.epochs
        measured = [{name: each[:count].tolist() for name, each in one.items() if each.dim() == 1} for one in seen]
        state = hfta.take(run.state, slice(count)) if size > count else run.state
        return Segment(state, measured, time.perf_counter() - began, pressed())


def moved(state: Any, device: torch.device) -> Any:
    """A state on a device, without copies of what is there already."""
    return optree.tree_map(lambda leaf: leaf.to(device), state)
