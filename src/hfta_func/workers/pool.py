"""Executors: the contract, this process, and pools of workers, each of which takes the next call when it is free."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal, Protocol

import torch

from hfta_func.errors import WorkerError
from hfta_func.workers.process import TRIES, Died, Process, Shared, Worker, cores, dumps, loads, one_line_error

_log = logging.getLogger("hfta_func.workers")


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
        try:
            return number, self._calls.pop(number)()
        except Exception as error:
            return number, error

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`Executor`."""
        if function is None:
            self._calls.clear()


class Pool(Executor, contextlib.AbstractContextManager[Any]):
    """An :class:`Executor` of workers, which are started at once, each by a thread of its own that makes its calls.

    With ``share`` functions are in memory that the workers share. A call whose workers have died ``tries`` times in a row is
    given up.
    """

    def __init__(self, workers: Sequence[Worker], *, share: bool = False, tries: int = TRIES):
        self.count, self.shares, self.deaths = len(workers), share, 0
        self._workers, self._tries, self._closed = workers, tries, False
        # By its id, the number, object and content of each function; the object is kept so that no other one gets its id.
        self._functions: dict[int, tuple[int, Callable[..., Any], bytes | Shared]] = {}
        self._numbers, self._deaths = itertools.count(), itertools.count(1)
        # By the number of each call, that of its function, and its arguments; and how many workers it has seen die.
        self._calls: dict[int, tuple[int, bytes]] = {}
        self._seen_to_die = collections.Counter[int]()
        # Calls that wait for a worker; None once the pool is closed.
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        # Whether each worker has started, or the error.
        self._started: list[futures.Future[None]] = [futures.Future() for _ in workers]
        # Not those of concurrent.futures, which Python waits for when it ends.
        pairs = zip(workers, self._started, strict=True)
        self._threads = [threading.Thread(target=self._run, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._closed = True
        self._waiting.put(None)
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join(10)
        for worker in self._workers:
            worker.close()
        self.forget()

    def ready(self, timeout: float | None = None, everyone: bool = False) -> bool:
        """Wait until one worker is ready, or ``everyone``; returns whether they are, and raises what failed."""
        until = futures.FIRST_EXCEPTION if everyone else futures.FIRST_COMPLETED
        done, rest = futures.wait(self._started, timeout, until)
        for one in done:
            one.result()
        return not rest if everyone else bool(done)

    def submit(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """See :class:`Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        if id(function) not in self._functions:
            try:
                content = Shared(function) if self.shares else dumps(function)
            except Exception as error:
                name = getattr(function, "label", getattr(function, "__qualname__", type(function).__qualname__))
                cure = "make what it uses inside the function that uses it, or move it to a module that they can import"
                raise TypeError(f"{name} cannot be sent to workers ({one_line_error(error)}); {cure}") from error
            self._functions[id(function)] = next(self._numbers), function, content
        number = next(self._numbers)
        self._calls[number] = self._functions[id(function)][0], dumps(arguments)
        self._waiting.put(number)
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`Executor`; raises a WorkerError if a worker cannot be started."""
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            self._seen_to_die.pop(number, None)
            if self._calls.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`Executor`; calls that run go on, and their answers are dropped."""
        if function is not None:
            self._functions.pop(id(function), None)
        else:
            self._calls.clear()
            self._functions.clear()

    def _run(self, worker: Worker, started: futures.Future[None]) -> None:
        """Start a worker, have it make one call after another, and start it anew when it dies, in a thread."""
        try:
            while not self._closed:
                worker.start()
                if not started.done():
                    started.set_result(None)
                while (call := self._waiting.get()) is not None and self._is_answered(call, worker):
                    pass
                if call is None:
                    # For the other threads.
                    self._waiting.put(None)
        except Exception as error:
            # Even if other workers can go on: the cause, such as another version, is one to be mended.
            failed = error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {one_line_error(error)}")
            if not self._closed:
                _log.error("%s cannot go on: %s", worker.name, failed)
                self._answers.put((-1, failed))
                if not started.done():
                    started.set_exception(failed)

    def _is_answered(self, call: int, worker: Worker) -> bool:
        """Have a worker make a call; if it dies, another one makes the call."""
        if (wanted := self._calls.get(call)) is None:
            return True
        contents = {number: getattr(one, "path", one) for number, _, one in [*self._functions.values()]}
        try:
            answer = worker.call(wanted[0], frozenset(contents), contents.get(wanted[0]), wanted[1])
            self._answers.put((call, loads(answer)))
            return True
        except Exception as error:
            # The worker's state is unknown: fail the call so that its caller does not hang.
            cause = f"{worker.name} {error if isinstance(error, Died) else one_line_error(error)}"
        if self._closed:
            return False
        self._seen_to_die[call] += 1
        self.deaths = next(self._deaths)
        if self._seen_to_die[call] < self._tries:
            self._waiting.put(call)
        else:
            often = "once" if self._tries == 1 else f"{self._tries} times in a row"
            text = f"its workers died {often}, last {cause}; what it printed says why"
            text += ", or the system's log if the system has ended it: use fewer workers, or smaller arrays"
            self._answers.put((call, WorkerError(text)))
        _log.warning("%s: it died, and is started again", cause)
        return False


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """The first of ``size`` things in each of ``count`` parts, and the one after its last."""
    return [*itertools.pairwise(size * number // count for number in range(count + 1))]


def processes(workers: Any, auto: int, on_gpu: bool) -> list[Process]:
    """Worker processes with an equal share of the processors, or a GPU, each; ``auto`` is their number for ``"auto"``."""
    count = auto if workers == "auto" else workers
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"workers is {workers!r}; it must be at least 1, or 'auto'")
    processors, gpus = cores(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if on_gpu else [""]
    if gpus == [""] and on_gpu:
        gpus = [*map(str, range(torch.cuda.device_count()))]
    spans = enumerate(shares(len(processors), count))
    return [Process(i, processors[low:high] or processors, gpus[i % len(gpus)]) for i, (low, high) in spans]


class WorkerPool(Pool):
    """Worker processes on this machine, for several calls of :func:`fit` and ``tune.run``.

    Args:
        workers: Number of processes, each with an equal share of the processors, or with a GPU where there are some;
            ``"auto"`` is one for every processor, or GPU.

    Example:
        >>> with WorkerPool(1) as pool:
        ...     call = pool.submit(dict, seed=7)
        ...     number, answer = pool.wait()
        >>> number == call, answer
        (True, {'seed': 7})
    """

    def __init__(self, workers: int | Literal["auto"] = "auto"):
        gpus = torch.cuda.device_count()
        super().__init__(processes(workers, gpus or len(cores()), gpus > 0), share=True)
