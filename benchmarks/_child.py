"""A process that does what it is told, line by line: the side that asks and the side that answers.

Orders and answers are lines of JSON. What goes wrong in an order is its answer; the process goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from benchmarks._measure import ROOT


class Late(RuntimeError):
    """An answer did not come in time; the process has been ended."""


class Child:
    """The side that asks.

    Args:
        module: What to run, as ``python -m`` names it; it calls :func:`serve`.
        argument: Its one argument, as JSON.
        env: Environment variables beside those of this process.
    """

    def __init__(self, module: str, argument: Any, env: Mapping[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(argument)],
            cwd=ROOT, env={**os.environ, **(env or {})}, stdin=-1, stdout=-1, stderr=self._errors, text=True,
        )  # fmt: skip

    def begin(self, order: str, *args: Any) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([order, *args]) + "\n")
            self._process.stdin.flush()

    def end(self, limit: float | None = None) -> Any:
        """Wait for the answer, for ``limit`` seconds at most.

        Raises:
            Late: if it did not come in time.
            RuntimeError: in the words of the process, if it could not.
        """
        assert self._process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(max(limit or 0.0, 0.0), lambda: (late.set(), self._process.kill()))
        if limit is not None:
            timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            status = self._process.wait()
            if late.is_set():
                raise Late(f"no answer within {limit:.0f} s")
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:]
            raise RuntimeError(f"the process ended with status {status}: {' '.join(last)}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, order: str, *args: Any, limit: float | None = None) -> Any:
        """Both."""
        self.begin(order, *args)
        return self.end(limit)

    def leave(self) -> None:
        """Tell the process that nothing more is asked, so that it ends by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, grace: float = 0.0) -> None:
        """End the process, by force after ``grace`` seconds."""
        if grace:
            self.leave()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._errors.close()


def serve(desk: Any) -> None:
    """The side that answers: a method of ``desk`` for each order, until nothing is asked. Only answers go to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = getattr(desk, name)(*args)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)
