"""A worker process: its start, calls of functions that are sent to it, and its end, from both sides."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pathlib
import pickle
import platform
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from hfta_func._types import WorkerError
from hfta_func.rules import _choice
from hfta_func.rules._extend import adopt, outside_rules
from hfta_func.rules._measured import choices, lending
from hfta_func.workers.fork_server import Forked, forked
from hfta_func.workers.wire import dumps, loads, one_line_error, receive, send, sweep

TRIES = 3
"""Number of deaths of a worker in a row after which a call, or starting a worker, is given up."""


class Died(Exception):
    """A worker has died; the text says how."""


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def versions() -> dict[str, str]:
    """Versions that must be equal in both processes, because functions and states pass between them."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hfta_func": importlib.import_module("hfta_func").__version__, "torch": torch.__version__, "Python": python}


def check_versions(worker: str, other: Mapping[str, str]) -> None:
    """Raise a WorkerError that names the worker and the difference unless its :func:`versions` are those of this process."""
    for name, version in versions().items():
        if other.get(name) != version:
            raise WorkerError(
                f"{worker} has {name} {other.get(name)} and this process {version}; install the same on both"
            )


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


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """A block in which PyTorch computes with this number of threads, at least one."""
    before = torch.get_num_threads()
    with lending():
        torch.set_num_threads(max(1, count))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def settings() -> dict[str, Any]:
    """The settings of this process by name, without its number of threads."""
    return {get.__name__: get() for get, _ in SETTINGS[1:]}


class FunctionServer:
    """Keeps functions by number and calls them, in a worker, with the :func:`settings` of the process that sends them."""

    def __init__(self, settings: Mapping[str, Any]):
        settle(settings)
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, number: int, live: Collection[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """Call the function with this number, of those that are ``live``; it is None if it was sent before.

        Returns whether the worker has the function now, and the function's result, or the error that it raised, as bytes.
        """
        answer: Any = None
        try:
            self._functions = {key: value for key, value in self._functions.items() if key in live}
            if function is not None:
                self._functions[number] = loads(function)
            answer = self._functions[number](**loads(arguments))
        except Exception as error:
            answer = error
        try:
            message = dumps(answer)
            if isinstance(answer, Exception):
                # An error whose class wants other arguments than it has kept can be sent, but not read.
                loads(message)
        except Exception:
            message = pickle.dumps(WorkerError(one_line_error(answer)))
        return number in self._functions, message


class Process:
    """A worker process of this machine, as a :class:`~hfta_func.workers.pool.Worker` of a pool.

    It may use these processors, which it yields with ``low_priority``, and ``on_gpu`` sees one GPU alone, by its number.
    """

    def __init__(
        self,
        number: int,
        processors: Sequence[int],
        on_gpu: bool = False,
        *,
        low_priority: bool = False,
        quiet: bool = False,
    ):
        self.name = f"worker {number}"
        self._number, self._processors = number, [*processors]
        self._on_gpu, self._low_priority, self._quiet = on_gpu, low_priority, quiet
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        """Its process id, 0 before it has started."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, or start it anew, and wait until it is ready; raises a WorkerError if it keeps dying."""
        status: int | None = None
        for _ in range(TRIES):
            self.close()
            if self._closed:
                break
            process = self._launched()
            if isinstance(process, int):
                status = process
                continue
            self._process = process
            if self._closed:
                self.kill()
            self._send(json.dumps([sys.path, self._processors, self._low_priority, self._environment()]).encode())
            try:
                check_versions(self.name, pickle.loads(self._asked(pickle.dumps(settings()))))
                return
            except Died:
                status = process.wait()
        raise WorkerError(
            f"{self.name} died {TRIES} times in a row while it started, last with status {status}; what it printed says "
            f"why, or the system's log if the system has ended it"
        )

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :meth:`FunctionServer.call`; raises :class:`Died` if the process ends before it answers."""
        return pickle.loads(self._asked(pickle.dumps((number, live, function, arguments))))

    def kill(self) -> None:
        """End it and the processes that it has started, at once and for good."""
        self._closed = True
        self._end()

    def close(self) -> None:
        """End it and close its pipes."""
        if self._process is not None:
            self._end()
            self._process.communicate()

    def _end(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            for kill in (os.kill, os.killpg) if sys.platform != "win32" else (os.kill,):
                # A new process has no process group yet; later, its group has the processes that it starts.
                with contextlib.suppress(OSError):
                    kill(process.pid, signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(self._processors))}
        if self._on_gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self._number % len(visible.split(","))]
        return environment

    def _launched(self) -> subprocess.Popen[bytes] | Forked | int:
        """The process; if the fork server has died, its exit status."""
        program = f"from {__name__} import serve"
        if sys.platform == "linux":
            return forked(program, self._quiet)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-c", f"{program}; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._quiet else None,
            # Ctrl-C is for the calling process alone.
            start_new_session=True,
            env={**self._environment(), **path},
        )

    def _send(self, message: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        # The pipe of a closed process is closed; the missing answer tells that it is dead.
        with contextlib.suppress(ValueError):
            send(self._process.stdin, message)

    def _asked(self, message: bytes) -> bytes:
        """The answer to a message."""
        self._send(message)
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(ValueError):
            if (answer := receive(self._process.stdout)) is not None:
                return answer
        raise Died(f"with status {self._process.wait()}")


def serve() -> None:
    """The program of a worker process: make one call after another until the standard input ends."""
    # It ends with its parent, even if that is killed; nobody else removes shared files then.
    atexit.register(sweep)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    # What functions print goes to the standard error, because the standard output is for answers.
    os.dup2(2, 1)
    calls = sys.stdin.buffer
    sys.path[:], processors, low_priority, environment = json.loads(receive(calls) or b"[[], [0], false, {}]")
    os.environ.clear()
    os.environ.update(environment)
    if low_priority and hasattr(os, "nice"):
        os.nice(19)
        with contextlib.suppress(OSError):
            # On Linux "nice" counts only within the group of the session, which has a priority itself.
            pathlib.Path("/proc/self/autogroup").write_text("19")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))
    server = FunctionServer(pickle.loads(receive(calls) or pickle.dumps({})))
    send(answers, pickle.dumps(versions()))
    while (message := receive(calls)) is not None:
        send(answers, pickle.dumps(server.call(*pickle.loads(message))))


def _end_with(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    sweep()
    os._exit(1)
