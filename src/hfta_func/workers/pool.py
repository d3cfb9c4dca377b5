"""Workers that outlive a call: each takes the next call of a function when it is free, and one that dies is replaced."""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hfta_func._types import WorkerError
from hfta_func.workers.executor import Executor
from hfta_func.workers.process import TRIES, Died
from hfta_func.workers.wire import Folder, dumps, loads, one_line_error

_log = logging.getLogger("hfta_func.workers")


class Worker(Protocol):
    """One worker, which a thread of the pool waits for."""

    name: str

    def start(self) -> None:
        """Begin, or begin anew, with no function known; raises a WorkerError if that cannot be."""
        ...

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :meth:`FunctionServer.call`; whether the function is there now, and the answer. Raises :class:`Died`."""
        ...

    def kill(self) -> None:
        """End, whatever it is doing; called by any thread."""
        ...

    def close(self) -> None:
        """Give back what it holds, when it is not used any more."""
        ...


class _Call(NamedTuple):
    number: int
    function: int
    arguments: bytes
    limit: int


class Pool(Executor):
    """An :class:`~hfta_func.workers.executor.Executor` of workers.

    Args:
        workers: The workers, which are started at once.
        share: Whether large tensors that functions hold lie in files that the workers, on this machine, map into memory.
        limits: The largest array of each worker; empty if they are alike.
        tries: How often in a row the worker of a call may die before the call is given up.
    """

    def __init__(
        self, workers: Sequence[Worker], *, share: bool = False, limits: Sequence[int] = (), tries: int = TRIES
    ):
        self.count, self.limits = len(workers), tuple(limits)
        self._workers, self.shares, self._most_tries = workers, share, tries
        self._folder: Folder | None = None
        # By its identity, every function with its number; it is kept, so that no other one gets its identity.
        self._functions: dict[int, tuple[int, Callable[..., Any]]] = {}
        self._bytes: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._tries: dict[int, int] = {}
        self._busy: dict[int, tuple[str, float]] = {}
        # Seconds at work and deaths, by name of the worker.
        self._record: dict[str, tuple[float, int]] = {}
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._closed = False
        # How many workers with each limit live.
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
        """Wait until workers can work.

        Args:
            timeout: Most seconds to wait.
            everyone: Whether to wait for all workers, and not only for one of each limit.

        Returns:
            Whether they can.

        Raises:
            WorkerError: if there is a worker that must not work.
        """
        wanted = {*self.limits} or {0}

        def reached() -> bool:
            return self._alive.total() >= self.count if everyone else wanted <= {*+self._alive}

        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or reached(), timeout)
            if self._failed is not None:
                raise self._failed
            return reached()

    def prepare(self, function: Callable[..., Any]) -> None:
        """Make a function ready to be sent, which :meth:`submit` does otherwise.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
        """
        if id(function) not in self._functions:
            if self._folder is None and self.shares:
                self._folder = Folder()
            try:
                found = dumps(function, self._folder)
            except Exception as error:
                raise TypeError(
                    f"{_what(function)} cannot be sent to workers ({one_line_error(error)}); make what it uses inside the "
                    f"function that uses it, or move it to a module that they can import"
                ) from error
            own = next(self._numbers)
            self._functions[id(function)] = own, function
            self._bytes[own] = found

    def submit(self, function: Callable[..., Any], limit: int = 0, /, **arguments: Any) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        self.prepare(function)
        own, _ = self._functions[id(function)]
        call = _Call(next(self._numbers), own, dumps(arguments), limit)
        with self._changed:
            self._tries[call.number] = 0
            self._waiting.append(call)
            self._changed.notify_all()
        return call.number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Args:
            timeout: Most seconds to wait for an answer.

        Raises:
            WorkerError: if no worker is left, or one must not work.
            queue.Empty: if there is no answer in time.
        """
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            if self._tries.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`~hfta_func.workers.executor.Executor`; what runs goes on, and its answer is dropped."""
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
        """By name of each worker that has worked, how many seconds it has, and how often it has died."""
        with self._changed:
            return dict(self._record)

    @property
    def deaths(self) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`."""
        return sum(deaths for _, deaths in self.record().values())

    def _note(self, worker: str, seconds: float, deaths: int) -> None:
        with self._changed:
            before = self._record.get(worker, (0.0, 0))
            self._record[worker] = before[0] + seconds, before[1] + deaths

    def _serve(self, worker: Worker, limit: int) -> None:
        """What a worker's thread does."""
        try:
            worker.start()
            self._lives(limit, 1)
            known: set[int] = set()
            while (call := self._next(limit)) is not None:
                if not self._do(worker, call, known):
                    known.clear()
                    self._lives(limit, -1)
                    worker.start()
                    self._lives(limit, 1)
        except Exception as error:
            with self._changed:
                self.count -= 1
                if self.limits:
                    left = [*self.limits]
                    left.remove(limit)
                    self.limits = tuple(left)
                if self._closed:
                    return
                same = self.limits.count(limit) if limit else self.count
            _log.error("%s cannot go on: %s", worker.name, error)
            # Others may have the right version, but whoever asked for this one should know.
            if isinstance(error, WorkerError) or same == 0:
                failed = (
                    error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {one_line_error(error)}")
                )
                self._answers.put((-1, failed))
                with self._changed:
                    self._failed = failed
                    self._changed.notify_all()
        finally:
            worker.close()

    def _lives(self, limit: int, change: int) -> None:
        with self._changed:
            self._alive[limit] += change
            self._changed.notify_all()

    def _next(self, limit: int) -> _Call | None:
        """The first call for a worker with a limit, or for a smaller one if none such lives."""
        with self._changed:
            while not self._closed:
                for call in self._waiting:
                    if call.limit in (0, limit) or (call.limit < limit and not self._alive[call.limit]):
                        self._waiting.remove(call)
                        return call
                self._changed.wait()
            return None

    def _do(self, worker: Worker, call: _Call, known: set[int]) -> bool:
        """Make a call; whether the worker lives."""
        own = call.function
        with self._changed:
            function, live = self._bytes.get(own), frozenset(self._bytes)
            if function is None or call.number not in self._tries:
                return True
            self._busy[call.number] = worker.name, time.time()
        _log.info("%s begins call %d", worker.name, call.number)
        there, found, how = False, None, None
        try:
            there, answer = worker.call(own, live, None if own in known else function, call.arguments)
            found = loads(answer)
        except Exception as error:
            # Whatever it is, nobody knows what the worker does now, and who waits for the answer must not wait for ever.
            how = str(error) if isinstance(error, Died) else one_line_error(error)
        # Before another worker may repeat the call and have this entry.
        with self._changed:
            _, began = self._busy.pop(call.number)
        self._note(worker.name, time.time() - began, 0)
        if how is not None:
            if not self._closed:
                self._died(worker, call, how)
            return self._closed
        known.intersection_update(live)
        known.update([own] if there else [])
        self._answers.put((call.number, found))
        return True

    def _died(self, worker: Worker, call: _Call, how: str) -> None:
        self._note(worker.name, 0.0, 1)
        with self._changed:
            if call.number not in self._tries:
                return
            self._tries[call.number] += 1
            if self._tries[call.number] < self._most_tries:
                # Any worker may repeat it, and does so first.
                self._waiting.appendleft(call)
                self._changed.notify_all()
                again = "repeated"
            else:
                again = "given up"
                most = self._most_tries
                died = f"its workers died {most} times in a row, last" if most > 1 else "its worker died,"
                text = (
                    f"{died} {worker.name} {how}; what it printed says why, or the system's log if the system has ended "
                    f"it: use fewer workers, or smaller arrays"
                )
                self._answers.put((call.number, WorkerError(text)))
        _log.warning("%s died (%s); its call is %s", worker.name, how, again)


def _what(function: Any) -> str:
    return getattr(function, "label", None) or getattr(function, "__qualname__", type(function).__qualname__)
