"""The stages of measuring a GPU, each within its share of the budget."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks._measure import table
from benchmarks.gpu import SHARES, cells, singles, suite
from benchmarks.gpu.clock import Clock, TimeUp
from benchmarks.gpu.ledger import COMMITTED, Ledger, newest, read


def opened(args: argparse.Namespace) -> Ledger:
    """The rows there are; those of --quick stand apart from the committed ones."""
    ledger = Ledger(args.out, () if args.quick else (COMMITTED,))
    if args.quick:
        ledger.about["quick"] = True
    if args.commit and "commit" not in ledger.about:
        ledger.about |= {"commit": args.commit, "dirty": False}
    return ledger


def add(file: Path) -> int:
    """Put the rows of a file into the committed results, in the place of those that they measure again."""
    if not file.exists():
        raise SystemExit(f"{file} does not exist")
    own = read(file)
    if any(row.get("quick") for row in own):
        raise SystemExit(f"{file} holds rows of --quick, which rest on too little for the committed results")
    before, rows = newest(read(COMMITTED)), newest([*read(COMMITTED), *own])
    COMMITTED.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(own)} rows, {len(rows) - len(before)} of them new; python -m benchmarks report shows them")
    return 0


def run(args: argparse.Namespace, clock: Clock) -> int:
    """Every stage within its share, then all again with what is left."""
    args.out.mkdir(parents=True, exist_ok=True)
    ledger = opened(args)
    if args.hfta_source:
        source = str(args.hfta_source.resolve())
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    where = ledger.about["machine"]
    print(f"{where.get('gpu', where['cpu'])}, torch {where['torch']}, {clock.budget:.0f} s", flush=True)
    if ledger.others:
        print(f"rows of {', '.join(ledger.others)} do not count on this card", flush=True)
    before = dict(ledger.rows)
    with served(args.device) as env:
        for final in (False, True):
            for stage in args.stages:
                if final and stage == suite.STAGE and suite.has_ended(ledger, args.device):
                    # What failed is for the next budget, with other code.
                    continue
                # A rehearsal has little of everything, and starting takes most of its time.
                own = clock if final or args.quick else clock.until(SHARES[stage])
                began = clock.left()
                with contextlib.suppress(TimeUp):
                    measure(stage, args, own, ledger, env)
                spent = began - clock.left()
                if stage == "tests" and not final:
                    print(suite.show(ledger, args.device), flush=True)
                if spent >= 1:
                    print(f"-- {stage}: {spent:.0f} s; {clock.left():.0f} s left", flush=True)
    rest = {stage: count for stage in args.stages if (count := remaining(stage, args, ledger))}
    print("left for the next budget: " + (", ".join(f"{count} {stage}" for stage, count in rest.items()) or "nothing"))
    new = [row for key, row in ledger.rows.items() if row != before.get(key)]
    if rest and not new:
        print(f"nothing was measured: {args.budget:g} s are too short for what is left; see --plan")
    errors = [row for row in new if "error" in row and row.get("outcome", "failed") == "failed"]
    for row in errors:
        print(f"{row['stage']}: {row['key']}: {row['error'].splitlines()[0][:100]}")
    return int(bool(errors))


def measure(stage: str, args: argparse.Namespace, clock: Clock, ledger: Ledger, env: dict[str, str]) -> None:
    """What is left of a stage."""
    if stage == "tests":
        if not suite.is_over(ledger, args.device):
            suite.run(clock, ledger, args.device, args.quick)
    elif stage == "cells":
        cells.run(cells.left(ledger, args.device, peers(args), args.quick), clock, ledger, args.quick, env)
    else:
        own = singles.left(stage, ledger, args.device, args.quick)
        singles.run(stage, own, clock, ledger, args.device, args.quick)


def peers(args: argparse.Namespace) -> list[str]:
    """Other packages that can run here."""
    return [*(["JAX"] if importlib.util.find_spec("jax") else []), *(["HFTA"] if args.hfta_source else [])]


def remaining(stage: str, args: argparse.Namespace, ledger: Ledger) -> int:
    """How much of a stage has no row of today's code."""
    if stage == "tests":
        return int(not suite.is_over(ledger, args.device))
    if stage == "cells":
        return len(cells.left(ledger, args.device, peers(args), args.quick))
    return len(singles.left(stage, ledger, args.device, args.quick))


@contextlib.contextmanager
def served(device: str) -> Iterator[dict[str, str]]:
    """What processes that share a GPU need in their environment for NVIDIA's Multi-Process Service, if its daemon starts."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if device != "cuda" or daemon is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        own = {**os.environ, **env}
        started = subprocess.run([daemon, "-d"], env=own, capture_output=True, timeout=30).returncode == 0
        try:
            yield env if started else {}
        finally:
            if started:
                subprocess.run([daemon], input=b"quit\n", env=own, capture_output=True, timeout=30)


GUESSES = {"tests": 180.0, "cells": 22.0}
"""Seconds of all tests and of a cell, before anything is known."""


def plan(args: argparse.Namespace) -> int:
    """Print the time of each stage, measured where rows know it, and what fits into the budget."""
    ledger = opened(args)
    lines = []
    left = args.budget
    for stage in args.stages:
        # What earlier stages have not taken of their shares is this one's, too.
        own = left - args.budget * (1 - SHARES[stage])
        count = remaining(stage, args, ledger)
        took = [row["took"] for row in ledger.of(stage) if "took" in row]
        if stage == "tests":
            each = sum(took) / max(1, (os.cpu_count() or 1) - 2) if took else GUESSES[stage]
        else:
            each = statistics.median(took) if took else GUESSES.get(stage) or singles.STAGES[stage][1]
        fits = min(count, int(max(own, 0.0) / each))
        left -= fits * each
        known = "measured" if took else "guessed"
        lines.append([stage, f"{count}", f"{each:.1f} ({known})", f"{count * each:.0f}", f"{fits}"])
    print(table(["stage", "left", "seconds each", "seconds", f"of it in {args.budget:.0f} s"], lines))
    return 0
