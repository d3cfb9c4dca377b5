"""Pools of workers: each takes the next call when it is free, and one that dies is replaced."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

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

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :meth:`FunctionServer.call`; raises :class:`Died` if the worker dies."""
        ...

    def kill(self) -> None:
        """End at once; called by any thread."""

    def close(self) -> None:
        """Release its resources, when it is not used any more."""


class _Call(NamedTuple):
    """A call that waits or runs; ``function`` is the number of its function."""

    number: int
    function: int
    arguments: bytes
    limit: int


class Pool(Executor):
    """An :class:`~hfta_func.workers.executor.Executor` of workers, which are started at once.

    With ``share`` large tensors of functions are in files that the workers map into memory. A call whose workers have died
    ``tries`` times in a row is given up.
    """

    def __init__(
        self, workers: Sequence[Worker], *, share: bool = False, limits: Sequence[int] = (), tries: int = TRIES
    ):
        self.count, self.limits = len(workers), tuple(limits)
        self._workers, self.shares, self._most_tries = workers, share, tries
        self._folder: Folder | None = None
        # The number of each function by its id; the function is kept so that no other one gets its id.
        self._functions: dict[int, tuple[int, Callable[..., Any]]] = {}
        self._bytes: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._tries: dict[int, int] = {}
        self._busy: dict[int, tuple[str, float]] = {}
        # By name of the worker.
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._deaths: collections.Counter[str] = collections.Counter()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._closed = False
        # Number of living workers by limit.
        self._alive: collections.Counter[int] = collections.Counter()
        self._failed: WorkerError | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, limit), daemon=True)
            for worker, limit in zip(workers, self.limits or [0] * len(workers), strict=True)
        ]
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
        limits = {*self.limits} or {0}

        def are_ready() -> bool:
            return self._alive.total() >= self.count if everyone else limits <= {*+self._alive}

        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or are_ready(), timeout)
            if self._failed is not None:
                raise self._failed
            return are_ready()

    def prepare(self, function: Callable[..., Any]) -> None:
        """Turn a function into bytes, which the first :meth:`submit` does otherwise; raises a TypeError if it cannot."""
        if id(function) not in self._functions:
            if self._folder is None and self.shares:
                self._folder = Folder()
            try:
                content = dumps(function, self._folder)
            except Exception as error:
                name = getattr(function, "label", getattr(function, "__qualname__", type(function).__qualname__))
                raise TypeError(
                    f"{name} cannot be sent to workers ({one_line_error(error)}); make what it uses inside the "
                    f"function that uses it, or move it to a module that they can import"
                ) from error
            number = next(self._numbers)
            self._functions[id(function)] = number, function
            self._bytes[number] = content

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        self.prepare(function)
        function_number, _ = self._functions[id(function)]
        call = _Call(next(self._numbers), function_number, dumps(arguments), limit)
        with self._changed:
            self._tries[call.number] = 0
            self._waiting.append(call)
            self._changed.notify_all()
        return call.number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            WorkerError: if no worker is left, or one cannot be used.
            queue.Empty: if there is no answer in time.
        """
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            if self._tries.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`~hfta_func.workers.executor.Executor`; calls that run go on, and their answers are dropped."""
        with self._changed:
            if function is not None:
                if id(function) in self._functions:
                    del self._bytes[self._functions.pop(id(function))[0]]
                return
            self._waiting.clear()
            self._tries.clear()
            self._functions.clear()
            self._bytes = {}
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def busy(self) -> dict[int, tuple[str, float]]:
        """See :class:`~hfta_func.workers.executor.Executor`."""
        return dict(self._busy)

    def record(self) -> dict[str, tuple[float, int]]:
        """By name of each worker that has made calls, its seconds at work and its number of deaths."""
        with self._changed:
            return {worker: (seconds, self._deaths[worker]) for worker, seconds in self._seconds.items()}

    @property
    def deaths(self) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`."""
        return self._deaths.total()

    def _serve(self, worker: Worker, limit: int) -> None:
        """The program of a worker's thread."""
        try:
            worker.start()
            self._add_alive(limit, 1)
            known: set[int] = set()
            while (call := self._next(limit)) is not None:
                if not self._do(worker, call, known):
                    known.clear()
                    self._add_alive(limit, -1)
                    worker.start()
                    self._add_alive(limit, 1)
        except Exception as error:
            with self._changed:
                self.count -= 1
                # One such limit less.
                self.limits = (*(collections.Counter(self.limits) - collections.Counter([limit])).elements(),)
                if self._closed:
                    return
                alike = self.limits.count(limit) if limit else self.count
            _log.error("%s cannot go on: %s", worker.name, error)
            # Even if other workers can go on: the cause, such as another version, is one to be mended.
            is_to_mend = isinstance(error, WorkerError)
            if is_to_mend or alike == 0:
                failed = error if is_to_mend else WorkerError(f"{worker.name}: {one_line_error(error)}")
                self._answers.put((-1, failed))
                with self._changed:
                    self._failed = failed
                    self._changed.notify_all()
        finally:
            worker.close()

    def _add_alive(self, limit: int, change: int) -> None:
        with self._changed:
            self._alive[limit] += change
            self._changed.notify_all()

    def _next(self, limit: int) -> _Call | None:
        """The first call for a worker with a limit, or for a smaller one if no such worker lives; None at the end."""
        with self._changed:
            while not self._closed:
                for call in self._waiting:
                    if call.limit in (0, limit) or (call.limit < limit and not self._alive[call.limit]):
                        self._waiting.remove(call)
                        return call
                self._changed.wait()
            return None

    def _do(self, worker: Worker, call: _Call, known: set[int]) -> bool:
        """Have a worker make a call; returns whether the worker lives."""
        with self._changed:
            function, live = self._bytes.get(call.function), frozenset(self._bytes)
            if function is None or call.number not in self._tries:
                return True
            self._busy[call.number] = worker.name, time.time()
        _log.info("%s begins call %d", worker.name, call.number)
        has_function, answer, cause = False, None, None
        try:
            sent = None if call.function in known else function
            has_function, message = worker.call(call.function, live, sent, call.arguments)
            answer = loads(message)
        except Exception as error:
            # The worker's state is unknown: fail the call so that its caller does not hang.
            cause = str(error) if isinstance(error, Died) else one_line_error(error)
        # Removed before another worker may repeat the call, which has the same number.
        with self._changed:
            self._seconds[worker.name] += time.time() - self._busy.pop(call.number)[1]
        if cause is not None:
            if not self._closed:
                self._died(worker, call, cause)
            return self._closed
        known.intersection_update(live)
        if has_function:
            known.add(call.function)
        self._answers.put((call.number, answer))
        return True

    def _died(self, worker: Worker, call: _Call, cause: str) -> None:
        with self._changed:
            self._deaths[worker.name] += 1
            if call.number not in self._tries:
                return
            self._tries[call.number] += 1
            is_repeated, most = self._tries[call.number] < self._most_tries, self._most_tries
            if is_repeated:
                # The next free worker repeats it, before other calls.
                self._waiting.appendleft(call)
                self._changed.notify_all()
        if not is_repeated:
            died = f"its workers died {most} times in a row, last" if most > 1 else "its worker died,"
            text = (
                f"{died} {worker.name} {cause}; what it printed says why, or the system's log if the system has ended "
                f"it: use fewer workers, or smaller arrays"
            )
            self._answers.put((call.number, WorkerError(text)))
        _log.warning("%s died (%s); its call is %s", worker.name, cause, "repeated" if is_repeated else "given up")


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """The first of ``size`` things in each of ``count`` parts, and the one after its last."""
    return [*itertools.pairwise(size * number // count for number in range(count + 1))]


def processes(count: int, on_gpu: bool) -> list[Process]:
    """Worker processes with an equal share of the processors, or a GPU, each."""
    processors = cores()
    spans = enumerate(shares(len(processors), count))
    return [Process(number, processors[low:high] or processors, on_gpu) for number, (low, high) in spans]


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
