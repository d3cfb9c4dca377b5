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
"""What the server is asked."""
_PID, _STATUS = struct.Struct("<q"), struct.Struct("<i")
_server: ForkServer | None = None
_lock = threading.Lock()


class Forked:
    """A process that the server has forked, with as much of :class:`subprocess.Popen` as workers need.

    Args:
        pid: Its number in the system.
        stdin: Where it reads from.
        stdout: Where it writes to.
        status: Where the server says how it ended.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int):
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status, self._ended = os.fdopen(status, "rb"), threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        with self._ended:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self._read()
        return self.returncode

    def wait(self) -> int | None:
        """Wait until it has ended; returns how."""
        with self._ended:
            if self.returncode is None:
                self._read()
        return self.returncode

    def _read(self) -> None:
        # If the server is gone, so is the process; nobody knows how it ended.
        said = self._status.read(_STATUS.size)
        self.returncode = _STATUS.unpack(said)[0] if len(said) == _STATUS.size else -signal.SIGKILL
        self._status.close()

    def communicate(self) -> None:
        """Close its pipes, and wait until it has ended."""
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self.wait()


class ForkServer:
    """The server, seen from the process that uses it; it ends with that process.

    Args:
        program: Code that a forked process runs.
    """

    def __init__(self, program: str):
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            # Threads do not survive a fork, so the server must have none: a forked process makes its own.
            single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            code = f"from {__name__} import _main; {program}; _main({theirs.fileno()}, serve)"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the process that asks.
                start_new_session=True,
                env={**os.environ, **path, **single},
            )
        atexit.register(self.close)

    @property
    def lives(self) -> bool:
        """Whether it can be asked by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """End the server, and the processes that it has forked."""
        if self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._socket.send(_END)
            self._socket.close()
            self._process.wait()

    def fork(self, quiet: bool) -> Forked | None:
        """A new process, None if the server has died.

        Args:
            quiet: Whether nothing that it prints is shown.
        """
        (orders, mine), (other, answers), (status, told) = os.pipe(), os.pipe(), os.pipe()
        theirs = [orders, answers, os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2), told]
        try:
            socket.send_fds(self._socket, [_FORK], theirs)
            said = self._socket.recv(_PID.size)
        except OSError:
            said = b""
        for fd in theirs:
            os.close(fd)
        if len(said) < _PID.size:
            for fd in (mine, other, status):
                os.close(fd)
            return None
        return Forked(_PID.unpack(said)[0], os.fdopen(mine, "wb"), os.fdopen(other, "rb"), status)


def forked(program: str, quiet: bool) -> Forked | int:
    """A process forked from this process's server, which is started if there is none; else how the server ended."""
    global _server
    with _lock:
        if _server is None or not _server.lives:
            _server = ForkServer(program)
        return _server.fork(quiet) or _server._process.wait()


def _main(fd: int, serve: Callable[[], None]) -> None:
    """The server's program: fork whenever the socket says so, and tell how forked processes have ended."""
    asked, parent = socket.socket(fileno=fd), os.getppid()
    asked.setblocking(True)
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    # Objects that are there already are not copied by forked processes that collect garbage.
    gc.freeze()
    running: dict[int, int] = {}
    message = b""
    while os.getppid() == parent:
        ready, _, _ = select.select([asked, woken], [], [], 1.0)
        if woken in ready:
            woken.recv(4096)
            _tell(running)
        if asked in ready:
            message, fds, _, _ = socket.recv_fds(asked, 1, 4)
            if message != _FORK:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (asked, woken, wakes):
                    other.close()
                for other in (*running.values(), fds[3]):
                    os.close(other)
                _run(fds[:3], serve)
            for other in fds[:3]:
                os.close(other)
            running[pid] = fds[3]
            asked.sendall(_PID.pack(pid))
    # Processes may end after the socket that they would wake the server by.
    signal.set_wakeup_fd(-1)
    if message == _END:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        # A process that is killed closes this socket before it lets go of the locks of its files.
        end = time.monotonic() + 5.0
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.01)
        sweep()
    for pid in running:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _tell(running: dict[int, int]) -> None:
    """Write how processes have ended to those who wait for it."""
    for pid in [*running]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            told = running.pop(pid)
            with contextlib.suppress(OSError):
                os.write(told, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(told)


def _run(streams: list[int], serve: Callable[[], None]) -> None:
    """What a forked process does, to its end."""
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
