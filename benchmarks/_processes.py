"""A mode's processes, asked together."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.modes import ONE_THREAD, PER_CORE, PROCESSES, WORKERS
from benchmarks.worker import Worker
from benchmarks.workloads import Spec

TURN = 0.3
"""Seconds that a turn takes at least, in steps in a row."""


class Measured:
    """A mode's process or processes; ``row`` is what is found, or why it has no numbers, ``calls`` the steps of a turn.

    Args:
        mode: A key of :data:`benchmarks.modes.MODES`.
        spec: What to train.
        row: Where to put what is found.
        env: Further environment variables of its processes.
        cache: Their folder of compiled graphs; each has one of its own unless one is given.
        patience: Seconds that an answer may take, if nothing else is said.
        grace: Seconds in which processes end by themselves before they are killed.
    """

    def __init__(
        self,
        mode: str,
        spec: Spec,
        row: dict[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        cache: str | None = None,
        patience: float | None = None,
        grace: float = 0.0,
    ):
        self._patience, self._grace = patience, grace
        self.mode, self.device, self.calls = mode, spec.device, 1
        self.row: dict[str, Any] = {} if row is None else row
        threads = 1 if mode == ONE_THREAD else torch.get_num_threads()
        per_core = dict.fromkeys((PER_CORE, *WORKERS), min(threads, spec.num_models))
        count = {PROCESSES: spec.num_models, **per_core}.get(mode, 1)
        # As many threads as there are processors, shared out.
        self._workers = [Worker(mode, part, max(1, threads // count), env, cache) for part in shares(spec, count)]

    def ask(self, order: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Every process, at once; each has ``limit`` seconds."""
        for worker in self._workers:
            worker.begin(order, *args)
        return [worker.end(self._patience if limit is None else limit) for worker in self._workers]

    def losses(self, *args: Any, limit: float | None = None) -> list[list[float]]:
        """Of all models in three steps without anything random; ``args`` are those of the process."""
        return joined(self.ask("losses", *args, limit=limit))

    def start(self, limit: float | None = None) -> tuple[float, list[list[float]]]:
        """Seconds of the first step, and the losses of the first two."""
        took, losses = zip(*self.ask("start", limit=limit), strict=True)
        return max(took), joined(losses)

    def time(self, calls: int) -> tuple[float, float]:
        """Seconds of a step of all models, and of the processors meanwhile."""
        start = time.perf_counter()
        answers = self.ask("time", calls)
        took = (time.perf_counter() - start) / calls if len(answers) > 1 else answers[0][0]
        return took, sum(busy for _, busy in answers)

    def turn(self, warm: bool, seconds: float = TURN) -> tuple[float, float]:
        """``time`` of a turn's steps; while it warms up, it finds out how many those are."""
        found = self.time(self.calls)
        if not warm:
            self.calls = max(1, round(seconds / found[0]))
        return found

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside is the row's error, and ends the processes."""
        try:
            yield
        except RuntimeError as error:
            self.row["error"] = str(error)
            self.close()

    def close(self) -> None:
        """End the processes."""
        if self._grace:
            for worker in self._workers:
                worker.leave()
        for worker in self._workers:
            worker.close(self._grace)


def shares(spec: Spec, count: int) -> list[Spec]:
    """The models of a spec in ``count`` parts, which differ by one model at most."""
    bounds = [spec.num_models * i // count for i in range(count + 1)]
    return [spec._replace(num_models=b - a, first=spec.first + a) for a, b in itertools.pairwise(bounds)]


def joined(parts: Iterable[list[list[float]]]) -> list[list[float]]:
    """Steps of some models each to steps of all of them."""
    return [[*itertools.chain.from_iterable(step)] for step in zip(*parts, strict=True)]
