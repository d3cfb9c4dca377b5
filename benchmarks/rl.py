"""Seeds of PPO by PureJaxRL's protocol: an array, JAX, and plain scripts with gymnasium or EnvPool in a process per core.

CartPole-v1, 500,000 steps an agent in 4 environments, rollouts of 128 steps, 4 epochs of 4 minibatches, a learning rate that
falls to 0, two hidden layers with tanh. Every way trains for some turns, interleaved; the seconds to the end are those of the
first turn, with compiling, and of the other steps at the median rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _code
from benchmarks._child import Child
from benchmarks._measure import add_to, table
from benchmarks.rl_ways import ITERATIONS, PER_ITERATION, WAYS

PLAIN = WAYS[3:]
"""Ways with one agent in each process."""
PEERS = {"JAX": "jax", "EnvPool": "envpool"}
"""Ways of others by the packages that they need, of which one may come to no end."""
WORK = {64: 256, 256: 64, 1024: 16}
"""Iterations of a turn, of all agents together, by width of the hidden layers: some seconds each."""
LONGEST, REPLAYED, SHORT = 96, 2, {64: 8, 256: 8, 1024: 2}
"""The most iterations of an agent in a turn; how many fewer of a replayed one; and those of a plain script."""
PATIENCE = 300.0
"""Seconds that a turn may take: JAX was seen to stand still on two cores."""
WIDE, NOISE = 16, 3.0
"""Agents whose returns are compared, and of other widths; standard errors by which mean returns may differ."""


class Timed:
    """A way's processes, and what they said.

    Args:
        way: One of :data:`benchmarks.rl_ways.WAYS`.
        models: Agents.
        width: Of the hidden layers.
        device: Of arrays.
        iterations: Of each agent in a turn.
    """

    def __init__(self, way: str, models: int, width: int, device: str, iterations: int):
        self.way, self.iterations, self._total = way, iterations, models * ITERATIONS * PER_ITERATION
        count = min(os.cpu_count() or 1, models) if way in PLAIN else 1
        self.agents = count if way in PLAIN else models
        self._caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Nothing is compiled before the clock runs.
        env = {"TORCHINDUCTOR_CACHE_DIR": self._caches.name, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        first = range(count) if way in PLAIN else [models]
        self._children = [Child("benchmarks.rl_ways", [way, number, width, device], env) for number in first]
        self.first, self.rates, self.returns, self._turns = 0.0, [], [], 0

    def ready(self) -> None:
        """Wait until everything is imported."""
        for child in self._children:
            child.ask("ready")

    def turn(self, iterations: int | None = None, limit: float | None = None) -> None:
        """Train for some iterations; the first turn, with all that is compiled, counts apart."""
        taken, start = iterations or self.iterations, time.perf_counter()
        for child in self._children:
            child.begin("turn", taken, self._turns * len(self._children))
        answers = [child.end(limit) for child in self._children]
        seconds = answers[0][0] if len(answers) == 1 else time.perf_counter() - start
        returns = [value for _, found in answers for value in found if not math.isnan(value)]
        # Each turn of a plain script trains other agents.
        self.returns = [*self.returns, *returns] if self.way in PLAIN and self._turns else returns
        if self._turns:
            self.rates.append(taken * PER_ITERATION * self.agents / seconds)
        else:
            self.first, self._begun = seconds, taken * PER_ITERATION * self.agents
        self._turns += 1

    def row(self) -> dict[str, Any]:
        """What was measured."""
        rate = statistics.median(self.rates)
        compiled = self.way not in PLAIN
        row: dict[str, Any] = {"rate": rate, "rates": self.rates, "iterations": self.iterations}
        row["seconds"] = self._total / rate + (self.first - self._begun / rate if compiled else 0.0)
        row["first"] = self.first if compiled else None
        if len(self.returns) > 1:
            error = statistics.stdev(self.returns) / math.sqrt(len(self.returns))
            row["return"] = [statistics.fmean(self.returns), error, len(self.returns)]
        return row

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._caches.cleanup()


def length(way: str, models: int, width: int, rounds: int, quick: bool) -> int:
    """Iterations of a turn."""
    array = min(LONGEST, max(1, WORK.get(width, 16) // models))
    if quick:
        return 1 + rounds if way in PLAIN else 1
    if way in PLAIN:
        # As long as the arrays train in all, where returns are compared.
        return array * (1 + rounds) if (models, width) == (WIDE, 64) else SHORT.get(width, 2)
    return max(1, array // REPLAYED) if way == "replayed" else array


def cell(models: int, width: int, ways: Sequence[str], rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Every way with so many agents of a width; those that fail say why."""
    rows: dict[str, dict[str, Any]] = {}
    every = [Timed(way, models, width, "cpu", length(way, models, width, rounds, quick)) for way in ways]
    try:
        for turn in range(-1, 1 + rounds):
            for timed in every:
                if timed.way not in rows:
                    try:
                        if turn < 0:
                            timed.ready()
                        else:
                            timed.turn(1 if not turn and timed.way in PLAIN else None, PATIENCE)
                    except RuntimeError as error:
                        rows[timed.way] = {"error": str(error)}
    finally:
        for timed in every:
            timed.close()
    found = {timed.way: rows.get(timed.way) or timed.row() for timed in every}
    for row in found.values():
        for own, base in (("over processes", "processes"), ("over JAX", "JAX")):
            other = found.get(base, {})
            if "rate" in row and "rate" in other:
                row[own] = {"rate": row["rate"] / other["rate"], "seconds": other["seconds"] / row["seconds"]}
    return found


def different(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Ways whose mean return is further from that of plain scripts than noise takes it."""
    base = rows.get("processes", {}).get("return")
    wrong = []
    for way, row in rows.items():
        if base and "return" in row and way != "replayed":
            (mean, error, _), (other, spread, _) = row["return"], base
            if abs(mean - other) > NOISE * math.hypot(error, spread):
                wrong.append(f"{way}: return {mean:.0f}, plain scripts {other:.0f}")
    return wrong


def lines(models: str, width: str, rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A line of a table for every way."""
    made = []
    for way, row in rows.items():
        if "error" in row:
            made.append([models, width, way, row["error"][:60], *[""] * 6])
            continue
        over = [row.get(base, {}) for base in ("over processes", "over JAX")]
        times = [f"{one[key]:.2g}x" if one else "" for one in over for key in ("rate", "seconds")]
        first = f"{row['first']:.0f}" if row["first"] else ""
        made.append([models, width, way, f"{row['rate']:,.0f}", first, f"{row['seconds']:,.0f}", *times])
    return made


HEAD = ["agents", "width", "way", "steps/s", "first turn, s", "to the end, s"]
HEAD += ["over processes", "to the end", "over JAX", "to the end"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether returns agree."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks rl",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--models", nargs="*", type=int, default=[1, 16, 64], help="agents of width 64")
    parser.add_argument("--widths", nargs="*", type=int, default=[256, 1024], help=f"other widths, of {WIDE} agents")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=[*WAYS], help="EnvPool is left out where it is missing"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way after the first")
    parser.add_argument("--quick", action="store_true", help="turns of one iteration, to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put all numbers into FILE too")
    args = parser.parse_args(argv)
    missing = [way for way in args.ways if way in PEERS and importlib.util.find_spec(PEERS[way]) is None]
    ways = [way for way in args.ways if way not in missing]
    about = _code.stamp()
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    print("".join(f"{way} is not installed\n" for way in missing), end="", flush=True)
    shown, wrong = [], []
    for models, width in [*((models, 64) for models in args.models), *((WIDE, width) for width in args.widths)]:
        rows = cell(models, width, ways, args.rounds, args.quick)
        made = lines(f"{models}", f"{width}", rows)
        shown += made
        print("\n".join("  ".join(line) for line in made), flush=True)
        wrong += [f"{way}: {row['error']}" for way, row in rows.items() if "error" in row and way not in PEERS]
        wrong += different(rows) if (models, width) == (WIDE, 64) and not args.quick else []
        if args.json:
            add_to(args.json, "rl", about, {f"{models} x {width}": rows})
    print(f"\n{table(HEAD, shown)}")
    print("\n".join(f"wrong: {line}" for line in wrong))
    return int(bool(wrong))
