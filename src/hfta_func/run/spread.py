"""An array in the hands of an executor, and the choice of who trains."""

from __future__ import annotations

import copy
import itertools
import queue
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import concat, num_models, take, tree_map
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.executors import Executor, Here, Step, Watch
from hfta_func.run.history import Running
from hfta_func.run.part import cpu, speed
from hfta_func.run.processes import Folder, Place, cores
from hfta_func.run.workers import LOOK, NEVER, Workers, places, renumbered, shares
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState

Parts = list[tuple[int, int, int]]
"""From where to where each goes, and for workers with which limit."""
_TRIAL = 0.5
"""Seconds in which steps are timed to choose a number of processes."""


class Segment:
    """Trains a segment of a part of the members: what is sent to workers.

    Args:
        step: The training step.
        loader: The loader of all members, if it deals to parts of them.
        kind: Type of the device to train on.
        compile: Whether the step is compiled while it trains.
    """

    label = "the step or the loader"

    def __init__(self, step: Step, loader: ArrayLoader | None, kind: str, compile: bool):
        self._step = background.compile(step) if compile else step
        self._loader, self._kind = loader, kind

    def __call__(
        self,
        state: TrainState,
        places: slice | Tensor,
        position: Any,
        batches: list[Any] | None,
        limit: int | None,
        control: tuple[Place, int] | None,
    ) -> dict[str, Any]:
        """Train, on the batches for the loader's members at some places, from a position, or on those given.

        ``control`` is where it is watched.
        """
        loader: Any = batches
        if self._loader is not None:
            loader = self._loader.take(places)
            loader.load_state_dict(position)
        if self._kind == "cpu":
            # States come ready made, and where they are made the allocator is set up.
            keep_memory_once()
        running = Running()
        state = tree_map(lambda leaf: leaf.to(self._kind), state)
        state, ended = Here(self._step, loader, ()).segment(state, running, limit, _watched(control))
        position = None if self._loader is None else loader.state_dict()
        found = tree_map(cpu, running.state_dict())
        return {"state": tree_map(cpu, state), "ended": ended, "running": found, "position": position}


class Spread:
    """The :class:`Segments` of an array that an executor trains, a part of the members in each call.

    Progress is seen, and Ctrl-C heeded, after every step by workers of this machine, and after every segment by others.

    Args:
        step: The training step.
        batches: What is left of the first epoch.
        loader: All later epochs.
        executor: Who trains.
        compile: Whether the step is compiled while it trains.
    """

    def __init__(self, step: Step, batches: Any, loader: Any, executor: Executor, compile: bool):
        self._step, self._loader, self._executor, self._compile = step, loader, executor, compile
        self._dealt = isinstance(loader, ArrayLoader)
        self._left = None if self._dealt else [*batches]
        self._function: Segment | None = None
        self._folder = Folder() if executor.shares else None
        # By number of parts: how many steps each has made, and after which one all stop.
        self._controls: dict[int, Place] = {}
        self.kept: Tensor | None = None
        """The members of the loader's batches that are trained; all if None."""

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.forget()
        if self._folder is not None:
            self._folder.close()

    def follow(self, loader: Any) -> None:
        """See :class:`Segments`."""
        self._loader, self._left, self._function = loader, None, None
        self._executor.forget()

    def segment(self, state: TrainState, running: Running, limit: int | None, watch: Watch) -> tuple[TrainState, bool]:
        """See :class:`Segments`."""
        watch.begin()
        device = state.keys.device
        if self._function is None:
            self._function = Segment(self._step, self._loader if self._dealt else None, device.type, self._compile)
        if not self._dealt and self._left is None:
            self._left = [*self._loader]
        size = num_models(state)
        parts = _parts(size, self._executor)
        position = self._loader.state_dict() if self._dealt else None
        dims, orders = getattr(self._step, "batch_dims", 0), {}
        control = self._control(len(parts))
        for place, (low, high, _) in enumerate(parts):
            where = places(self.kept, low, high)
            batches = None if self._dealt else [take_batch(dims, batch, where) for batch in (self._left or [])[:limit]]
            watched = None if control is None else (control, place)
            mine = {"state": take(state, slice(low, high)), "places": where, "position": position}
            orders[place] = {**mine, "batches": batches, "limit": limit, "control": watched}
        ticked, answers = self._train(parts, orders, control, watch)
        found = self._level(parts, orders, answers, watch)
        done = found[0]["running"]["batches"]
        running.join([
            {**answer["running"], **{name: _on(answer["running"][name], device) for name in ("sums", "failed")}}
            for answer in found
        ])  # fmt: skip
        if self._dealt:
            self._loader.load_state_dict(found[0]["position"])
        ended = all(answer["ended"] for answer in found)
        if self._left is not None:
            self._left = None if ended else self._left[done:]
        for _ in range(ticked, done):
            watch.tick()
        after = concat([answer["state"] for answer in found]) if len(found) > 1 else found[0]["state"]
        return tree_map(lambda leaf: leaf.to(device), after), ended

    def _control(self, count: int) -> Place | None:
        """Where that many parts of a segment are watched; None if they train elsewhere."""
        if self._folder is None:
            return None
        if count not in self._controls:
            self._controls[count] = self._folder.write(torch.zeros(count + 1, dtype=torch.int64))
        cells = self._controls[count].tensor()
        cells[:] = 0
        cells[-1] = NEVER
        return self._controls[count]

    def _train(
        self, parts: Parts, orders: dict[int, dict[str, Any]], control: Place | None, watch: Watch
    ) -> tuple[int, dict[int, Any]]:
        """Have some parts trained; returns how many steps have been shown, and the answers by place."""
        assert self._function is not None
        cells = None if control is None else control.tensor()
        calls = {self._executor.submit(self._function, parts[place][2], **orders[place]): place for place in orders}
        answers: dict[int, Any] = {}
        ticked = 0
        while len(answers) < len(orders):
            try:
                number, answer = self._executor.wait(None if cells is None else LOOK)
            except queue.Empty:
                assert cells is not None
                made = int(cells[:-1].min())
                for _ in range(ticked, made):
                    watch.tick()
                ticked = max(ticked, made)
                if watch.stopped() and cells[-1] == NEVER:
                    # All after the same step, which none has begun yet.
                    cells[-1] = cells[:-1].max() + 2
                continue
            if isinstance(answer, Exception):
                raise renumbered(answer, range(*parts[calls[number]][:2]))
            answers[calls[number]] = answer
        return ticked, answers

    def _level(
        self, parts: Parts, orders: dict[int, dict[str, Any]], answers: dict[int, Any], watch: Watch
    ) -> list[Any]:
        """Have those that stopped earlier catch up with the others."""
        found = [answers[place] for place in range(len(parts))]
        done = [answer["running"]["batches"] for answer in found]
        over = any(answer["ended"] for answer in found)
        behind: dict[int, dict[str, Any]] = {}
        for place, answer in enumerate(found):
            if done[place] < max(done) or answer["ended"] != over:
                batches = orders[place]["batches"]
                behind[place] = orders[place] | {
                    **{"state": answer["state"], "position": answer["position"], "control": None},
                    **{
                        "batches": batches and batches[done[place] :],
                        "limit": None if over else max(done) - done[place],
                    },
                }
        for place, more in self._train(parts, behind, None, watch)[1].items() if behind else ():
            running = Running()
            running.join([found[place]["running"]])
            if more["running"]["batches"]:
                running.join([more["running"]])
            found[place] = more | {"running": running.state_dict()}
        return found


def _watched(control: tuple[Place, int] | None) -> Watch:
    """What counts a part's steps where it is watched, and stops it after the one that is named there."""
    if control is None:
        return Watch()
    cells, place = control[0].tensor(), control[1]
    # A call that is repeated begins anew.
    cells[place] = 0

    def tick() -> None:
        cells[place] += 1

    return Watch(tick=tick, stopped=lambda: bool(cells[place] >= cells[-1]))


def _parts(size: int, executor: Executor) -> Parts:
    """The parts of an array, in proportion to the limits of workers."""
    limits = sorted(executor.limits, reverse=True)
    if not limits:
        return [(low, high, 0) for low, high in shares(size, min(executor.count, size))]
    edges = [size * edge // sum(limits) for edge in (0, *itertools.accumulate(limits))]
    found: Parts = []
    for first, last, limit in zip(edges, edges[1:], limits, strict=False):
        if last > first:
            pieces = shares(last - first, -(-(last - first) // limit))
            found += [(first + low, first + high, limit) for low, high in pieces]
    return found


def _on(values: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def choose(
    step: Step,
    state: TrainState,
    batches: Any,
    loader: Any,
    workers: int | Literal["auto"] | None,
    compile: bool,
    steps: int | None = None,
    executor: Executor | None = None,
    members: int | None = None,
) -> Here | Spread | Workers:
    """Who trains: this process, an executor, or as many processes as asked for; ``"auto"`` measures which is faster.

    A run that goes on may have fewer members than it had, ``members``: then some processes have nothing to do.

    Raises:
        ValueError: if there are more workers than members or processors, or an executor besides.
    """
    if executor is not None:
        if workers is not None:
            raise ValueError(f"workers is {workers!r} and there is an executor, which has its own; pass one of both")
        return Spread(step, batches, loader, executor, compile)
    here = Here(background.compile(step, steps=steps) if compile else step, batches, loader)
    if workers is None or workers == 1:
        return here
    most = {"members": num_models(state) if workers == "auto" or members is None else members}
    if state.keys.device.type == "cuda" and workers == "auto":
        most["GPUs"] = torch.cuda.device_count()
    if state.keys.device.type == "cpu":
        most["processors that this process may use"] = len(cores())
    count = min(most.values()) if workers == "auto" else workers
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"workers is {workers!r}; it must be at least 1, 'auto', or None for this process")
    for what, number in most.items():
        if count > number:
            raise ValueError(f"workers is {count}, more than the {number} {what}; pass at most {number}, or 'auto'")
    if workers == "auto" and (count == 1 or not isinstance(loader, ArrayLoader | Sequence) or batches is not loader):
        return here
    crew = Workers(step, state, batches, loader, count, compile)
    if workers == "auto":
        first = next(iter(copy.copy(loader)))
        if crew.speed(_TRIAL, first) <= speed(step, state, first, _TRIAL):
            crew.__exit__()
            return here
    return crew
