"""Executors: the contract, and the executor that calls functions in this process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol


class Executor(Protocol):
    """Calls functions, several at a time, and returns their results; what trains arrays.

    :func:`hfta_func.fit` and ``tune.run`` take any executor as ``executor=``. :class:`~hfta_func.workers.WorkerPool` is one
    of worker processes, ``hfta_func.cluster.ray(...)`` one of Ray's actors. To write one, subclass this class and define
    ``count``, ``submit``, ``wait`` and ``forget``; the rest has defaults.

    Every function is called many times. An executor sends it to a worker once and keeps the copy, so that what the function
    holds, such as data, stays there. If a worker dies, its call may be repeated with the same arguments.

    Attributes:
        count: Number of calls that run at the same time.
        shares: Whether the workers run on this machine and read files that this process maps into its memory.
        deaths: Number of workers that have died.

    Example:
        >>> import functools
        >>> class OneByOne(Executor):
        ...     count = 1
        ...     def __init__(self):
        ...         self.calls = []
        ...     def submit(self, function, /, **arguments):
        ...         self.calls.append(functools.partial(function, **arguments))
        ...         return len(self.calls) - 1
        ...     def wait(self, timeout=None):
        ...         number = next(number for number, call in enumerate(self.calls) if call)
        ...         call, self.calls[number] = self.calls[number], None
        ...         return number, call()
        ...     def forget(self, function=None):
        ...         self.calls = self.calls if function else [None] * len(self.calls)
        >>> executor = OneByOne()
        >>> call = executor.submit(dict, seed=7)
        >>> executor.wait() == (call, {"seed": 7})
        True
    """

    count: int
    shares: bool = False
    deaths: int = 0

    def submit(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """Have a function called with these arguments; returns the number of the call.

        Args:
            function: The function; the same object is the same function in later calls.
            arguments: The function's arguments.
        """
        ...

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """Wait for the end of any call.

        Args:
            timeout: Seconds to wait at most; None for no bound.

        Returns:
            The number of the call, and the function's result or the error that it raised.

        Raises:
            queue.Empty: if no call has ended in time.
        """
        ...

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """Drop a function that is not called any more, or all functions and calls."""
        ...


class Inline(Executor):
    """An :class:`Executor` that calls functions in this process, one after another."""

    count = 1

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], Any]] = {}
        self._numbers = itertools.count()

    def submit(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """See :class:`Executor`."""
        self._calls[number := next(self._numbers)] = functools.partial(function, **arguments)
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`Executor`."""
        number = min(self._calls)
        call = self._calls.pop(number)
        try:
            return number, call()
        except Exception as error:
            return number, error

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`Executor`."""
        if function is None:
            self._calls.clear()
