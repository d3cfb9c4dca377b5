"""Every file of results anew, on one commit: ``python -m benchmarks all --budget 5h``.

In pieces, each a command of its own. What is done is in ``benchmarks/results/all.json`` with commit and machine: the same
command goes on with the pieces that were not done on this commit, and with those that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _code
from benchmarks._measure import RESULTS, ROOT, budget_seconds
from benchmarks.curve import KEY, TITLES, is_done
from benchmarks.modes import IN_FIT, PER_CORE, PROCESSES, SERIAL, WORKERS
from benchmarks.workloads import OWN

STATE = "all.json"
ARRAYS = SERIAL, "array", IN_FIT, "array compiled", "stock vmap compiled"
MODES = *ARRAYS, "stock vmap", PROCESSES, PER_CORE, *WORKERS, "serial compiled", "JAX", "dense"
ALONE = *ARRAYS, "stock vmap", "serial compiled", "JAX"
"""What the tables of a network as people start compare, what those of HFTA's workloads do, and what differs for one model."""
BY_MODELS = (16, MODES), (4, MODES), (1, ALONE)
HFTAS = "mlp", "resnet", "mobilenet-v3s", "pointnet-cls", "dcgan", "transformer", "bert"


class Piece(NamedTuple):
    """A command, the file that it writes to, its name there, and about how many minutes it takes."""

    file: str
    name: str
    command: list[str]
    minutes: float


def pieces(hfta_source: str | None = None) -> Iterator[Piece]:
    """All that there is, the small ones first."""

    def sweep(size: str, name: str, models: int, modes: Sequence[str], minutes: float) -> Piece:
        peer = ["HFTA", "--hfta-source", hfta_source] if hfta_source and name in HFTAS else []
        flags = ["--size", size, "--workloads", name, "--models", f"{models}", "--replace", "--modes", *modes, *peer]
        return Piece(f"cpu-{size}", f"{name}, M = {models}{' and HFTA' * bool(peer)}", ["sweep", *flags], minutes)

    yield from (Piece(KEY, name, ["curve", "--workloads", name], 20) for name in TITLES)
    yield from (sweep("small", name, models, modes, 5) for models, modes in BY_MODELS for name in HFTAS)
    yield from (sweep("small", name, 16, ARRAYS, 2) for name in OWN if name not in HFTAS)
    for file, line, minutes in OTHERS:
        yield Piece(file, line, line.split(), minutes)
    yield from (sweep("paper", name, models, modes, 7) for models, modes in BY_MODELS for name in HFTAS[1:])


OTHERS = (
    ("families-cpu", "families --models 2 4 8 --steps 40", 6),
    ("families-cpu", "families --models 4 8 --steps 40 --threads 2", 4),
    ("families-cpu", "families --models 4 --steps 400", 9),
    ("families-cpu", "families --models 8 --steps 400 --rounds 2", 28),
    ("optim-cpu", "optim --no-compile", 10),
    ("recurrent-cpu", "recurrent", 8),
    ("ensembles-cpu", "ensembles", 4),
    ("adapters-cpu", "adapters --base small --compile --bases", 5),
    ("adapters-cpu", "adapters --base base --batch 1", 5),
    ("memory-cpu", "memory --size small --compile", 5),
    ("memory-cpu", "memory --size paper --models 4", 5),
    ("tune-cpu", "tune", 5),
    ("rl-cpu", "rl --widths 256", 10),
    ("executors-cpu", "executors --calls 1", 4),
    ("plan-cpu-small", "predict --size small", 10),
    ("plan-cpu-paper", "predict --size paper", 10),
    ("ops-cpu", "ops", 40),
)


def measure(args: argparse.Namespace) -> list[str]:
    """Run pieces as long as the budget lasts; returns those that are left or failed."""
    today, end, left = _code.stamp(), time.monotonic() + args.budget, list[str]()
    path = args.results / STATE
    known = json.loads(path.read_text()) if path.exists() else {}
    wanted = {f"{one.file}: {one.name}": one for one in pieces(args.hfta_source)}
    # Those that failed before come last.
    for key in sorted(wanted, key=lambda key: bool(known.get(key, {}).get("status"))):
        piece, about = wanted[key], known.get(key, {})
        is_wanted = not args.only or any(word in key for word in args.only)
        if not is_wanted or (is_done(about, today) and not about["status"]):
            continue
        expected = about.get("seconds", 60 * piece.minutes)
        if args.plan or time.monotonic() + expected > end:
            left.append(f"{key} (about {expected / 60:.0f} min)")
            continue
        print(f"{key} (about {expected / 60:.0f} min)", flush=True)
        begin, file = time.monotonic(), args.results / f"{piece.file}.json"
        command = [sys.executable, "-m", "benchmarks", *piece.command, "--json", str(file.resolve())]
        status = subprocess.run(command, cwd=ROOT).returncode
        known[key] = {**today, "status": status, "seconds": time.monotonic() - begin}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1) + "\n")
        left += [f"{key}: it ended with status {status}"] * bool(status)
    return left


def others(folder: Path, today: dict[str, Any]) -> list[str]:
    """A line for each file of results with rows of other commits than today's."""
    lines = []
    for path in sorted(path for path in folder.glob("*cpu*.json")):
        content = json.loads(path.read_text())
        # Where every row has a stamp, the machine of the file is that of the last ones.
        commits = [*_commits(content.get("stamps", content))]
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
    print("\n".join([f"left: {line}" for line in left] + others(args.results, _code.stamp())))
    return int(bool(left))
