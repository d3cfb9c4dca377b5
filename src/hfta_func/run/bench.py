"""The side of a worker, which calls functions that were sent to it, and keeps them for further calls."""

from __future__ import annotations

import importlib
import pickle
import platform
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from hfta_func._types import WorkerError
from hfta_func.run.processes import begin, dumps, line, loads, receive, send
from hfta_func.run.settings import settle


def versions() -> dict[str, str]:
    """What must be the same on both sides, because functions and states pass between them."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hfta_func": importlib.import_module("hfta_func").__version__, "torch": torch.__version__, "Python": python}


def check_versions(worker: str, found: Mapping[str, str]) -> None:
    """Raise a WorkerError that names the worker and what it has another version of."""
    for name, own in versions().items():
        if found.get(name) != own:
            raise WorkerError(f"{worker} has {name} {found.get(name)} and this process {own}; install the same on both")


class Bench:
    """Functions by number, and their calls.

    Args:
        settings: What :func:`settings` are in the process that sends them.
    """

    def __init__(self, settings: Mapping[str, Any]):
        settle(settings)
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, number: int, live: Collection[int], function: bytes | None, arguments: bytes) -> bytes:
        """Call a function, with its answer or error as bytes.

        Args:
            number: The function's number.
            live: The numbers of all functions that are still needed.
            function: The function, unless it was sent before.
            arguments: Its arguments.
        """
        answer: Any = None
        try:
            self._functions = {key: value for key, value in self._functions.items() if key in live}
            if function is not None:
                self._functions[number] = loads(function)
            answer = self._functions[number](**loads(arguments))
        except Exception as error:
            answer = error
        try:
            found = dumps(answer)
            if isinstance(answer, Exception):
                # An error whose class wants other arguments than it has kept can be sent, but not read.
                loads(found)
            return found
        except Exception:
            return pickle.dumps(WorkerError(line(answer)))

    def has(self, number: int) -> bool:
        """Whether a function is here."""
        return number in self._functions


def serve() -> None:
    """The program of a worker process: one order after another from the standard input."""
    orders, answers = begin()
    bench: Bench | None = None
    while (message := receive(orders)) is not None:
        order = pickle.loads(message)
        if bench is None:
            bench = Bench(order)
            continue
        found = bench.call(*order)
        send(answers, pickle.dumps((bench.has(order[0]), found)))
