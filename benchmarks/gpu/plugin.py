"""A plug-in of pytest that writes a row for every test as it ends, and leaves out the tests that have one already.

``python -m benchmarks gpu`` runs it; the environment variable of :data:`ORDER` names a file with what it is to do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.ledger import Ledger

ORDER = "HFTA_FUNC_GPU_TESTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is done; what failed comes first."""
    order = json.loads(Path(os.environ[ORDER]).read_text())
    done, failed = set(order["done"]), set(order["failed"])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = sorted((item for item in items if item.nodeid not in done), key=lambda item: item.nodeid not in failed)


class Rows:
    """Writes rows."""

    def __init__(self, folder: str, code: str, about: dict[str, Any]):
        self._ledger, self._code = Ledger(Path(folder), ()), code
        self._ledger.about = about

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call has ended, or what comes before or after it has not passed."""
        if report.when != "call" and report.passed:
            return
        row: dict[str, Any] = {"outcome": report.outcome, "took": report.duration}
        if report.failed:
            row["error"] = short(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            row["error"] = report.longrepr[2]
        self._ledger.add("tests", report.nodeid, self._code, row)


def short(text: str, most: int = 600) -> str:
    """The lines of a failure that say what went wrong, and where."""
    lines = text.splitlines()
    said = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join([*(said or lines), *lines[-1:]])[:most]


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that the others report to writes."""
    if not hasattr(config, "workerinput"):
        order = json.loads(Path(os.environ[ORDER]).read_text())
        config.pluginmanager.register(Rows(order["folder"], order["code"], order["about"]))
