"""An executor: two workers that are this process; the call that was submitted last is answered first."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import hfta_func as hfta


class LastFirst(hfta.workers.Executor):
    """Calls a function when its answer is waited for."""

    count = 2

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], Any]] = {}
        self._numbers = itertools.count()

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """Note the call."""
        number = next(self._numbers)
        self._calls[number] = functools.partial(function, **arguments)
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """Make the last call that was noted."""
        number, call = self._calls.popitem()
        try:
            return number, call()
        except Exception as error:
            return number, error

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """Drop all calls; nothing is kept of a function."""
        if function is None:
            self._calls.clear()
