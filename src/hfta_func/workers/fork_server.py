"""A process that imports PyTorch once, from which worker processes are forked; on Linux."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO

from hfta_func.workers.wire import sweep

_FORK, _END = b"f", b"e"
"""The requests to the server."""
_PID, _STATUS = struct.Struct("<q"), struct.Struct("<i")
_LOOK = 0.05
"""Seconds between two looks whether a forked process has ended."""
_server: ForkServer | None = None
_lock = threading.Lock()


class Forked:
    """A process that the server has forked, with as much of :class:`subprocess.Popen` as workers need."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int):
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        # The pipe through which the server sends its exit status.
        self._status, self._ended = os.fdopen(status, "rb"), threading.Lock()
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0) -> int | None:
        """Its exit status; None while it runs."""
        with self._ended:
            if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
                # If the server has died, so has the process, with an unknown status.
                message = self._status.read(_STATUS.size)
                self.returncode = _STATUS.unpack(message)[0] if len(message) == _STATUS.size else -signal.SIGKILL
                self._status.close()
        return self.returncode

    def wait(self) -> int | None:
        """Wait until it has ended; returns its exit status."""
        return self.poll(None)

    def communicate(self) -> None:
        """Close its pipes, and wait until it has ended."""
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self.wait()


class ForkServer:
    """The server as its client sees it, which ends with the client; ``program`` defines ``serve`` for forked processes."""

    def __init__(self, program: str):
        self._owner = os.getpid()
        self._socket, server_end = socket.socketpair()
        with server_end:
            # Threads do not survive a fork, so the server must have none; a forked process starts them itself.
            single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            code = f"from {__name__} import _main; {program}; _main({server_end.fileno()}, serve)"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
                # Ctrl-C is for the client alone.
                start_new_session=True,
                env={**os.environ, **path, **single},
            )
        atexit.register(self.close)

    @property
    def lives(self) -> bool:
        """Whether the server runs and this process is its client."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the server, and the processes that it has forked."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._socket.send(_END)
            self._socket.close()
            self._process.wait()

    def fork(self, quiet: bool) -> Forked | None:
        """A new process, whose output is discarded if ``quiet``; None if the server has died."""
        (child_stdin, stdin), (stdout, child_stdout), (status, server_status) = os.pipe(), os.pipe(), os.pipe()
        stderr = os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2)
        sent = [child_stdin, child_stdout, stderr, server_status]
        try:
            socket.send_fds(self._socket, [_FORK], sent)
            answer = self._socket.recv(_PID.size)
        except OSError:
            answer = b""
        for fd in sent:
            os.close(fd)
        if len(answer) < _PID.size:
            for fd in (stdin, stdout, status):
                os.close(fd)
            return None
        return Forked(_PID.unpack(answer)[0], os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), status)


def forked(program: str, quiet: bool) -> Forked | int:
    """A process forked from this process's server, which is started if need be; if it dies, its exit status."""
    global _server
    with _lock:
        if _server is None or not _server.lives:
            _server = ForkServer(program)
        return _server.fork(quiet) or _server._process.wait()


def _main(fd: int, serve: Callable[[], None]) -> None:
    """The server's program: fork when the client asks for it, and send the exit statuses of forked processes."""
    client, parent = socket.socket(fileno=fd), os.getppid()
    client.setblocking(True)
    # The garbage collection of a forked process then leaves the server's objects, and their shared memory, alone.
    gc.freeze()
    running: dict[int, int] = {}
    message = b""
    while os.getppid() == parent:
        ready, _, _ = select.select([client], [], [], _LOOK if running else 1.0)
        _send_statuses(running)
        if ready:
            message, fds, _, _ = socket.recv_fds(client, 1, 4)
            if message != _FORK:
                break
            pid = os.fork()
            if pid == 0:
                client.close()
                for inherited in (*running.values(), fds[3]):
                    os.close(inherited)
                _run(fds[:3], serve)
            for stream in fds[:3]:
                os.close(stream)
            running[pid] = fds[3]
            client.sendall(_PID.pack(pid))
    if message == _END:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        # A killed client closes its socket before it releases the locks of its files.
        deadline = time.monotonic() + 5.0
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.01)
        sweep()
    for pid in running:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _send_statuses(running: dict[int, int]) -> None:
    """Send the exit statuses of processes that have ended; ``running`` holds, by process id, the pipe of each."""
    for pid in [*running]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = running.pop(pid)
            with contextlib.suppress(OSError):
                os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def _run(streams: list[int], serve: Callable[[], None]) -> None:
    """The program of a forked process."""
    code = 1
    try:
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        serve()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
