"""What is measured one by one: updates, lowerings, the largest array, agents, and how busy the device is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import _code, lowerings, optim, rl
from benchmarks._child import Child, Late
from benchmarks.gpu.cells import NAMES, name
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.ledger import Ledger
from benchmarks.modes import REPLAYED, SERIAL
from benchmarks.worker import Worker
from benchmarks.workloads import Spec, batch_size

LIMIT = 60.0
"""Seconds that one may take."""
BUSY = (("mlp", "small"), ("resnet", "paper"), ("bert", "paper"))
"""Workloads whose kernels are timed, for one model alone and for an array."""
WIDE, CALLS = 16, 20
"""Models of that array, and steps that are timed."""


class Single(NamedTuple):
    """One thing to measure.

    Args:
        key: Its name.
        code: Digest of the code that it measures.
        work: Measures it: takes a process from the function it is given, and seconds; returns a row.
    """

    key: str
    code: str | None
    work: Callable[[Callable[[], Child], float], dict[str, Any]]


def updates(device: str, quick: bool) -> list[Single]:
    """Every optimizer against PyTorch's."""
    found = []
    for title in optim.titles()[: 2 if quick else None]:
        make, *_ = optim.OPTIMIZERS[title.split(", ", 1)[1]]
        code = _code.code_of(make.__module__.removeprefix("hfta_func.").replace(".", "/"))
        found.append(Single(title, code, _asked("update", title)))
    return found


def every_lowering(device: str, quick: bool) -> list[Single]:
    """Every operator that has several ways to run."""
    names = [key for key in lowerings.rows() if not quick or "small pointnet 1d" in key][: 2 if quick else None]
    return [Single(key, _code.code_of("rules/__init__"), _asked("lowering", key)) for key in names]


def _asked(order: str, key: str) -> Callable[[Callable[[], Child], float], dict[str, Any]]:
    return lambda desk, limit: {"found": desk().ask(order, key, limit=limit)}


def largest(device: str, quick: bool) -> list[Single]:
    """How many models fit as an array."""
    sizes = ["small"] if quick else ["paper", "small"]
    amps = [False] if quick or device == "cpu" else [False, True]
    specs = [
        Spec(own, size, 1, batch_size(own, size, device), device, amp)
        for amp in amps
        for size in sizes
        for own in (NAMES[:1] if quick else NAMES)
        if (own, size) != ("mlp", "paper")
    ]
    return [Single(name(spec), _code.code("array"), _largest(spec)) for spec in specs]


def _largest(spec: Spec) -> Callable[[Callable[[], Child], float], dict[str, Any]]:
    def work(desk: Callable[[], Child], limit: float) -> dict[str, Any]:
        worker = Worker("array", spec, torch.get_num_threads())
        try:
            return {**spec._asdict(), "largest": worker.ask("largest", limit=limit)}
        finally:
            worker.close()

    return work


def busy(device: str, quick: bool) -> list[Single]:
    """How much of a step kernels run, for one model and for an array."""
    found = []
    for own, size in BUSY[: 1 if quick else None]:
        ways = [(SERIAL, 1), ("array", WIDE), ("array compiled", WIDE), (REPLAYED[1], WIDE)]
        for mode, count in ways[: 2 if quick else None]:
            spec = Spec(own, size, count, batch_size(own, size, device), device)
            found.append(Single(f"{name(spec)}: {mode}", _code.code(mode), _busy(mode, spec)))
    return found


def _busy(mode: str, spec: Spec) -> Callable[[Callable[[], Child], float], dict[str, Any]]:
    def work(desk: Callable[[], Child], limit: float) -> dict[str, Any]:
        worker = Worker(mode, spec, torch.get_num_threads())
        try:
            worker.ask("start", limit=limit)
            # What is found out and compiled in first steps is not measured.
            worker.ask("time", 3, limit=limit)
            kernels, wall = worker.ask("kernels", CALLS, limit=limit)
            return {**spec._asdict(), "mode": mode, "kernels": kernels, "wall": wall, "busy": kernels / wall}
        finally:
            worker.close()

    return work


def agents(device: str, quick: bool) -> list[Single]:
    """Many seeds of PPO, whose environments, rollouts and updates are one program."""
    counts = [2] if quick else [64, 256]
    ways = ["replayed"] if quick else ["compiled", *(["JAX"] if importlib.util.find_spec("jax") else [])]
    return [
        Single(
            f"PPO x {count}: {way}",
            None if way == "JAX" else _code.code_of("rl/__init__"),
            _agents(way, count, device, quick),
        )
        for count in counts
        for way in ways
    ]


def _agents(way: str, count: int, device: str, quick: bool) -> Callable[[Callable[[], Child], float], dict[str, Any]]:
    def work(desk: Callable[[], Child], limit: float) -> dict[str, Any]:
        timed = rl.Timed(way, count, 64, device, 1 if quick else 4)
        try:
            for _ in range(2 if quick else 4):
                timed.turn(limit=limit)
            return {"models": count, "mode": way, **timed.row()}
        finally:
            timed.close()

    return work


STAGES: dict[str, tuple[Callable[[str, bool], list[Single]], float]] = {
    "updates": (updates, 3.0),
    "lowerings": (every_lowering, 2.0),
    "largest": (largest, 20.0),
    "busy": (busy, 30.0),
    "rl": (agents, 60.0),
}
"""What each stage measures, and about how many seconds one takes."""


def left(stage: str, ledger: Ledger, device: str, quick: bool) -> list[Single]:
    """What has no row yet, the most pressing first."""
    return ledger.left(stage, STAGES[stage][0](device, quick), lambda single: (single.key, single.code))


class Desk:
    """The process of updates and lowerings, started when it is asked for, and anew after one that has ended."""

    def __init__(self, device: str, quick: bool):
        self._order, self._child = [device, quick], None

    def __call__(self) -> Child:
        """The process."""
        if self._child is None:
            self._child = Child("benchmarks.gpu.desk", self._order)
        return self._child

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.close()
            self._child = None


def run(stage: str, singles: list[Single], clock: Clock, ledger: Ledger, device: str, quick: bool) -> None:
    """Measure one after another, and write a row for each.

    Raises:
        TimeUp: when the budget is spent.
    """
    usual = 0.0 if quick else STAGES[stage][1]
    desk = Desk(device, quick)
    try:
        for single in singles:
            clock.check(usual)
            before, limit = clock.left(), min(LIMIT, clock.left())
            try:
                row = single.work(desk, limit)
            except Late as error:
                # Only what was given all the time that there is can be called late.
                clock.check()
                row = {"error": str(error), "late": True}
                desk.close()
            except RuntimeError as error:
                row = {"error": str(error)}
                desk.close()
            ledger.add(stage, single.key, single.code, {**row, "took": before - clock.left()})
            print(f"{stage}: {single.key}: {'; '.join(_said(row))}", flush=True)
    finally:
        desk.close()


def _said(row: dict[str, Any]) -> Iterator[str]:
    if "error" in row:
        yield row["error"][:60]
    elif "largest" in row:
        yield f"{row['largest']} models fit"
    elif "busy" in row:
        yield f"kernels run {row['busy']:.0%} of {1e3 * row['wall']:.2f} ms"
    elif "rate" in row:
        yield f"{row['rate']:,.0f} steps a second, {row['first']:.0f} s until the first"
    elif "ratios" in row["found"]:
        yield from (f"{way} {max(ratios.values(), default=0):.2f}x" for way, ratios in row["found"]["ratios"].items())
    else:
        for op, one in row["found"].items():
            own = {way: value for way, value in one["times"].items() if way != "serial"}
            best = min(own, key=own.__getitem__)
            yield f"{op.split(':')[0]} {one['chosen']} {own[one['chosen']] / own[best]:.2f} of {best}"
