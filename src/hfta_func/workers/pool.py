"""Pools of workers: each takes the next call when it is free, and one that dies is replaced."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from hfta_func.errors import WorkerError
from hfta_func.workers.executor import Executor
from hfta_func.workers.process import TRIES, Died, Process, Worker, cores
from hfta_func.workers.wire import Folder, dumps, loads, one_line_error

_log = logging.getLogger("hfta_func.workers")


@dataclasses.dataclass
class _Call:
    function: tuple[int, Callable[..., Any], bytes]
    arguments: bytes
    deaths: int = 0
    worker: str = ""


class Pool(Executor):
    """An :class:`~hfta_func.workers.executor.Executor` of workers, which are started at once.

    With ``share`` large tensors of functions are in memory that the workers share. A call whose workers have died ``tries``
    times in a row is given up.
    """

    def __init__(self, workers: Sequence[Worker], *, share: bool = False, tries: int = TRIES):
        self.count, self.shares, self.deaths = len(workers), share, 0
        self._workers, self._tries = workers, tries
        self._folder: Folder | None = None
        # By its id, the number, object and bytes of each function; the object is kept so that no other one gets its id.
        self._functions: dict[int, tuple[int, Callable[..., Any], bytes]] = {}
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._alive, self._closed, self._failed = 0, False, None
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in workers]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._closed = True
        for worker in self._workers:
            self._waiting.put(None)
            worker.kill()
        for thread in self._threads:
            thread.join(10)
        self.forget()

    def ready(self, timeout: float | None = None, everyone: bool = False) -> bool:
        """Wait until one worker is ready, or ``everyone``; returns whether they are, and raises what failed."""
        with self._changed:
            is_known = self._changed.wait_for(
                lambda: self._failed is not None or self._alive >= (self.count if everyone else 1), timeout
            )
        if self._failed is not None:
            raise self._failed
        return is_known

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
            cure = "make what it uses inside the function that uses it, or move it to a module that they can import"
            raise TypeError(f"{name} cannot be sent to workers ({one_line_error(error)}); {cure}") from error

    def submit(self, function: Callable[..., Any], /, **arguments: Any) -> int:
        """See :class:`~hfta_func.workers.executor.Executor`.

        Raises:
            TypeError: if the function or what it uses cannot be sent.
            WorkerError: if the pool is closed.
        """
        if self._closed:
            raise WorkerError("these workers have been closed; make new ones")
        self.prepare(function)
        number = next(self._numbers)
        self._calls[number] = _Call(self._functions[id(function)], dumps(arguments))
        self._waiting.put(number)
        return number

    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        """See :class:`~hfta_func.workers.executor.Executor`; raises a WorkerError if a worker cannot be started."""
        while True:
            number, answer = self._answers.get(timeout=timeout)
            if number < 0:
                raise answer
            if self._calls.pop(number, None) is not None:
                return number, answer

    def forget(self, function: Callable[..., Any] | None = None) -> None:
        """See :class:`~hfta_func.workers.executor.Executor`; calls that run go on, and their answers are dropped."""
        if function is not None:
            self._functions.pop(id(function), None)
            return
        self._calls.clear()
        self._functions.clear()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _serve(self, worker: Worker) -> None:
        """The program of a worker's thread."""
        try:
            while not self._closed:
                worker.start()
                self._add_alive(1)
                known: set[int] = set()
                while (number := self._waiting.get()) is not None and self._made(worker, number, known):
                    pass
                self._add_alive(-1)
        except Exception as error:
            # Even if other workers can go on: the cause, such as another version, is one to be mended.
            failed = error if isinstance(error, WorkerError) else WorkerError(f"{worker.name}: {one_line_error(error)}")
            if not self._closed:
                _log.error("%s cannot go on: %s", worker.name, failed)
                self._failed = failed
                self._answers.put((-1, failed))
                self._add_alive(0)
        finally:
            worker.close()

    def _add_alive(self, change: int) -> None:
        with self._changed:
            self._alive += change
            self._changed.notify_all()

    def _made(self, worker: Worker, number: int, known: set[int]) -> bool:
        """Have a worker make a call, which knows some functions; returns whether it lives."""
        if (call := self._calls.get(number)) is None:
            # It was forgotten.
            return True
        function, _, content = call.function
        live = frozenset(kept for kept, *_ in [*self._functions.values()])
        call.worker = worker.name
        try:
            answer = loads(worker.call(function, live, None if function in known else content, call.arguments))
        except Exception as error:
            # The worker's state is unknown: fail the call so that its caller does not hang.
            cause = str(error) if isinstance(error, Died) else one_line_error(error)
        else:
            known &= live
            known |= {function} if not isinstance(answer, Exception) else set()
            call.worker = ""
            self._answers.put((number, answer))
            return True
        if self._closed:
            return False
        self.deaths += 1
        call.deaths, call.worker = call.deaths + 1, ""
        if call.deaths < self._tries:
            self._waiting.put(number)
            _log.warning("%s died (%s); its call is repeated", worker.name, cause)
            return False
        often = "once" if self._tries == 1 else f"{self._tries} times in a row"
        text = f"its workers died {often}, last {worker.name} {cause}; what it printed says why"
        text += ", or the system's log if the system has ended it: use fewer workers, or smaller arrays"
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
