"""Which Python values a function reads: what PyTorch's compiler, which traces Python, looks at again before a later call."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import itertools
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch._release import private
from hfta_func._torch.inductor import replaced
from hfta_func._torch.levels import constant_to_compiler
from hfta_func._torch.modules import is_call_replaced
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
# Flags of CPython's classes: whose attributes can be set are those made at run time, unless they are immutable.
_IMMUTABLE_TYPE, HEAP_TYPE = 1 << 8, 1 << 9


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
        if has_global_hooks() or is_call_replaced():
            raise NotReplayableError("there are hooks on all modules, or their __call__ has been replaced")
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
        # What the tracer takes for granted: classes, arguments' defaults, and names of builtins that modules may hide.
        # Of dicts of hooks, of which a model has hundreds, it looks whether they are empty.
        kept = (guard.name for guard in graph.guards if guard.create_fn_name() != "EMPTY_NN_MODULE_HOOKS_DICT")
        looked_at: dict[str, Any] = {}
        for name in kept:
            # Some names are expressions of the tracer's own, about parts of objects that have names, too.
            with contextlib.suppress(Exception):
                looked_at[name] = self._value(name)
        values = [*looked_at.values()]
        views: list[Any] = [vars(kind).values() for kind in _classes(values)]
        self._functions = [(one, _defaults(one)) for one in values if isinstance(one, types.FunctionType)]
        self._hidden = [*_hidden(graph.tracing_context.traced_code)]
        # It looks neither at the keys of a dict that is unpacked, nor at what differs but is equal, as -0.0 and 0.0 are.
        views += [one.keys() for one in _dicts(values, graph.tracing_context.traced_code)]
        # Views of dicts, which change with them.
        self._views, self._lengths, self._viewed = views, [*map(len, views)], (*itertools.chain(*views),)
        ambiguous = (
            (name, repr(value))
            for name, value in looked_at.items()
            if isinstance(value, frozenset | complex) or (isinstance(value, float) and value == 0)
        )
        self._constants = [(compile(name, "<source>", "eval"), text) for name, text in ambiguous]

    def hold(self) -> bool:
        """Whether the values are as they were."""
        return (
            not has_global_hooks()
            and not is_call_replaced()
            and self._manager.check(self._locals)
            and all([self._value(source) is tensor for source, tensor in self._tensors])
            and [*map(len, self._views)] == self._lengths
            and _identical(itertools.chain.from_iterable(self._views), self._viewed)
            and all([_identical(_defaults(one), values) for one, values in self._functions])
            and all([names.isdisjoint(space) for space, names in self._hidden])
            and all([repr(self._value(source)) == text for source, text in self._constants])
        )

    def _value(self, source: Any) -> Any:
        return eval(source, {"G": globals(), "L": self._locals, **_HELPERS})


def _classes(values: Iterable[Any]) -> list[type]:
    """The classes among the values and those of the others, with their bases."""
    kinds = (one if isinstance(one, type) else type(one) for one in values)
    every = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    return [kind for kind in every if kind.__flags__ & HEAP_TYPE and not kind.__flags__ & _IMMUTABLE_TYPE]


def _dicts(values: Iterable[Any], codes: Iterable[Any]) -> Iterator[dict[Any, Any]]:
    """The dicts among the values, and those of attributes if code asks for all of them."""
    asks = any("vars" in code.co_names for code in codes)
    for value in values:
        if isinstance(value, dict):
            yield value
        elif asks and isinstance(getattr(value, "__dict__", None), dict):
            yield vars(value)


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def _identical(values: Iterable[Any], before: tuple[Any, ...]) -> bool:
    try:
        # In C, which looks whether two are the same object before it compares them.
        return (*values,) == before
    except Exception:
        return False


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


def _hidden(codes: Iterable[Any]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """For every module with a traced function its names, and the names of builtins that are not among them."""
    spaces = {getattr(module, "__file__", None): vars(module) for module in [*sys.modules.values()]}
    for path in {code.co_filename for code in codes if not code.co_filename.startswith(_TORCH)}:
        space = spaces.get(path, vars(sys.modules["__main__"]))
        names = {name for code in codes if code.co_filename == path for name in code.co_names}
        if hidden := {name for name in names if hasattr(builtins, name) and name not in space}:
            yield space, hidden
