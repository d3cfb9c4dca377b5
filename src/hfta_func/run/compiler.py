"""The process that compiles a step while another one trains."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor

from hfta_func._torch import graph_hits
from hfta_func._tree import leaves, tree_map
from hfta_func.run.graphs import graph, options
from hfta_func.run.processes import line
from hfta_func.run.settings import SETTINGS, settle

# Before anything is imported. A session is a group of its own on Linux, within which alone "nice" counts.
_YIELDING = """
import contextlib, os, pathlib
os.nice(19)
with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/autogroup").write_text("19")
"""


class Compiler:
    """The process, seen from the one that trains, to which it yields the processors if it ``yields``."""

    _last: weakref.ref[Compiler] | None = None

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any, yields: bool = True):
        Compiler._last = weakref.ref(self)
        self._found: dict[str, Any] | None = None
        self._is_over = True
        try:
            inputs, settings = tree_map(_Like, (state, batch)), {get.__name__: get() for get, _ in SETTINGS}
            order = _sent({"step": step, "inputs": inputs, **settings}, getattr(step, "base", {}).values())
        except Exception as error:
            self._found = {"error": f"it cannot be sent to another process, {line(error)}"}
            return
        self._said = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(sys.path).encode() + b"\n" + order)
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{_YIELDING if yields else ''}from {__name__} import _answer; _answer()"],
                stdin=given,
                stdout=self._said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._is_over = False
        self._end = weakref.finalize(self, _end, self._process, self._said)

    @staticmethod
    def busy() -> bool:
        """Whether another one is at work; one at a time is enough beside training."""
        last = Compiler._last() if Compiler._last is not None else None
        if last is None:
            return False
        last.answer()
        return not last._is_over

    def answer(self) -> dict[str, Any] | None:
        """What it has found so far, None before that."""
        if not self._is_over:
            self._is_over = self._process.poll() is not None
            # The processes share a position in the file, which is the other one's.
            said = os.pread(self._said.fileno(), os.fstat(self._said.fileno()).st_size, 0).decode(errors="replace")
            *lines, _ = said.split("\n")
            try:
                self._found = json.loads(lines[-1])
            except (IndexError, ValueError):
                if self._is_over:
                    self._found = {"error": f"the other process ended with status {self._process.returncode}"}
        return self._found

    def end(self) -> None:
        """Let it do no more."""
        if not self._is_over:
            self._is_over = True
            self._end()


def _end(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said.close()


class _Like:
    """What a tensor is like, without its values."""

    def __init__(self, tensor: Tensor):
        self.made_of = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def tensor(self) -> Tensor:
        shape, stride, dtype, device = self.made_of
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _sent(order: Any, base: Iterable[Tensor]) -> bytes:
    """The order, in which the tensors that members share have no values: they are inputs of the graph."""
    known = {tensor.data_ptr() for tensor in base}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return _Like(obj) if type(obj) is Tensor and not obj.is_meta and obj.data_ptr() in known else None

    found = io.BytesIO()
    Pickler(found).dump(order)
    return found.getvalue()


class _Received(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid.tensor()


def _answer() -> None:
    """The other process: compile what the standard input asks for, and print what came of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    try:
        order = _Received(sys.stdin.buffer).load()
        for found in _compiled(order):
            print(json.dumps(found), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": line(error)}), file=answers, flush=True)


def _compiled(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is known as soon as there is a graph: that reading it takes less than compiling; then, how long it takes."""
    settle(order)
    error: Exception | None = None
    likes: Any = leaves(order["inputs"])
    # Not "cpu" if anything is elsewhere.
    device = max((like.made_of[-1].type for like in likes), key=lambda kind: kind != "cpu")
    for chosen in options(order["step"], order["inputs"][0], device):
        try:
            yield {"options": chosen, "seconds": _seconds(order, chosen)}
            before = graph_hits()
            seconds = _seconds(order, chosen)
            if graph_hits() == before:
                yield {"error": "PyTorch's cache of graphs does not take it, or cannot be written"}
            else:
                yield {"options": chosen, "seconds": seconds}
            return
        except Exception as failed:
            error = failed
    assert error is not None
    yield {"error": line(error)}


def _seconds(order: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """How long a first call takes."""
    torch.compiler.reset()
    return _timed(graph(order["step"], options), order)


def _timed(run: Any, order: Mapping[str, Any]) -> float:
    inputs = tree_map(_Like.tensor, order["inputs"])
    start = time.perf_counter()
    run(*inputs)
    if any(leaf.is_cuda for leaf in leaves(inputs)):
        torch.cuda.synchronize()
    return time.perf_counter() - start
