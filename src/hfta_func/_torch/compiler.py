"""The compiler, whose modules are imported only once it is used, because that takes seconds."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from hfta_func._torch._release import private, replaced
from hfta_func._torch.dispatcher import code_replaced
from hfta_func._torch.levels import inside_vmap, is_batched

F = TypeVar("F", bound=Callable[..., Any])

_CODE = re.compile(r"G\['__import_(torch|hfta_func)(_dot_\w+)?'\]|__import__\('torch'\)|G\['__builtins_dict___\d+'\]")
"""Guards on definitions of PyTorch, this package and Python."""
_DEFINITIONS = "CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT"
"""The types of guards that a function, a class or a module is the same object."""
_CONSTANTS = re.compile(r"_pytree|hfta_func.*\.(_?[A-Z][A-Z0-9_]*\b|__(kw)?defaults__)")
"""Guards on values that are never assigned again: PyTorch's registry of trees, this package's constants and defaults."""
_RULES = "hfta_func.rules"
"""The name of the mark that keeps compiled graphs on disk apart."""
_COPIES = re.compile(r"call\b.*\b(_first\[0\]\.(_modules|places)|_shapes|_holders|_trainable)(?!\w)")
"""Guards on a step's copy of the model, and on facts about it."""


def untraced(reason: str) -> Callable[[F], F]:
    """Run ``func`` between graphs, like ``torch.compiler.disable``, which would import the whole compiler."""

    def mark(func: Any) -> Any:
        func._torchdynamo_disable = True
        func._torchdynamo_disable_msg = reason
        return func

    return mark


def expected(size: int | torch.SymInt) -> int:
    """The size that the compiler has seen, without a guard on it; 8,192, Inductor's default, if it has seen none."""
    if isinstance(size, int):
        return size
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    # Before PyTorch 2.12 this function is missing or has another name and other arguments in every release.
    look = getattr(shapes, "optimization_hint", None)
    return look(size, fallback=8192) if look else size.node.require_hint(8192)


def original(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was compiled; a function that is not compiled is returned as it is."""
    func = getattr(func, "_torchdynamo_orig_callable", func)
    # The compiler wraps an object with a ``__call__``, such as a step, in a function.
    wrapped = getattr(func, "__wrapped__", func)
    return func if isinstance(wrapped, types.FunctionType) else wrapped


def is_compilable(func: Callable[..., Any]) -> bool:
    """Whether a function is a :class:`Compiled`, or what the compiler made of one."""
    return hasattr(func, "_torchdynamo_orig_callable")


class Compiled:
    """An object with a ``__call__`` that ``torch.compile`` treats as a function with a separate code object.

    The compiler's caches are keyed by code object. If all such objects shared the code of a wrapper, the shapes of one would
    become dynamic when another is compiled, and only a few of them could be compiled at all.
    """

    _numbers = itertools.count()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({getattr(self, 'status', '')})"

    @property
    def _torchdynamo_wrapper_id(self) -> int:
        return id(self)

    @property
    def _torchdynamo_orig_callable(self) -> Callable[..., Any]:
        if "_function" not in vars(self):
            call: Any = self

            def function(*args: Any, **kwargs: Any) -> Any:
                return call(*args, **kwargs)

            code = function.__code__.replace(co_name=f"{type(self).__name__}_{next(self._numbers)}")
            copy: Any = types.FunctionType(code, function.__globals__, code.co_name, closure=function.__closure__)
            copy.__wrapped__ = self
            self._function = copy
        return self._function


def tell_compiler_of_overrides(functions: Iterable[Any]) -> None:
    """Make the compiler pass functions to TorchFunctionModes that its list leaves out, such as ``randn_like``."""
    private("torch._dynamo.variables.torch", "get_overridable_functions")().update(functions)
    # FlexAttention calls it, and the compiler takes it for a function that it cannot trace.
    torch.compiler.allow_in_graph(private("torch", "_safe_softmax"))


def until_compiled(end: Callable[[], None]) -> None:
    """Call ``end`` once, when the running compilation has ended."""
    handler = private("torch._dynamo.callback", "callback_handler")

    def once(*args: Any) -> None:
        # A new list, because the old one is being iterated: removing an item would skip the next.
        handler.end_callbacks = [callback for callback in handler.end_callbacks if callback is not once]
        end()

    handler.register_end_callback(once)


def allow_recurrent_layers() -> contextlib.AbstractContextManager[None]:
    """A block in which the compiler takes recurrent layers into graphs."""
    private("torch._dynamo", "config.allow_rnn")
    return replaced(private("torch._dynamo", "config"), "allow_rnn", True)


def trust_processor() -> contextlib.AbstractContextManager[None]:
    """A block in which the compiler believes the processor's own list of its instructions.

    It would compile and load a program for each set of them, which takes longer than a small graph.
    """
    settings = private("torch._inductor", "config.cpp")
    return replaced(settings, "vec_isa_ok", settings.vec_isa_ok is not False)


def set_compiling(compiling: bool) -> bool:
    """Set what ``torch.compiler.is_compiling()`` returns outside of graphs; returns the previous value."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, compiling
    return before


def mark_graphs(version: str | None) -> None:
    """Keep compiled graphs on disk apart by a ``version``; None removes the mark.

    PyTorch's cache of compiled graphs keys on inductor's configuration, among others, of which a table of versions is part.
    """
    if version is None and "torch._inductor.config" not in sys.modules:
        return
    config = private("torch._inductor", "config")
    versions = private("torch._inductor", "config.unsafe_marked_cacheable_functions")
    # Assigned, not updated in place: the configuration notices only assignments.
    others = {key: value for key, value in versions.items() if key != _RULES}
    config.unsafe_marked_cacheable_functions = others if version is None else {**others, _RULES: version}


def stand_for(wrapper: Any, func: Callable[..., Any]) -> None:
    """Make :func:`original` return ``func`` for ``wrapper``."""
    wrapper._torchdynamo_orig_callable = func


def stays(tensor: Any) -> None:
    """Tell the compiler that a tensor keeps its address in later calls."""
    private("torch._dynamo", "mark_static_address")(tensor)


def current_trace() -> Any:
    """What tells the trace of a compiler that is under way from others; None outside of one."""
    return private("torch._guards", "TracingContext").try_get()


def dotted_path(expression: str) -> str:
    """``getattr(root.features, '0')``, as the compiler spells paths of modules, as ``root.features.0``."""
    while (plain := re.sub(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", expression)) != expression:
        expression = plain
    return re.sub(r"(\._modules)?\['?([^]']*)'?\]", r".\2", expression)


# PyTorch's rematerialisation itself, without the wrapper that :func:`intercept_checkpoint` replaces.
checkpoint = private("torch.utils.checkpoint", "checkpoint.__wrapped__")


# A loop in a graph, whose operator is public only as ``torch.ops.higher_order.scan``, with arguments in lists.
operator_scan = private("torch._higher_order_ops.scan", "scan")

# FlexAttention as plain operators, and what makes PyTorch ready to compile the functions that operators are given.
math_attention = private("torch._higher_order_ops.flex_attention", "math_attention")
_compiling: Any = private("torch._higher_order_ops.utils", "_set_compilation_env.__wrapped__")


def run_operators_eagerly(is_inside: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """A block in which operators of functions, such as FlexAttention, do not compile these where ``is_inside()`` holds."""

    def replacement(*, _is_inside: Any, _original: Any) -> Any:
        if not _is_inside():
            yield from _original()
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    return code_replaced(_compiling, replacement, _is_inside=is_inside)


def intercept_checkpoint(handler: Callable[..., Any]) -> None:
    """Call ``handler`` for ``checkpoint``, by whatever name a model has imported it: PyTorch reads this attribute first."""
    setattr(checkpoint, "__dynamo_disable", handler)


def trace_checkpoint(call: Any) -> Any:
    """Make the compiler trace ``checkpoint`` by ``call(self, tx, args, kwargs)``; returns the previous function."""
    variable = private("torch._dynamo.variables.higher_order_ops", "CheckpointHigherOrderVariable")
    before, variable.call_function = variable.call_function, call
    return before


def trace_functions(call: Any) -> contextlib.AbstractContextManager[None]:
    """A block in which the compiler traces autograd functions by ``call(before, self, tx, args, kwargs)``."""
    variable = private("torch._dynamo.variables.misc", "AutogradFunctionVariable")
    before = variable.call_apply
    return replaced(variable, "call_apply", lambda self, *given: call(before, self, *given))


def in_graph(variable: Any, tx: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A call of ``func`` for the class that is traced as ``variable``: one node of the graph.

    Of its results, ``func.constants`` are no tensors.
    """
    if variable.source is not None:
        # Of a method that a model keeps, such as ``ReLU.apply``, the compiler does not check whose it is.
        guard = variable.source.make_guard(private("torch._dynamo.guards", "GuardBuilder.ID_MATCH"))
        private("torch._dynamo.guards", "install_guard")(guard)
    arguments = private("torch._dynamo.utils", "proxy_args_kwargs")(args, kwargs)
    proxy = tx.output.create_proxy("call_function", func, *arguments)
    results = private("torch._dynamo.variables.builder", "wrap_fx_proxy")(tx=tx, proxy=proxy)
    for position, value in func.constants.items():
        results.items[position] = private("torch._dynamo.variables.base", "VariableTracker").build(tx, value)
    return results


def trace_history() -> contextlib.AbstractContextManager[None]:
    """A block in which the compiler answers ``requires_grad`` of members' tensors.

    It would read it from the wrapper of ``vmap``, which has no history.
    """
    variable = private("torch._dynamo.variables.tensor", "TensorVariable")
    constant = private("torch._dynamo.variables", "ConstantVariable")
    before = getattr(variable, "method_attr_requires_grad", lambda self, tx: None)

    def requires_grad(self: Any, tx: Any) -> Any:
        value = self.as_proxy().node.meta.get("example_value")
        return constant.create(inside_vmap(value).requires_grad) if is_batched(value) else before(self, tx)

    return replaced(variable, "method_attr_requires_grad", requires_grad, create=True)


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's checks before every call of a graph are needed.

    There are thousands, which take a third of the time of a small step. Definitions of PyTorch and this package, and a step's
    copy of a model, never change; settings, users' code, states and batches do.
    """
    return [
        not _COPIES.match(guard.name)
        and not (_CODE.match(guard.name) and (guard.guard_type in _DEFINITIONS or _CONSTANTS.search(guard.name)))
        for guard in guards
    ]
