"""A worker process: its start, calls of functions that are sent to it, what passes, and its end, from both sides."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import pathlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from multiprocessing import connection, forkserver, popen_forkserver, spawn
from typing import Any
from unittest import mock

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from hfta_func._torch import parametrized, replaced
from hfta_func.errors import WorkerError
from hfta_func.rules import _choice
from hfta_func.rules._extend import adopt, outside_rules
from hfta_func.rules._measured import choices

TRIES = 3
"""Number of deaths of a worker in a row after which a call, or starting a worker, is given up."""


class Died(Exception):
    """A worker has died; the text says how."""


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _precision() -> str:
    with warnings.catch_warnings():
        # PyTorch 2.9 warns when it is read.
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (outside_rules, adopt),
    (choices, _choice.adopt),
)
"""The functions that read and that set each of them."""


def settle(wanted: Mapping[str, Any]) -> None:
    """Take over the :func:`settings` of another process."""
    for get, put in SETTINGS:
        # Graphs remember whether a precision was ever set.
        if get.__name__ in wanted and get() != wanted[get.__name__]:
            put(wanted[get.__name__])


def settings() -> dict[str, Any]:
    """The settings of this process by name, without its number of threads."""
    return {get.__name__: get() for get, _ in SETTINGS[1:]}


def _save(value: Any, file: Any) -> None:
    torch.save(value, file, pickle_module=sys.modules[__name__], pickle_protocol=5)


class Pickler(cloudpickle.Pickler):
    """Pickles modules with parametrizations, too, to which PyTorch gives a class of their own that it does not send."""

    def reducer_override(self, obj: Any) -> Any:
        """What an object is made from."""
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return parametrized, (type(obj).__base__, vars(obj))
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """A value as bytes, functions of a notebook included."""
    _save(value, file := io.BytesIO())
    return file.getvalue()


class Shared:
    """A value whose tensors are in memory that processes share: a file without a name, which ends with this object."""

    def __init__(self, value: Any):
        file = os.memfd_create("hfta_func")
        weakref.finalize(self, os.close, file)
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        _save(value, self.path)


def loads(message: bytes | str) -> Any:
    """The value that :func:`dumps` has made bytes of, or that :class:`Shared` has in a path."""
    is_path = isinstance(message, str)
    return torch.load(message if is_path else io.BytesIO(message), _placed, weights_only=False, mmap=is_path)


def _placed(storage: Any, device: str) -> Any:
    """Memory where a worker has it, which sees a single GPU, or none."""
    return storage.cuda() if device.startswith("cuda") and torch.cuda.is_available() else storage


def one_line_error(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


class FunctionServer:
    """Keeps functions by number and calls them, in a worker, with the :func:`settings` of the process that sends them."""

    def __init__(self, settings: Mapping[str, Any]):
        settle(settings)
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, number: int, live: Collection[int], function: bytes | str, arguments: bytes) -> bytes:
        """Call the function with this number, of those that are ``live``, which is read at its first call.

        Returns the function's result, or the error that it raised, as bytes.
        """
        try:
            self._functions = {key: value for key, value in self._functions.items() if key in live}
            if number not in self._functions:
                self._functions[number] = loads(function)
            return dumps(self._functions[number](**loads(arguments)))
        except Exception as error:
            try:
                # An error whose class wants other arguments than it has kept can be sent, but not read.
                loads(message := dumps(error))
                return message
            except Exception:
                return dumps(WorkerError(one_line_error(error)))


_starting, _prepare = threading.Lock(), spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    """What a process is prepared by, so that it does not run this process's script again."""
    return {key: value for key, value in _prepare(name).items() if not key.startswith("init_main")}


def _forked(*arguments: Any) -> popen_forkserver.Popen:
    """A process that calls :func:`serve`, forked from a server that has imported PyTorch once."""
    forkserver.set_forkserver_preload(["torch", "hfta_func"])
    # Threads do not survive a fork, so the server must have none; the processes that it forks start theirs.
    one_thread = mock.patch.dict(os.environ, OMP_NUM_THREADS="1")
    with _starting, replaced(spawn, "get_preparation_data", _without_main), one_thread:
        return popen_forkserver.Popen(multiprocessing.Process(target=serve, args=arguments, daemon=False))


class Worker:
    """One worker of a pool, which one of its threads starts and calls."""

    name: str

    def start(self) -> None:
        """Start, or start anew, without any function; raises a WorkerError if it cannot."""

    def call(self, *message: Any) -> bytes:
        """See :meth:`FunctionServer.call`; raises :class:`Died` if the worker dies."""
        raise NotImplementedError

    def kill(self) -> None:
        """End at once; called by any thread."""

    def close(self) -> None:
        """Release its resources, when it is not used any more."""


class Process(Worker):
    """A worker process of this machine.

    It may use these processors, which it yields with ``low_priority``, and sees one ``gpu`` alone if there is one; what it
    prints is dropped if it is ``quiet``.
    """

    def __init__(
        self, number: int, processors: list[int], gpu: str = "", *, low_priority: bool = False, quiet: bool = False
    ):
        self.name, self.pid = f"worker {number}", 0
        self._gpu, self._order = gpu, (processors, low_priority, quiet)
        self._process: popen_forkserver.Popen | None = None

    def start(self) -> None:
        """Start the process, or start it anew, and wait until it is ready; raises a WorkerError if it keeps dying."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(self._order[0]))}
        environment |= {"CUDA_VISIBLE_DEVICES": self._gpu} if self._gpu else {}
        cause: BaseException | None = None
        for _ in range(TRIES):
            self.close()
            self._connection, other = multiprocessing.Pipe()
            try:
                with other:
                    self._process = _forked(other, environment, dumps(settings()), *self._order)
                self.pid = self._process.pid
                self.call()
                return
            except (Died, EOFError, OSError) as error:
                cause = error
        text = f"{self.name} died {TRIES} times in a row while it started, last {cause}"
        raise WorkerError(f"{text}; what it printed says why, or the system's log if the system has ended it")

    def call(self, *message: Any) -> bytes:
        """See :meth:`FunctionServer.call`; raises :class:`Died` if the process ends before it answers."""
        assert self._process is not None
        with contextlib.suppress(EOFError, OSError):
            if message:
                self._connection.send(message)
            # Processes that it has started may hold its end of the connection for longer.
            if self._connection in connection.wait([self._connection, self._process.sentinel]):
                return self._connection.recv()
        raise Died(f"with status {self._process.wait()}")

    def kill(self) -> None:
        """End it at once; the processes that it has started, such as those of a DataLoader, end when they see that."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End it and close its connection."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process.close()
            self._connection.close()


def serve(
    calls: Any, environment: dict[str, str], settings: bytes, processors: list[int], low_priority: bool, quiet: bool
) -> None:
    """The program of a worker process: make one call after another until the process that makes them ends."""
    # Ctrl-C is for the calling process alone, and Linux gives every session its share of the processors.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The collection of garbage leaves the server's objects, and their shared memory, alone.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    if quiet:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if low_priority:
        os.nice(19)
        with contextlib.suppress(OSError):
            # "nice" counts only within a session, which has a priority itself.
            pathlib.Path("/proc/self/autogroup").write_text("19")
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))
    server = FunctionServer(loads(settings))
    calls.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.send(server.call(*calls.recv()))


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
