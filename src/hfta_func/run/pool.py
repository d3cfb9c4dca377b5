"""Workers that outlive a call: each takes the next call of a function when it is free, and one that dies is replaced."""

from __future__ import annotations

import collections
import itertools
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from hfta_func._types import WorkerError
from hfta_func.run.processes import Folder, Process, cores, dumps, line, loads
from hfta_func.run.settings import settings

TRIES = 3
"""How often in a row the worker of a call may die before the call is given up."""
_log = logging.getLogger("hfta_func.workers")


class Died(Exception):
    """A worker is gone; the text says how."""


class Worker(Protocol):
    """One worker, which a thread of the pool waits for."""

    name: str

    def start(self) -> None:
        """Begin, or begin anew, with no function known; raises a WorkerError if that cannot be."""
        ...

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :meth:`bench.Bench.call`; whether the function is there now, and the answer. Raises :class:`Died`."""
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


class Pool:
    """An :class:`~hfta_func.run.executors.Executor` of workers.

    Args:
        workers: The workers, which are started at once.
        share: Whether large tensors that functions hold lie in files that the workers, on this machine, map into memory.
    """

    def __init__(self, workers: Sequence[Worker], *, share: bool = False):
        self.count, self.deaths = len(workers), 0
        self._workers, self._share = workers, share
        self._folder: Folder | None = None
        # By its identity, every function with its number; it is kept, so that no other one gets its identity.
        self._functions: dict[int, tuple[int, Callable[..., Any]]] = {}
        self._bytes: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._tries: dict[int, int] = {}
        self._busy: dict[int, tuple[str, float]] = {}
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._closed = False
        self._begun = 0
        self._failed: WorkerError | None = None
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in workers]
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

    def ready(self) -> None:
        """Wait until a worker can work; raises a WorkerError if there is one that must not."""
        with self._changed:
            while not self._begun and self._failed is None:
                self._changed.wait()
        if self._failed is not None:
            raise self._failed

    def submit(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """See :class:`~hfta_func.run.executors.Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        if id(function) not in self._functions:
            if self._folder is None and self._share:
                self._folder = Folder()
            try:
                found = dumps(function, self._folder)
            except Exception as error:
                raise TypeError(
                    f"{_what(function)} cannot be sent to workers ({line(error)}); make what it uses inside the "
                    f"function that uses it, or move it to a module that they can import"
                ) from error
            own = next(self._numbers)
            self._functions[id(function)] = own, function
            self._bytes[own] = found
        own, _ = self._functions[id(function)]
        call = _Call(next(self._numbers), own, dumps(arguments))
        with self._changed:
            self._tries[call.number] = 0
            self._waiting.append(call)
            self._changed.notify()
        return call.number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`~hfta_func.run.executors.Executor`.

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

    def forget(self) -> None:
        """See :class:`~hfta_func.run.executors.Executor`; what runs goes on, and its answer is dropped."""
        with self._changed:
            self._waiting.clear()
            self._tries.clear()
            self._functions.clear()
            self._bytes = {}
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def busy(self) -> dict[int, tuple[str, float]]:
        """See :class:`~hfta_func.run.executors.Executor`."""
        return dict(self._busy)

    def _serve(self, worker: Worker) -> None:
        """What a worker's thread does."""
        try:
            worker.start()
            with self._changed:
                self._begun += 1
                self._changed.notify_all()
            known: set[int] = set()
            while (call := self._next()) is not None:
                if not self._do(worker, call, known):
                    known.clear()
                    worker.start()
        except Exception as error:
            with self._changed:
                self.count -= 1
                if self._closed:
                    return
            _log.error("%s cannot go on: %s", worker.name, error)
            # Others may have the right version, but whoever asked for this one should know.
            if isinstance(error, WorkerError) or self.count == 0:
                failed = error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {line(error)}")
                self._answers.put((-1, failed))
                with self._changed:
                    self._failed = failed
                    self._changed.notify_all()
        finally:
            worker.close()

    def _next(self) -> _Call | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def _do(self, worker: Worker, call: _Call, known: set[int]) -> bool:
        """Make a call; whether the worker lives."""
        own = call.function
        with self._changed:
            function, live = self._bytes.get(own), frozenset(self._bytes)
            if function is None or call.number not in self._tries:
                return True
            self._busy[call.number] = worker.name, time.time()
        _log.info("%s begins call %d", worker.name, call.number)
        try:
            there, answer = worker.call(own, live, None if own in known else function, call.arguments)
        except Died as error:
            if self._closed:
                return True
            self._died(worker, call, str(error))
            return False
        finally:
            with self._changed:
                self._busy.pop(call.number, None)
        known.intersection_update(live)
        known.update([own] if there else [])
        self._answers.put((call.number, loads(answer)))
        return True

    def _died(self, worker: Worker, call: _Call, how: str) -> None:
        with self._changed:
            self.deaths += 1
            if call.number not in self._tries:
                return
            self._tries[call.number] += 1
            if self._tries[call.number] < TRIES:
                # Any worker may repeat it, and does so first.
                self._waiting.appendleft(call)
                self._changed.notify()
                again = "repeated"
            else:
                again = "given up"
                self._answers.put((
                    call.number,
                    WorkerError(
                        f"its workers died {TRIES} times in a row, last {worker.name} {how}; what it printed says why, or "
                        f"the system's log if the system has ended it: use fewer workers, or smaller arrays"
                    ),
                ))  # fmt: skip
        _log.warning("%s died (%s); its call is %s", worker.name, how, again)


def _what(function: Any) -> str:
    return getattr(function, "label", None) or getattr(function, "__qualname__", type(function).__qualname__)


class _Local:
    """A :class:`Worker` in a process of this machine."""

    def __init__(self, number: int, processors: Sequence[int], on_gpu: bool, settings: bytes):
        self.name = f"worker {number}"
        self._how = number, processors, on_gpu, "hfta_func.run.bench"
        self._settings = settings
        self._closed = False
        self.process: Process | None = None

    def start(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = Process(*self._how)
        self.process.send(self._settings)
        if self._closed:
            self.process.kill()

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        assert self.process is not None
        self.process.send(pickle.dumps((number, live, function, arguments)))
        answer = self.process.receive()
        if answer is None:
            raise Died(f"with status {self.process.status()}")
        return answer

    def kill(self) -> None:
        self._closed = True
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


class WorkerPool(Pool):
    """Worker processes on this machine, for several calls of :func:`fit` and ``tune.run``.

    Args:
        workers: How many, each with an equal share of the processors, or with a GPU where there are some; ``"auto"`` is one
            for every processor, or GPU.

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
        processors, gpus = cores(), torch.cuda.device_count()
        most = len(processors)
        count = (gpus or most) if workers == "auto" else workers
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"workers is {workers!r}; it must be at least 1, or 'auto'")
        if count > most:
            raise ValueError(
                f"workers is {count}, more than the {most} processors that this process may use; pass at most {most}, or "
                f"'auto'"
            )
        edges = [most * number // count for number in range(count + 1)]
        own = pickle.dumps(settings())
        super().__init__(
            [
                _Local(number, processors[low:high], gpus > 0, own)
                for number, (low, high) in enumerate(itertools.pairwise(edges))
            ],
            share=True,
        )
