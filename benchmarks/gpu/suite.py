"""The tests on the device, in parallel, each once for the code as it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import _code
from benchmarks._measure import ROOT
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.ledger import Ledger
from benchmarks.gpu.plugin import ORDER

STAGE, ALL = "tests", "all"
"""The name of the stage, and the key of the row that is written when all tests have run."""
FILES = {"cuda": "tests/test_gpu.py", "cpu": "tests/step/test_many.py"}
"""What is run on a device; on a CPU, where the command is only rehearsed, a file that is quick."""
START = 25.0
"""Seconds until the first test runs."""


def code(device: str) -> str:
    """The digest of the package and of the tests."""
    paths = [*sorted(_code.PACKAGE.rglob("*.py")), ROOT / FILES[device]]
    return _code.digest([path.read_text() for path in paths])


def has_ended(ledger: Ledger, device: str) -> bool:
    """Whether a run came to its end with this code."""
    return ledger.state(STAGE, ALL, code(device)) in ("done", "failed")


def is_over(ledger: Ledger, device: str) -> bool:
    """Whether a run came to its end with this code, and nothing failed."""
    return has_ended(ledger, device) and not failures(ledger, device)


def failures(ledger: Ledger, device: str) -> list[dict[str, Any]]:
    """The rows of tests that failed with this code."""
    own = code(device)
    return [row for row in ledger.of(STAGE) if row["key"] != ALL and ledger.state(STAGE, row["key"], own) == "failed"]


def run(clock: Clock, ledger: Ledger, device: str, quick: bool) -> None:
    """Run what has not passed with this code; the plug-in writes a row for each as it ends.

    Raises:
        TimeUp: when the budget is spent.
    """
    clock.check(0.0 if quick else START)
    own = code(device)
    rows = {row["key"]: ledger.state(STAGE, row["key"], own) for row in ledger.of(STAGE)}
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order.json"
        states = {state: [key for key, found in rows.items() if found == state] for state in ("done", "failed")}
        more = {"folder": str(ledger.path.parent), "code": own, "about": ledger.about}
        order.write_text(json.dumps({**states, **more}))
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.plugin", "-p", "no:cacheprovider", "-q"]
        processes = 0 if quick else max(1, (os.cpu_count() or 1) - 2)
        command += ["-W", "default", "-n", str(processes), FILES[device]]
        command += ["-k", "unequal or as_many"] if quick else []
        log = ledger.path.parent / "tests.log"
        with log.open("w") as output:
            env = {**os.environ, ORDER: str(order), "PYTHONPATH": os.pathsep.join(path())}
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
            while (status := process.poll()) is None and clock.left() > 0:
                time.sleep(0.1)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ledger.load()
    if status in (0, 1, 5):
        ledger.add(STAGE, ALL, own, {"outcome": "passed" if status != 1 else "failed"})
    elif status is not None:
        print(f"tests: pytest ended with status {status}; see {log}", flush=True)


def path() -> list[str]:
    """Where Python looks for this package and for what the tests import."""
    return [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]


def show(ledger: Ledger, device: str) -> str:
    """What failed, by name and in its own words, before how many passed."""
    rows = [row for row in ledger.of(STAGE) if row["key"] != ALL]
    failed = failures(ledger, device)
    lines = [f"FAILED {row['key']}" for row in failed]
    lines += [f"  {row['key'].split('::')[-1]}: {row['error'].splitlines()[0][:160]}" for row in failed if row["error"]]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("passed", "failed", "skipped")}
    older = sum(ledger.state(STAGE, row["key"], code(device)) == "older" for row in rows)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return "\n".join([*lines, f"tests: {text}{f', of which {older} with older code' if older else ''}"])
