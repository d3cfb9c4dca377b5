"""Which Python values a function reads: what PyTorch's compiler, which traces Python, looks at again before a later call."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch._release import private
from hfta_func._torch.inductor import replaced
from hfta_func._torch.levels import constant_to_compiler
from hfta_func._torch.recorded import NotReplayableError

_UNSEEN = {
    **dict.fromkeys(("is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling"), "asks whether it is compiled"),
    **dict.fromkeys(("is_exporting", "is_tracing", "is_scripting"), "asks whether it is compiled"),
    **dict.fromkeys(("environ", "getenv"), "reads the environment"),
}
"""Names in code that takes another path while it is traced, or reads what the tracer does not look at again."""


_GLOBAL_HOOKS = [
    private("torch.nn.modules.module", f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
_Guards = private("torch._C._dynamo.guards", "TensorGuards")
# Arrays and generators of NumPy are not traced, and every number is a constant.
_SETTINGS = {
    "allow_rnn": True,
    "trace_numpy": False,
    "specialize_int": True,
    "specialize_float": True,
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
}


_TORCH = os.path.dirname(torch.__file__) + os.sep
# What it computes does not depend on who traces it.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_HELPERS = {"torch": torch, "sys": sys}
# The flag of CPython's classes that are made at run time.
HEAP_TYPE = 1 << 9


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules."""
    return any(_GLOBAL_HOOKS)


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``is_like(*others)``: whether others have the same types, dtypes, devices, shapes, strides and ``requires_grad``.

    It is never so where one tensor stands twice among the others.
    """
    return _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def is_tracer_loaded() -> bool:
    """Whether tracing needs no more imports, which take seconds."""
    return "torch._dynamo.convert_frame" in sys.modules


class _Thread(threading.local):
    reads = False


_thread = _Thread()


@constant_to_compiler
def is_reading() -> bool:
    """Whether this thread traces a function to find out what it reads."""
    return _thread.reads


class Reads:
    """``reads.hold()``: whether every Python value that ``func(*args)`` reads is as it was.

    Args:
        func: A function of tensors. It is traced, not run.
        args: Its arguments, which are kept.

    Raises:
        NotReplayableError: if the function cannot be traced, or does more than compute: prints, draws from Python's
            generators, asks for the time, changes objects.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any]):
        self._locals = {"func": func, "args": tuple(args)}
        if has_global_hooks():
            raise NotReplayableError("there are hooks on all modules")
        try:
            graph, self._manager = _traced(self._locals)
        except NotReplayableError:
            raise
        except Exception as error:
            lines = (line.strip() for line in str(error).splitlines())
            raise NotReplayableError(next(filter(None, lines), type(error).__name__)) from None
        # Tensors and arrays that are no arguments: the tracer compares what they are like, not which they are.
        names = {guard.name for guard in graph.guards if guard.create_fn_name() == "TENSOR_MATCH"}
        self._tensors = [
            (compile(name, "<source>", "eval"), self._value(name)) for name in sorted(names) if "['args']" not in name
        ]

    def hold(self) -> bool:
        """Whether the values are as they were."""
        return (
            not has_global_hooks()
            and self._manager.check(self._locals)
            and all([self._value(source) is tensor for source, tensor in self._tensors])
        )

    def _value(self, source: Any) -> Any:
        return eval(source, {"G": globals(), "L": self._locals, **_HELPERS})


def _call(func: Any, args: Any) -> Any:
    return func(*args)


def _traced(given: dict[str, Any]) -> tuple[Any, Any]:
    """What the tracer knows about a call of :func:`_call`, and its guards."""
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    utils: Any = importlib.import_module("torch._dynamo.utils")
    guards: Any = importlib.import_module("torch._guards")
    config: Any = importlib.import_module("torch._dynamo.config")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # What the tracer cannot trace it also logs, as an error of a program that has none.
        stack.enter_context(replaced(private("torch._subclasses.fake_tensor", "log"), "disabled", True))
        stack.enter_context(replaced(_thread, "reads", True))
        stack.enter_context(utils.get_metrics_context())
        stack.enter_context(utils.dynamo_timed("replay"))
        stack.enter_context(guards.compile_context(guards.CompileContext(frames.get_compile_id({}))))
        stack.enter_context(config.patch(_SETTINGS))
        # Some releases draw once while they trace.
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        outcome = frames.compile_frame(
            *(_call.__code__, globals(), given, builtins.__dict__, ()),
            compiler_fn=lambda graph, inputs: graph,
            one_graph=True,
            restart_reasons=set(),
        )
        graph = outcome.tracer_output.output_graph
        if graph.random_calls:
            raise NotReplayableError("it draws from Python's own generator")
        if not graph.side_effects.is_empty():
            raise NotReplayableError("it changes objects of Python")
        for code in graph.tracing_context.traced_code:
            for name in () if code.co_filename.startswith((_TORCH, _PACKAGE)) else _UNSEEN.keys() & set(code.co_names):
                raise NotReplayableError(f"{code.co_name} {_UNSEEN[name]}")
        return graph, outcome.build_guards(_call.__code__).guard_manager
