"""Pools of workers: each takes the next call when it is free, and one that dies is replaced."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from hfta_func.errors import WorkerError
from hfta_func.workers.executor import Executor
from hfta_func.workers.process import TRIES, Died, Process, cores
from hfta_func.workers.wire import Folder, dumps, loads, one_line_error

_log = logging.getLogger("hfta_func.workers")


class Worker(Protocol):
    """One worker, which a thread of the pool starts and calls."""

    name: str

    def start(self) -> None:
        """Start, or start anew, without any function; raises a WorkerError if it cannot."""
        ...

    def call(self, *message: Any) -> bytes:
        """See :meth:`FunctionServer.call`; raises :class:`Died` if the worker dies."""
        ...

    def kill(self) -> None:
        """End at once; called by any thread."""

    def close(self) -> None:
        """Release its resources, when it is not used any more."""


@dataclasses.dataclass
class _Call:
    """A call that waits, or is made by a ``worker`` since a time."""

    function: tuple[int, Callable[..., Any], bytes]
    arguments: bytes
    limit: int
    deaths: int = 0
    worker: str = ""
    since: float = 0.0


class Pool(Executor):
    """An :class:`~hfta_func.workers.executor.Executor` of workers, which are started at once.

    With ``share`` large tensors of functions are in memory that the workers share. A call whose workers have died ``tries``
    times in a row is given up.
    """

    def __init__(
        self, workers: Sequence[Worker], *, share: bool = False, limits: Sequence[int] = (), tries: int = TRIES
    ):
        self.count, self.limits, self.shares = len(workers), tuple(limits), share
        self._workers, self._tries = workers, tries
        self._folder: Folder | None = None
        # By its id, the number, object and bytes of each function; the object is kept so that no other one gets its id.
        self._functions: dict[int, tuple[int, Callable[..., Any], bytes]] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        # By name of the worker; and number of living workers by limit.
        self._seconds, self._deaths = collections.Counter[str](), collections.Counter[str]()
        self._alive = collections.Counter[int]()
        self._closed, self._failed = False, None
        places = zip(workers, self.limits or [0] * len(workers), strict=True)
        self._threads = [threading.Thread(target=self._serve, args=place, daemon=True) for place in places]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join(10)
        self.forget()

    def ready(self, timeout: float | None = None, everyone: bool = False) -> bool:
        """Wait until one worker of each limit is ready, or ``everyone``; returns whether they are, and raises what failed."""

        def is_known() -> bool:
            if self._failed is not None:
                raise self._failed
            return self._alive.total() >= self.count if everyone else {*(self.limits or [0])} <= {*+self._alive}

        with self._changed:
            return self._changed.wait_for(is_known, timeout)

    def prepare(self, function: Callable[..., Any]) -> None:
        """Turn a function into bytes, which the first :meth:`submit` does otherwise; raises a TypeError if it cannot."""
        if id(function) in self._functions:
            return
        if self._folder is None and self.shares:
            self._folder = Folder()
        try:
            self._functions[id(function)] = next(self._numbers), function, dumps(function, self._folder)
        except Exception as error:
            name = getattr(function, "label", getattr(function, "__qualname__", type(function).__qualname__))
            raise TypeError(
                f"{name} cannot be sent to workers ({one_line_error(error)}); make what it uses inside the function that "
                f"uses it, or move it to a module that they can import"
            ) from error

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        self.prepare(function)
        number, call = next(self._numbers), _Call(self._functions[id(function)], dumps(arguments), limit)
        with self._changed:
            self._calls[number] = call
            self._waiting.append(number)
            self._changed.notify_all()
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            WorkerError: if a worker cannot be started.
            queue.Empty: if there is no answer in time.
        """
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            if self._calls.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`~hfta_func.workers.executor.Executor`; calls that run go on, and their answers are dropped."""
        with self._changed:
            if function is not None:
                self._functions.pop(id(function), None)
                return
            for kept in (self._waiting, self._calls, self._functions):
                kept.clear()
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def busy(self) -> dict[int, tuple[str, float]]:
        """See :class:`~hfta_func.workers.executor.Executor`."""
        return {number: (call.worker, call.since) for number, call in [*self._calls.items()] if call.worker}

    def record(self) -> dict[str, tuple[float, int]]:
        """By name of each worker that has made calls, its seconds at work and its number of deaths."""
        return {worker: (seconds, self._deaths[worker]) for worker, seconds in [*self._seconds.items()]}

    @property
    def deaths(self) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`."""
        return self._deaths.total()

    def _serve(self, worker: Worker, limit: int) -> None:
        """The program of a worker's thread."""
        try:
            while not self._closed:
                worker.start()
                self._add_alive(limit, 1)
                known: set[int] = set()
                while (number := self._next(limit)) is not None and self._made(worker, number, known):
                    pass
                self._add_alive(limit, -1)
        except Exception as error:
            # Even if other workers can go on: the cause, such as another version, is one to be mended.
            failed = error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {one_line_error(error)}")
            if not self._closed:
                _log.error("%s cannot go on: %s", worker.name, failed)
                self._failed = failed
                self._answers.put((-1, failed))
                self._add_alive(limit, 0)
        finally:
            worker.close()

    def _add_alive(self, limit: int, change: int) -> None:
        with self._changed:
            self._alive[limit] += change
            self._changed.notify_all()

    def _next(self, limit: int) -> int | None:
        """The first call for a worker with a limit, or for a smaller one if no such worker lives; None at the end."""
        with self._changed:
            while not self._closed:
                for number in self._waiting:
                    wanted = self._calls[number].limit
                    if wanted in (0, limit) or (wanted < limit and not self._alive[wanted]):
                        self._waiting.remove(number)
                        return number
                self._changed.wait()
            return None

    def _made(self, worker: Worker, number: int, known: set[int]) -> bool:
        """Have a worker make a call, which knows some functions; returns whether it lives."""
        with self._changed:
            if (call := self._calls.get(number)) is None:
                return True
            live = frozenset(function for function, *_ in self._functions.values())
            call.worker, call.since = worker.name, time.time()
        function, _, content = call.function
        _log.info("%s begins call %d", worker.name, number)
        answer, cause = None, ""
        try:
            answer = loads(worker.call(function, live, None if function in known else content, call.arguments))
        except Exception as error:
            # The worker's state is unknown: fail the call so that its caller does not hang.
            cause = str(error) if isinstance(error, Died) else one_line_error(error)
        with self._changed:
            self._seconds[worker.name] += time.time() - call.since  # pyright: ignore[reportArgumentType]
            call.worker = ""
            if not cause:
                known &= live
                known |= {function} if not isinstance(answer, Exception) else set()
                self._answers.put((number, answer))
                return True
            if self._closed:
                return False
            self._deaths[worker.name] += 1
            call.deaths += 1
            is_repeated = call.deaths < self._tries
            if is_repeated and number in self._calls:
                # The next free worker repeats it, before other calls.
                self._waiting.insert(0, number)
                self._changed.notify_all()
        _log.warning("%s died (%s); its call is %s", worker.name, cause, "repeated" if is_repeated else "given up")
        if not is_repeated:
            often = "once" if self._tries == 1 else f"{self._tries} times in a row"
            text = (
                f"its workers died {often}, last {worker.name} {cause}; what it printed says why, or the system's log if "
                f"the system has ended it: use fewer workers, or smaller arrays"
            )
            self._answers.put((number, WorkerError(text)))
        return False


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """The first of ``size`` things in each of ``count`` parts, and the one after its last."""
    return [*itertools.pairwise(size * number // count for number in range(count + 1))]


def processes(count: int, on_gpu: bool) -> list[Process]:
    """Worker processes with an equal share of the processors, or a GPU, each."""
    processors, gpus = cores(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if on_gpu else [""]
    if gpus == [""] and on_gpu:
        gpus = [*map(str, range(torch.cuda.device_count()))]
    spans = enumerate(shares(len(processors), count))
    return [Process(i, processors[low:high] or processors, gpus[i % len(gpus)]) for i, (low, high) in spans]


PROCESSORS = "processors that this process may use"


def number_of(workers: Any, auto: int, most: Mapping[str, int], others: str) -> int:
    """A number of worker processes, which may be ``"auto"``; raises a ValueError if it is none, or there are fewer things."""
    count = auto if workers == "auto" else workers
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"workers is {workers!r}; it must be at least 1, {others}")
    for what, number in most.items():
        if count > number:
            raise ValueError(f"workers is {count}, more than the {number} {what}; pass at most {number}, or 'auto'")
    return count


class WorkerPool(Pool):
    """Worker processes on this machine, for several calls of :func:`fit` and ``tune.run``.

    Args:
        workers: Number of processes, each with an equal share of the processors, or with a GPU where there are some;
            ``"auto"`` is one for every processor, or GPU.

    Raises:
        ValueError: if there are more workers than processors.

    Example:
        >>> with WorkerPool(1) as pool:
        ...     call = pool.submit(dict, seed=7)
        ...     number, answer = pool.wait()
        >>> number == call, answer
        (True, {'seed': 7})
    """

    def __init__(self, workers: int | Literal["auto"] = "auto"):
        gpus = torch.cuda.device_count()
        count = number_of(workers, gpus or len(cores()), {PROCESSORS: len(cores())}, "or 'auto'")
        super().__init__(processes(count, gpus > 0), share=True)
