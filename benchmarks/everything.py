"""Every file of results anew, on one commit: ``python -m benchmarks all --budget 5h``.

In pieces, each a command of its own, shortest opponents first. What is done is in ``benchmarks/results/all.json`` with commit and
machine: the same command goes on with the pieces that were not done on this commit, and with those that failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _code
from benchmarks._measure import RESULTS, ROOT, budget_seconds
from benchmarks.curve import KEY, TITLES, is_done
from benchmarks.modes import IN_FIT, PER_CORE, PROCESSES, SERIAL, WORKERS
from benchmarks.workloads import OWN

STATE = "all.json"
ARRAYS = SERIAL, "array", IN_FIT, "array compiled", "stock vmap compiled"
MODES = *ARRAYS, "stock vmap", PROCESSES, PER_CORE, *WORKERS, "serial compiled", "JAX", "dense"
"""What the tables of a network as people start compare, and what those of HFTA's workloads do."""
HFTAS = "mlp", "resnet", "mobilenet-v3s", "pointnet-cls", "dcgan", "transformer", "bert"


def pieces(hfta_source: str | None) -> Iterator[tuple[str, list[str], float]]:
    """The file of each piece, its command, and about how many minutes it takes."""
    own = [name for name in OWN if name != "mlp"]
    for name in TITLES:
        yield KEY, ["curve", "--workloads", name], 15
    for count, name in itertools.product((16, 4, 1), HFTAS):
        yield "cpu-small", _sweep("small", name, count, MODES, hfta_source), 6
    for name in own:
        yield "cpu-small", _sweep("small", name, 16, ARRAYS, None), 2
    for models, steps, threads in (("2 4 8", "40", "1"), ("4 8", "40", "2"), ("4", "400", "1")):
        yield "families-cpu", ["families", "--models", *models.split(), "--steps", steps, "--threads", threads], 6
    yield "optim-cpu", ["optim", "--no-compile"], 10
    yield "ensembles-cpu", ["ensembles"], 4
    for flags in ("--base small --adapters 8 32 --compile --bases", "--base base --adapters 8 32 --batch 1"):
        yield "adapters-cpu", ["adapters", *flags.split()], 5
    yield "memory-cpu", ["memory", "--size", "small", "--compile"], 5
    yield "memory-cpu", ["memory", "--size", "paper", "--models", "4"], 5
    yield "tune-cpu", ["tune"], 5
    yield "rl-cpu", ["rl", "--widths", "256"], 10
    yield "executors-cpu", ["executors", "--calls", "1"], 4
    for size in ("small", "paper"):
        yield f"plan-cpu-{size}", ["predict", "--size", size], 10
    yield "ops-cpu", ["ops"], 40
    for count, name in itertools.product((16, 4, 1), HFTAS[1:]):
        yield "cpu-paper", _sweep("paper", name, count, MODES, hfta_source), 9


def _sweep(size: str, name: str, count: int, modes: Sequence[str], hfta_source: str | None) -> list[str]:
    flags = ["--hfta-source", hfta_source] if hfta_source else []
    every = [*modes, "HFTA"] if hfta_source else modes
    return [
        "sweep",
        "--size",
        size,
        "--workloads",
        name,
        "--models",
        str(count),
        "--replace",
        *flags,
        "--modes",
        *every,
    ]


def measure(args: argparse.Namespace) -> list[str]:
    """Run pieces as long as the budget lasts; returns those that are left or failed."""
    today, end, left = _code.stamp(), time.monotonic() + args.budget, []
    path = args.results / STATE
    for file, command, minutes in pieces(args.hfta_source):
        name = " ".join(command)
        known = json.loads(path.read_text()) if path.exists() else {}
        about = known.get(name, {})
        if args.only and not any(word in f"{file} {name}" for word in args.only):
            continue
        if is_done(about, today) and not about["status"]:
            continue
        room = end - time.monotonic()
        expected = about.get("seconds", 60 * minutes)
        print(f"{file}: {name} (about {expected / 60:.0f} min)", flush=True)
        if args.plan or expected > room:
            left.append(name)
            continue
        begin = time.monotonic()
        json_flag = ["--json", str(args.results / f"{file}.json")]
        status = subprocess.run([sys.executable, "-m", "benchmarks", *command, *json_flag], cwd=ROOT).returncode
        row = {**today, "status": status, "seconds": time.monotonic() - begin}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**known, name: row}, indent=1) + "\n")
        left += [name] * bool(status)
    return left


def others(folder: Path, today: dict[str, Any]) -> list[str]:
    """A line for each file of results with rows of other commits than today's."""
    lines = []
    for path in sorted(folder.glob("*-cpu*.json")) + sorted(folder.glob("cpu-*.json")):
        commits = list(_commits(json.loads(path.read_text())))
        if wrong := [one for one in commits if one != today.get("commit")]:
            lines.append(f"{path.name}: {len(wrong)} of {len(commits)} rows are of other commits")
    return lines


def _commits(tree: Any) -> Iterator[str | None]:
    """The commit of everything in a file that names its machine."""
    for value in tree.values() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and "cpu" in value and "cores" in value:
            yield value.get("commit", tree.get("commit"))
        else:
            yield from _commits(value)


def main(argv: Sequence[str] = ()) -> int:
    """Measure; the status is 1 if anything is left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=budget_seconds, default=5 * 3600.0, help="such as 5h or 90m; 5h by default")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="pieces whose file or command holds one of these")
    parser.add_argument("--plan", action="store_true", help="name the pieces that are left, and run none")
    parser.add_argument("--hfta-source", metavar="DIR", help="a checkout of the original HFTA, for that mode")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="the folder of the files")
    args = parser.parse_args(argv)
    left = measure(args)
    print("\n".join([f"left: {name}" for name in left] + others(args.results, _code.stamp())))
    return int(bool(left))
