"""Whole training steps: a workload at a size, a number of models and a precision, in every mode.

The processes of some cells start together, on all cores: there they are held to the loop, and compile. Then nothing else
runs while the modes of one cell take turns. A mode that runs out of memory beside the others is measured again, with the loop
alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks import _code
from benchmarks._child import Late
from benchmarks._processes import Measured
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.ledger import Ledger
from benchmarks.modes import NOT_FOR, PER_CORE, PROCESSES, REPLAYED, SERIAL
from benchmarks.sweep import CHECKED, COARSE, COMPILED, Least, Reference, agree, difference, held, settings, take_turns
from benchmarks.workloads import Spec, batch_size

STAGE = "cells"
NAMES = ("mlp", "resnet", "transformer", "bert", "pointnet-cls", "dcgan", "mobilenet-v3s")
MODES = (
    *(SERIAL, "array", "array compiled", REPLAYED[1], "serial compiled", REPLAYED[0]),
    *("stock vmap", "stock vmap compiled", PROCESSES, PER_CORE, "HFTA", "JAX", "dense"),
)
PARTS = (
    *(("paper", 16, False), ("small", 16, False), ("paper", 16, True), ("paper", 4, False), ("small", 4, False)),
    *(("paper", 64, False), ("small", 64, False), ("small", 16, True), ("paper", 1, False), ("small", 1, False)),
    *(("paper", 4, True), ("paper", 64, True), ("small", 4, True), ("small", 64, True), ("paper", 1, True)),
    ("small", 1, True),
)
"""Size, number of models, and whether in bfloat16, by what users ask for first."""
FULL = Least(rounds=9, seconds=1.0, warmup=2, turn=1.0 / 9, watch=0.0)
QUICK = Least(rounds=2, seconds=0.0, warmup=1, turn=0.0, watch=0.0)
CHECK = 4
"""Models whose losses are held to the loop's in float64, which takes twice the memory; all are in float32."""
START, LIMIT = 45.0, 150.0
"""Seconds that processes take until they can be timed, usually and at most."""
SHARE = 120.0
"""Seconds that the turns of one cell may take."""
PATIENCE, GRACE = 60.0, 5.0
"""Seconds that a turn may take, and that processes of a shared GPU have to end by themselves."""
TOGETHER = 40
"""Processes at once: each takes about half a GB of a GPU and two of the host."""


class Cell(NamedTuple):
    """What is measured together.

    Args:
        spec: Workload, size, number of models, precision.
        modes: The modes that have no row yet.
    """

    spec: Spec
    modes: tuple[str, ...]

    @property
    def name(self) -> str:
        """As rows are named after it."""
        return name(self.spec)

    @property
    def processes(self) -> int:
        """How many processes it takes."""
        many = {PROCESSES: self.spec.num_models, PER_CORE: min(os.cpu_count() or 1, self.spec.num_models)}
        return sum(many.get(mode, 1) for mode in (*self.modes, SERIAL))

    def seconds(self, least: Least) -> float:
        """About how long its turns take."""
        return (len(self.modes) + 1) * cost(least, 0.02)


def cost(least: Least, step: float) -> float:
    """Seconds that a mode's turns take, whose step takes so long."""
    turn = max(least.turn, step)
    return least.warmup * turn + max(least.rounds * turn, least.seconds)


def name(spec: Spec) -> str:
    """Of a cell."""
    return f"{spec.workload} {spec.size} M={spec.num_models}{' bf16' if spec.amp else ''}"


def modes(spec: Spec, has: Sequence[str], quick: bool) -> tuple[str, ...]:
    """The modes of a cell; ``has`` names the peers that can run here."""
    cores = os.cpu_count() or 1
    leave = {PER_CORE if spec.num_models <= cores else PROCESSES, *({"HFTA", "JAX"} - {*has})}
    if spec.amp:
        # JAX's models are written for float32 alone.
        leave.add("JAX")
    if spec.num_models == 1:
        leave |= {PROCESSES, "dense"}
    if quick:
        leave |= {*MODES} - {SERIAL, "array", "stock vmap", PROCESSES}
    return tuple(m for m in MODES if m not in leave and spec.workload not in NOT_FOR.get(m, ()))


def plan(device: str, quick: bool) -> list[Spec]:
    """All cells, the most wanted first."""
    if quick:
        return [Spec("mlp", "small", 2, 4, device)]
    return [
        Spec(own, size, count, batch_size(own, size, device), device, amp)
        for size, count, amp in PARTS
        for own in NAMES
        # It has one size.
        if (own, size) != ("mlp", "paper")
    ]


def left(ledger: Ledger, device: str, has: Sequence[str], quick: bool) -> list[Cell]:
    """The cells that have modes without a row, the most pressing first."""
    cells = []
    for spec in plan(device, quick):
        wanted = modes(spec, has, quick)
        own = ledger.left(STAGE, wanted, lambda mode, spec=spec: (f"{name(spec)}: {mode}", _code.code(mode)))
        if own:
            states = [ledger.state(STAGE, f"{name(spec)}: {mode}", _code.code(mode)) for mode in own]
            cells.append((0 if "missing" in states else 1 if "late" in states else 2, Cell(spec, tuple(own))))
    return [cell for _, cell in sorted(cells, key=lambda pair: pair[0])]


def run(cells: list[Cell], clock: Clock, ledger: Ledger, quick: bool, env: dict[str, str]) -> None:
    """Measure cells, and write a row for each of their modes.

    Raises:
        TimeUp: when the budget is spent; what is under way is left.
    """
    least = QUICK if quick else FULL
    while cells:
        start = 5.0 if quick else START
        clock.check(start + cells[0].seconds(least))
        count = 1
        while count < len(cells) and not _is_large(cells[count].spec) and not _is_large(cells[0].spec):
            more = cells[: count + 1]
            fits = start + sum(cell.seconds(least) for cell in more) < clock.left()
            if not fits or sum(cell.processes for cell in more) > TOGETHER:
                break
            count += 1
        now, cells = cells[:count], cells[count:]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(TOGETHER) as pool:
            groups = [stack.enter_context(Group(cell, env)) for cell in now]
            every = [one for group in groups for one in group.every]
            list(pool.map(One.start, every, [min(LIMIT, clock.left())] * len(every)))
            clock.check()
            for group in groups:
                group.measure(clock, ledger, least)


def _is_large(spec: Spec) -> bool:
    """Whether its modes may fill a GPU."""
    return spec.size == "paper" and spec.num_models >= 16


class One:
    """A mode of a cell, its processes and what they have answered."""

    def __init__(self, mode: str, cell: Cell, env: dict[str, str], cache: str):
        self.mode, self.spec, self._env, self._cache = mode, cell.spec, env, cache
        self.row: dict[str, Any] = {}
        self.exact: list[list[float]] = []
        self.rough: list[list[float]] = []
        self.noisy: list[list[float]] = []
        self.open()

    def open(self) -> None:
        """Start its processes, which share a folder of compiled graphs with those that ended before."""
        served = self._env if self.mode in (PROCESSES, PER_CORE) else {}
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": f"{max(1, (os.cpu_count() or 1) // 4)}"}
        # The server of several processes may fail with one that is killed.
        grace = GRACE if served else 0.0
        self.measured = Measured(self.mode, self.spec, self.row, {**served, **threads}, self._cache, PATIENCE, grace)

    def start(self, limit: float) -> None:
        """Losses without anything random, then the first two steps; what goes wrong is the row's error."""
        end = time.monotonic() + limit
        remaining = lambda: end - time.monotonic()  # noqa: E731
        try:
            if self.mode in (SERIAL, *CHECKED):
                self.exact = self.measured.losses(CHECK, limit=remaining())
                self.rough = self.measured.losses(None, "float32", 1, limit=remaining())
            self.row["first step"], self.noisy = self.measured.start(limit=remaining())
        except Late as error:
            self.row |= {"error": str(error), "late": True}
        except RuntimeError as error:
            self.row["error"] = str(error)
        if "error" in self.row:
            self.measured.close()

    @property
    def is_full(self) -> bool:
        """Whether memory ran out."""
        return "out of memory" in self.row.get("error", "").lower()

    def judge(self, reference: One, eager: One | None) -> None:
        """Hold its losses to those of the loop, and of the eager array."""
        if "error" in self.row or self is reference:
            return
        with self.measured.failing():
            if self.mode in CHECKED:
                held(self.row, [step[:CHECK] for step in self.exact], reference.exact)
                self.row["difference in float32"] = difference(self.rough, reference.rough)
                if not self.row["difference in float32"] < COARSE:
                    raise RuntimeError(f"first losses in float32 differ from the loop's by more than {COARSE}")
            if self.mode in COMPILED and (eager is None or not eager.noisy):
                raise RuntimeError("there is no eager array to hold it to")
            found = Reference(reference.noisy, eager.noisy if eager else [])
            agree(self.mode, self.row, self.noisy, self.spec, found)


class Group:
    """The modes of a cell."""

    def __init__(self, cell: Cell, env: dict[str, str]):
        self.cell, self._began = cell, time.monotonic()
        self._caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        needed = [SERIAL, *(["array"] if any(mode in COMPILED for mode in cell.modes) else [])]
        names = [*dict.fromkeys([*needed, *cell.modes])]
        self.every = [One(mode, cell, env, f"{self._caches.name}/{i}") for i, mode in enumerate(names)]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.every:
            one.measured.close()
        self._caches.cleanup()

    def measure(self, clock: Clock, ledger: Ledger, least: Least) -> None:
        """Take turns, and write the rows."""
        loop = self.every[0]
        eager = next((one for one in self.every if one.mode == "array"), None)
        if loop.is_full:
            self._alone(loop, clock)
        try:
            self._measure(loop, self.every[1:], eager, clock, least)
        except RuntimeError as error:
            # Without the loop there is nothing to compare with.
            for one in self.every:
                if "ratio" not in one.row:
                    one.row.setdefault("error", f"the loop: {error}")
        for one in self.every:
            if one.mode in self.cell.modes:
                own = {**settings(self.cell.spec), "workload": self.cell.spec.workload, "size": self.cell.spec.size}
                own |= {"models": self.cell.spec.num_models, "mode": one.mode, "took": self._took()}
                ledger.add(STAGE, f"{self.cell.name}: {one.mode}", _code.code(one.mode), {**own, **one.row})
        print(f"{self.cell.name}: {', '.join(self._lines())}", flush=True)

    def _measure(self, loop: One, others: list[One], eager: One | None, clock: Clock, least: Least) -> None:
        if "error" in loop.row:
            raise RuntimeError(loop.row["error"])
        for one in others:
            one.judge(loop, eager)
        turns(loop, [one for one in others if "error" not in one.row], clock, least)
        for one in others:
            if one.is_full:
                for other in others:
                    other.measured.close()
                self._alone(one, clock)
                one.judge(loop, eager)
                if "error" not in one.row:
                    turns(loop, [one], clock, least)
                    one.row["beside"] = "the loop alone"

    def _alone(self, one: One, clock: Clock) -> None:
        """Start a mode again whose memory others took; its graphs are compiled already."""
        one.measured.close()
        one.row.clear()
        one.open()
        one.start(min(LIMIT, clock.left()))
        clock.check()

    def _took(self) -> float:
        return time.monotonic() - self._began

    def _lines(self) -> Iterator[str]:
        for one in self.every[1:]:
            said = f"{one.row['ratio']:.2f}x" if "ratio" in one.row else one.row.get("error", "")[:40]
            yield f"{one.mode} {said}"


def turns(loop: One, ready: list[One], clock: Clock, least: Least) -> None:
    """Time modes, without the slowest if a cell's share of time does not hold all."""
    costs: dict[str, float] = {}
    for one in [loop, *ready]:
        with one.measured.failing():
            costs[one.mode] = cost(least, one.measured.time(1)[0])
    for one in sorted(ready, key=lambda one: -costs.get(one.mode, 0.0)):
        if sum(costs.values()) > SHARE and not one.mode.startswith("array"):
            one.row["error"] = (
                f"{least.rounds} rounds take {costs.pop(one.mode):.0f} s, too much of a cell's {SHARE:.0f} s"
            )
            one.measured.close()
    clock.check(sum(costs.values()))
    take_turns(loop.measured, [one.measured for one in ready if "error" not in one.row], least, clock.check)
