"""Compiling a step while this process trains: calls on a worker of low priority."""

from __future__ import annotations

import contextlib
import io
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hfta_func._torch import quick_compiler
from hfta_func._tree import leaves, tree_map
from hfta_func.run import kept
from hfta_func.run.kept import graph, options
from hfta_func.step.records import reached_by
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import SETTINGS, Process, cores, settle
from hfta_func.workers.wire import loads, one_line_error

_IMPORTS = 2.5
"""Seconds to import the compiler, which a graph in PyTorch's cache needs."""


class Compiler:
    """A worker that compiles one step, for the shapes of a state and a batch, into PyTorch's cache on disk.

    A ``name`` is what the graph is called if it may be kept. A worker that ``yields`` lets this process go first.
    """

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any, name: str | None = None, yields: bool = True):
        self._answer: dict[str, Any] | None = None
        self._pool: Pool | None = None
        try:
            order = {"step": step, "inputs": tree_map(_Like, (state, batch)), "name": name}
            order |= {get.__name__: get() for get, _ in SETTINGS}
            order = _sent(order, getattr(step, "base", {}).values())
        except Exception as error:
            self._answer = {"error": f"it cannot be sent to another process, {one_line_error(error)}"}
            return
        self._pool = Pool([Process(0, cores(), low_priority=yields, quiet=True)], tries=1)
        self._close = weakref.finalize(self, self._pool.close)
        self._pool.submit(compile_step, order=order)

    def answer(self) -> dict[str, Any] | None:
        """What the worker has answered, None before.

        The compiler's ``options``, and the ``seconds`` that reading the graph from PyTorch's cache takes; of one that is
        ``kept`` by its name, the seconds to read it. Or an ``error``.
        """
        if self._pool is not None:
            try:
                _, answer = self._pool.wait(0)
            except queue.Empty:
                return None
            except Exception as error:
                answer = error
            self._answer = answer if isinstance(answer, dict) else {"error": str(answer)}
            self.end()
        return self._answer

    def end(self) -> None:
        """Stop the worker."""
        if self._pool is not None:
            self._pool = None
            self._close()


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

    buffer = io.BytesIO()
    Pickler(buffer).dump(order)
    return buffer.getvalue()


def compile_step(order: bytes) -> dict[str, Any]:
    """Compile a step with the first options that work, and time how long the graph takes to read."""
    try:
        ordered = loads(order)
        settle(ordered)
    except Exception as failed:
        return {"error": one_line_error(failed)}
    likes: Any = leaves(ordered["inputs"])
    if ordered["name"] is not None:
        # What cannot be recorded, or kept, is traced.
        with contextlib.suppress(Exception):
            kept.make(ordered["step"], tree_map(_Like.tensor, ordered["inputs"]), ordered["name"])
            start = time.perf_counter()
            if kept.load(ordered["name"], reached_by(ordered["step"]).tensors) is not None:
                return {"kept": True, "seconds": time.perf_counter() - start}
    # Not "cpu" if anything is elsewhere.
    device = max((like.made_of[-1].type for like in likes), key=lambda kind: kind != "cpu")
    answer = {}
    for one in options(ordered["step"], ordered["inputs"][0], device):
        try:
            _seconds(ordered, one)
            # The second call reads the graph from the cache.
            return {"options": one, "seconds": _seconds(ordered, one) + _IMPORTS}
        except Exception as failed:
            answer = {"error": one_line_error(failed)}
    return answer


def _seconds(order: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """How long a first call takes."""
    torch.compiler.reset()
    run, inputs = graph(order["step"], options), tree_map(_Like.tensor, order["inputs"])
    start = time.perf_counter()
    with quick_compiler():
        run(*inputs)
    if any(leaf.is_cuda for leaf in leaves(inputs)):
        torch.cuda.synchronize()
    return time.perf_counter() - start
