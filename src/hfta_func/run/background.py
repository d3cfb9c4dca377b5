"""Steps that train eagerly from the first call on, and go over to a compiled graph once another process has made it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor

from hfta_func._torch import compiled_from_cache, eager_unless_compiled, graph_hits, is_compiler_loaded, stand_for
from hfta_func._tree import leaves, tree_map
from hfta_func._types import CompileWarning

# It trusts the processor's own list of its instructions, instead of compiling a program for each of them, which takes longer
# than a small graph; and does not look again at shapes that have been looked at to choose the graph.
_TRUSTING = {"cpp.vec_isa_ok": True, "size_asserts": False, "alignment_asserts": False}
OPTIONS: tuple[dict[str, Any], ...] = ({**_TRUSTING, "cpp_wrapper": True}, _TRUSTING, {})
"""Options of inductor, tried in turn: the first calls kernels from C++ instead of Python."""


def _precision() -> str:
    with warnings.catch_warnings():
        # PyTorch 2.9 warns whoever asks.
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
)
"""What graphs depend on, besides the step."""
# Before anything is imported. A session is a group of its own on Linux, within which alone "nice" counts.
_YIELDING = """
import contextlib, os, pathlib
os.nice(19)
with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/autogroup").write_text("19")
"""
_PATIENCE = 7
"""A step of which nobody knows how often it will be called goes over once it has trained for this many times the cost."""
_WORTH = 4
"""With a known number of steps it does if what is left would take this many times the cost."""
_IMPORTS = 2.5
"""Seconds to import the compiler."""
_TRIAL = 10
"""Compiled steps that are compared with as many eager ones."""


def compile(step: Callable[..., Any], *, steps: int | None = None) -> BackgroundStep:
    """A step that nobody waits for: eager from the first call, compiled when the graph is there.

    After the first call with batches of a shape, another process with low priority compiles the step into PyTorch's cache on
    disk. When it is done, and the time it takes to go over is little beside the time already trained or still to train, the
    graph is read from there. Results are the same to rounding, noise included. A graph that turns out slower than the eager
    step is not used. Batches of a shape that is not compiled yet run eagerly.

    Args:
        step: A training or evaluation step, ``step(state, batch)``. It is sent to the other process by
            ``cloudpickle``, functions of a notebook included.
        steps: How often it will be called in all, if that is known.

    Returns:
        A :class:`BackgroundStep`, which is called like the step.

    Warns:
        CompileWarning: once, with the reason, if the step cannot be compiled. It goes on eagerly.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> step = make_train_step(models[0], lambda model, x: model(x).square().mean(), sgd(lr=0.1))
        >>> quick = compile(step, steps=2)
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state, metrics = quick(state, torch.ones(3, 8, 4))
        >>> quick.is_compiled
        False
    """
    if not callable(step):
        raise TypeError(f"step is a {type(step).__qualname__}; pass what make_train_step or make_eval_step returned")
    if isinstance(step, BackgroundStep):
        raise ValueError("the step is compiled in the background already; pass it as it is")
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise ValueError(f"steps is {steps!r}; it must be an integer, at least 0, or None if it is not known")
    return BackgroundStep(step, steps)


class BackgroundStep:
    """``step(state, batch)``, eager at first and compiled later; made by :func:`compile`."""

    def __init__(self, step: Callable[..., Any], steps: int | None):
        self._step, self._steps = step, steps
        stand_for(self, step)
        self._shapes: dict[Any, _Graph] = {}
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_step"], name)

    def __reduce__(self) -> Any:
        return BackgroundStep, (self._step, self._steps)

    @property
    def is_compiled(self) -> bool:
        """Whether calls with the latest shapes run a compiled graph."""
        return bool(self._shapes) and [*self._shapes.values()][-1].is_used

    def __call__(self, state: Any, batch: Any) -> Any:
        """Call the step, eager or compiled."""
        self._calls += 1
        found = leaves((batch, getattr(state, "step", None)))
        key = tuple((leaf.shape, leaf.dtype) for leaf in found if isinstance(leaf, Tensor))
        graph = self._shapes.pop(key, None) or _Graph(self._step)
        self._shapes[key] = graph
        left = None if self._steps is None else self._steps - self._calls + 1
        return graph(state, batch, left)


class _Graph:
    """What becomes of a step for batches of one shape."""

    def __init__(self, step: Callable[..., Any]):
        self._step = step
        self._run: Callable[..., Any] | None = None
        self._worker: _Worker | None = None
        self._ended = False
        self._spent = 0.0
        self._eager: list[float] = []
        self._compiled: list[float] = []

    @property
    def is_used(self) -> bool:
        return self._run is not None

    def __call__(self, state: Any, batch: Any, left: int | None) -> Any:
        if self._run is not None:
            return self._call_compiled(state, batch)
        if not self._ended:
            answer = self._ask(state, batch)
            if answer is not None and self._pays(answer, left):
                return self._go_over(answer, state, batch)
        start = time.perf_counter()
        found = self._step(state, batch)
        took = time.perf_counter() - start
        self._spent += took
        self._eager = [*self._eager[1 - _TRIAL :], took]
        return found

    def _ask(self, state: Any, batch: Any) -> Mapping[str, Any] | None:
        """What the other process says; None as long as it works. The first step is one without it."""
        if self._worker is None:
            if self._eager and not _Worker.busy():
                self._worker = _Worker(self._step, state, batch)
            return None
        answer = self._worker.answer()
        if answer is not None and "error" in answer:
            self._end(answer["error"])
            return None
        return answer

    def _end(self, why: str | None) -> None:
        self._ended, self._run = True, None
        if why is not None:
            warnings.warn(f"the step is not compiled and goes on eagerly: {why}", CompileWarning, stacklevel=5)

    def _pays(self, answer: Mapping[str, Any], left: int | None) -> bool:
        cost = answer["seconds"] + (0.0 if is_compiler_loaded() else _IMPORTS)
        if left is None:
            return self._spent >= _PATIENCE * cost
        return left * statistics.median(self._eager) >= _WORTH * cost

    def _go_over(self, answer: Mapping[str, Any], state: Any, batch: Any) -> Any:
        run = torch.compile(self._step, fullgraph=True, dynamic=False, options=answer["options"] or None)
        try:
            with compiled_from_cache():
                found = run(state, batch)
        except Exception as error:
            # Whatever keeps the graph from being read, the eager step goes on; if that raises too, it is the user's to see.
            self._end(line(error))
            return self._step(state, batch)
        self._run = run
        return found

    def _call_compiled(self, state: Any, batch: Any) -> Any:
        assert self._run is not None
        start = time.perf_counter()
        with eager_unless_compiled():
            found = self._run(state, batch)
        if len(self._compiled) < _TRIAL:
            self._compiled.append(time.perf_counter() - start)
            if len(self._compiled) == _TRIAL and statistics.median(self._compiled) > statistics.median(self._eager):
                self._end(None)
        return found


class _Worker:
    """The other process."""

    _last: weakref.ref[_Worker] | None = None

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any):
        _Worker._last = weakref.ref(self)
        self._found: dict[str, Any] | None = None
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
                [sys.executable, "-c", f"{_YIELDING}from {__name__} import _answer; _answer()"],
                stdin=given,
                stdout=self._said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        weakref.finalize(self, _end, self._process, self._said)

    @staticmethod
    def busy() -> bool:
        """Whether another one is at work; one at a time is enough beside training."""
        last = _Worker._last() if _Worker._last is not None else None
        return last is not None and last.answer() is None

    def answer(self) -> dict[str, Any] | None:
        """What it found, None as long as it works."""
        if self._found is None and self._process.poll() is not None:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").splitlines()
            self._said.close()
            try:
                self._found = json.loads(lines[-1])
            except (IndexError, ValueError):
                self._found = {"error": f"the other process ended with status {self._process.returncode}"}
        return self._found


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
        found = _compiled(order)
    except Exception as error:
        found = {"error": line(error)}
    print(json.dumps(found), file=answers, flush=True)


def settle(wanted: Mapping[str, Any]) -> None:
    """Have this process compute as another one does, whose :data:`SETTINGS` these are."""
    for get, put in SETTINGS:
        # Graphs remember whether a precision was ever set.
        if get.__name__ in wanted and get() != wanted[get.__name__]:
            put(wanted[get.__name__])


def _compiled(order: Mapping[str, Any]) -> dict[str, Any]:
    settle(order)
    error: Exception | None = None
    likes: Any = leaves(order["inputs"])
    on_cpu = all(like.made_of[-1].type == "cpu" for like in likes)
    for options in OPTIONS if on_cpu else OPTIONS[-1:]:
        try:
            _seconds(order, options)
            before = graph_hits()
            seconds = _seconds(order, options)
            if graph_hits() == before:
                return {"error": "PyTorch's cache of graphs does not take it, or cannot be written"}
            return {"options": options, "seconds": seconds}
        except Exception as failed:
            error = failed
    assert error is not None
    return {"error": line(error)}


def _seconds(order: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """How long a first call takes."""
    torch.compiler.reset()
    inputs = tree_map(_Like.tensor, order["inputs"])
    start = time.perf_counter()
    torch.compile(order["step"], fullgraph=True, dynamic=False, options=dict(options) or None)(*inputs)
    return time.perf_counter() - start


def line(error: BaseException) -> str:
    """The innermost cause in one line."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
