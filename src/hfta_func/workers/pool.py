"""Executors: the contract, this process, and pools of workers, each of which takes the next call when it is free."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
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


@dataclasses.dataclass(eq=False)
class _Call:
    number: int
    function: int
    arguments: bytes
    deaths: int = 0
    worker: str = ""


class Pool(Executor, contextlib.AbstractContextManager[Any]):
    """An :class:`Executor` of workers, which are started at once.

    With ``share`` functions are in memory that the workers share. A call whose workers have died ``tries`` times in a row is
    given up.
    """

    def __init__(self, workers: Sequence[Worker], *, share: bool = False, tries: int = TRIES):
        self.count, self.shares, self.deaths = len(workers), share, 0
        self._workers, self._tries = workers, tries
        # By its id, the number, object and content of each function; the object is kept so that no other one gets its id.
        self._functions: dict[int, tuple[int, Callable[..., Any], bytes | Shared]] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        # Those without a call; None once the pool is closed.
        self._free: queue.Queue[Worker | None] = queue.Queue()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._alive, self._closed, self._failed = 0, False, None
        self._threads: list[threading.Thread] = []
        for worker in workers:
            self._begin(self._start, worker)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._closed = True
        self._free.put(None)
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join(10)
        for worker in self._workers:
            worker.close()
        self.forget()

    def ready(self, timeout: float | None = None, everyone: bool = False) -> bool:
        """Wait until one worker is ready, or ``everyone``; returns whether they are, and raises what failed."""
        least = self.count if everyone else 1
        with self._changed:
            is_known = self._changed.wait_for(lambda: self._failed is not None or self._alive >= least, timeout)
        if self._failed is not None:
            raise self._failed
        return is_known

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
        self._calls[number] = _Call(number, self._functions[id(function)][0], dumps(arguments))
        self._begin(self._make, self._calls[number])
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`Executor`; raises a WorkerError if a worker cannot be started."""
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            if self._calls.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`Executor`; calls that run go on, and their answers are dropped."""
        if function is not None:
            self._functions.pop(id(function), None)
        else:
            self._calls.clear()
            self._functions.clear()

    def _begin(self, program: Callable[[Any], None], given: Any) -> None:
        # Not those of concurrent.futures, which Python waits for when it ends.
        thread = threading.Thread(target=program, args=(given,), daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _count(self, alive: int, deaths: int = 0) -> None:
        with self._changed:
            self._alive, self.deaths = self._alive + alive, self.deaths + deaths
            self._changed.notify_all()

    def _start(self, worker: Worker) -> None:
        """Start a worker, in a thread."""
        try:
            worker.start()
        except Exception as error:
            # Even if other workers can go on: the cause, such as another version, is one to be mended.
            failed = error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {one_line_error(error)}")
            if not self._closed:
                _log.error("%s cannot go on: %s", worker.name, failed)
                self._failed = failed
                self._answers.put((-1, failed))
                self._count(0)
            return
        self._count(1)
        self._free.put(worker)

    def _make(self, call: _Call) -> None:
        """Have the next free worker make a call, in a thread; another one if that dies."""
        cause = ""
        while call.deaths < self._tries:
            if (worker := self._free.get()) is None or call.number not in self._calls:
                # For the other calls that wait.
                self._free.put(worker)
                return
            contents = {number: getattr(one, "path", one) for number, _, one in [*self._functions.values()]}
            call.worker = worker.name
            try:
                content = contents.get(call.function)
                answer = loads(worker.call(call.function, frozenset(contents), content, call.arguments))
            except Exception as error:
                # The worker's state is unknown: fail the call so that its caller does not hang.
                cause = f"{worker.name} {error if isinstance(error, Died) else one_line_error(error)}"
                if self._closed:
                    return
                call.deaths, call.worker = call.deaths + 1, ""
                self._count(-1, 1)
                _log.warning("%s: it died, and is started again", cause)
                self._begin(self._start, worker)
            else:
                call.worker = ""
                self._free.put(worker)
                self._answers.put((call.number, answer))
                return
        often = "once" if self._tries == 1 else f"{self._tries} times in a row"
        text = f"its workers died {often}, last {cause}; what it printed says why"
        text += ", or the system's log if the system has ended it: use fewer workers, or smaller arrays"
        self._answers.put((call.number, WorkerError(text)))


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
