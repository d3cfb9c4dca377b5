"""A worker process: how it starts, calls functions that are sent to it, and ends; seen from both sides."""

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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any

import torch

from hfta_func._types import WorkerError
from hfta_func.workers.fork_server import Forked, forked
from hfta_func.workers.settings import settings, settle
from hfta_func.workers.wire import dumps, loads, one_line_error, receive, send, sweep

TRIES = 3
"""How often in a row a worker may die before what it was doing is given up."""


class Died(Exception):
    """A worker is gone; the text says how."""


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def versions() -> dict[str, str]:
    """What must be the same on both sides, because functions and states pass between them."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hfta_func": importlib.import_module("hfta_func").__version__, "torch": torch.__version__, "Python": python}


def check_versions(worker: str, found: Mapping[str, str]) -> None:
    """Raise a WorkerError that names the worker and what it has another version of."""
    for name, own in versions().items():
        if found.get(name) != own:
            raise WorkerError(f"{worker} has {name} {found.get(name)} and this process {own}; install the same on both")


class FunctionServer:
    """The worker's side of a call: it keeps functions by number and calls them.

    Args:
        settings: The :func:`settings` of the process that sends the functions.
    """

    def __init__(self, settings: Mapping[str, Any]):
        settle(settings)
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, number: int, live: Collection[int], function: bytes | None, arguments: bytes) -> bytes:
        """Call a function; returns its result, or the error that it raised, as bytes.

        Args:
            number: The function's number.
            live: The numbers of all functions that are still needed.
            function: The function, unless it was sent before.
            arguments: Its arguments.
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
            found = dumps(answer)
            if isinstance(answer, Exception):
                # An error whose class wants other arguments than it has kept can be sent, but not read.
                loads(found)
            return found
        except Exception:
            return pickle.dumps(WorkerError(one_line_error(answer)))

    def has(self, number: int) -> bool:
        """Whether a function is here."""
        return number in self._functions


class Process:
    """A worker process of this machine, as a :class:`~hfta_func.workers.pool.Worker` of a pool.

    Args:
        number: Its number, which is in its name and decides its GPU.
        processors: The processors that it may use.
        on_gpu: Whether it sees one GPU alone.
        low_priority: Whether it yields the processors to other processes.
        quiet: Whether nothing that it prints is shown.
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
        """Its number in the system, 0 before it has started."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, or start it anew, and wait until it can work.

        Raises:
            WorkerError: if it dies before that, several times in a row.
        """
        status: int | None = None
        for _ in range(TRIES):
            self.close()
            if self._closed:
                break
            found = self._launched()
            if isinstance(found, int):
                status = found
                continue
            self._process = found
            if self._closed:
                self.kill()
            self._send(json.dumps([sys.path, self._processors, self._low_priority, self._environment()]).encode())
            self._send(pickle.dumps(settings()))
            answer = self._receive()
            if answer is not None:
                check_versions(self.name, pickle.loads(answer))
                return
            status = self._status()
        raise WorkerError(
            f"{self.name} died {TRIES} times in a row while it started, last with status {status}; what it printed says "
            f"why, or the system's log if the system has ended it"
        )

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :meth:`FunctionServer.call`; also returns whether the function is there now.

        Raises:
            Died: if the process ends before it answers.
        """
        self._send(pickle.dumps((number, live, function, arguments)))
        answer = self._receive()
        if answer is None:
            raise Died(f"with status {self._status()}")
        return pickle.loads(answer)

    def kill(self) -> None:
        """End it and what it has started, whatever it is doing; it does not start again."""
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
                # A new process has no group of its own yet, which is that of what it starts.
                with contextlib.suppress(OSError):
                    kill(process.pid, signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)

    def _environment(self) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": str(len(self._processors))}
        if self._on_gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self._number % len(visible.split(","))]
        return {**os.environ, **own}

    def _launched(self) -> subprocess.Popen[bytes] | Forked | int:
        """The process, or how what was to make it has ended."""
        program = f"from {__name__} import serve"
        if sys.platform == "linux":
            return forked(program, self._quiet)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-c", f"{program}; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._quiet else None,
            # Ctrl-C is for the process that asks.
            start_new_session=True,
            env={**self._environment(), **path},
        )

    def _send(self, message: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        # The pipe of one that was closed is closed; that it is dead shows in the answer.
        with contextlib.suppress(ValueError):
            send(self._process.stdin, message)

    def _receive(self) -> bytes | None:
        assert self._process is not None and self._process.stdout is not None
        try:
            return receive(self._process.stdout)
        except ValueError:
            return None

    def _status(self) -> int | None:
        return None if self._process is None else self._process.wait()


def serve() -> None:
    """The program of a worker process: one call after another from the standard input, until that ends."""
    orders, answers = _streams()
    server = FunctionServer(pickle.loads(receive(orders) or pickle.dumps({})))
    send(answers, pickle.dumps(versions()))
    while (message := receive(orders)) is not None:
        order = pickle.loads(message)
        found = server.call(*order)
        send(answers, pickle.dumps((server.has(order[0]), found)))


def _streams() -> tuple[IO[bytes], IO[bytes]]:
    """Where calls come from and answers go to; also takes the worker's processors.

    The worker ends when the process that asks does, even if that is killed and whatever the worker is doing.
    """
    # It ends by itself only if the process that asks is gone.
    atexit.register(sweep)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    # What its code prints is no answer.
    os.dup2(2, 1)
    orders = sys.stdin.buffer
    sys.path[:], processors, low_priority, environment = json.loads(receive(orders) or b"[[], [0], false, {}]")
    os.environ.clear()
    os.environ.update(environment)
    if low_priority and hasattr(os, "nice"):
        os.nice(19)
        with contextlib.suppress(OSError):
            # On Linux a session is a group of its own, within which alone "nice" counts.
            pathlib.Path("/proc/self/autogroup").write_text("19")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))
    return orders, answers


def _end_with(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    sweep()
    os._exit(1)
