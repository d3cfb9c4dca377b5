"""Time in tests: a clock that counts calls, for what is chosen by measurement, and Ctrl-C at a later moment."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from hfta_func._torch import VmapInterpreter, peek_interpreter
from hfta_func.calls.body import running_body
from hfta_func.step import chunks


class CallClock:
    """Replaces the clock of ``chunk_size="auto"``.

    A run of ``count`` members in groups of ``size`` makes ``ceil(count / size)`` calls, and that number tells how long it
    takes: least for groups of ``fast`` members. In the first round, which warms up, the fastest is the slowest, and in
    the second one it is disturbed.
    """

    # Not in a dictionary, where a step would make one call of those for all groups.
    __slots__ = ("_calls", "_calls_of", "_fast", "_time", "runs", "sizes")

    def __init__(self, patch: pytest.MonkeyPatch, count: int, fast: int):
        self.sizes = [size for size in (1, 2, 4, 8) if size < count] + [count]
        self._calls_of = {-(-count // size): size for size in self.sizes}
        assert len(self._calls_of) == len(self.sizes), "groups of some sizes make as many calls as those of others"
        self._fast = fast
        self._time = 0.0
        self._calls = 0
        self.runs: list[int] = []
        """Sizes of the groups of every run that was timed."""
        patch.setattr(chunks, "now", self._now)

    def call(self) -> None:
        """What the timed function calls once for each group."""
        if running_body() is None:
            # The oracle, whose calls do not count.
            return
        interpreter = peek_interpreter()
        # Before one member runs alone for the first time, it runs as an array of one.
        if interpreter is None or VmapInterpreter(interpreter).batchSize() > 1:
            self._calls += 1

    def _now(self, device: torch.device) -> float:
        assert device.type == "cpu"
        # The clock is read before and after each run.
        if self._calls:
            size = self._calls_of[self._calls]
            turn = self.runs.count(size)
            self.runs.append(size)
            slow = 10.0 + size
            self._time += {0: 100.0, 1: 50.0}.get(turn, 1.0) if size == self._fast else (0.5 if turn == 0 else slow)
            self._calls = 0
        return self._time

    def check_measured_once(self, then: int) -> None:
        """Whether each size was timed in turn, and groups of the fastest size were run ``then`` times after that."""
        rounds, rest = divmod(len(self.runs), len(self.sizes))
        assert rest == 0 and rounds >= 3 and self.runs == self.sizes * rounds
        assert self._calls == then * next(calls for calls, size in self._calls_of.items() if size == self._fast)
        self.runs, self._calls = [], 0


def press_ctrl_c(seconds: float) -> None:
    """Press Ctrl-C in a moment, while the main thread is in a call that listens.

    If that call has ended by then, with an error perhaps, nobody is interrupted instead.
    """

    def press() -> None:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "nobody listens"
    threading.Timer(seconds, press).start()
