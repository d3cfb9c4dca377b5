"""The rule of an optimizer as one kernel in C, which updates all leaves of all members in one pass over memory.

The rule is called once with symbolic tensors, and its operators are translated to C.
"""

from __future__ import annotations

import base64
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from hfta_func._kernels import native
from hfta_func._kernels.operators import DEFINITIONS, define_operator
from hfta_func._torch import constant_to_compiler, num_dispatch_modes

_FORMS: Mapping[Any, str] = {
    **{("add", 2): "{0} + {1}", ("sub", 2): "{0} - {1}", ("mul", 2): "{0} * {1}", ("div", 2): "{0} / {1}"},
    **{("neg", 1): "-{0}", ("sqrt", 1): "sqrt({0})", ("abs", 1): "fabs({0})", ("truediv", 2): "{0} / {1}"},
    ("sign", 1): "(T)(({0} > 0) - ({0} < 0))",
    # As PyTorch does, NaN stays NaN.
    ("clamp_min", 2): "({0} >= {1} || {0} != {0} ? {0} : {1})",
    ("clamp_max", 2): "({0} <= {1} || {0} != {0} ? {0} : {1})",
    **{("gt", 2): "({0} > {1})", ("lt", 2): "({0} < {1})", ("where", 3): "({0} != 0 ? {1} : {2})"},
    ("lerp", 3): "{0} + {2} * ({1} - {0})",
    ("addcmul", 3, "value"): "{0} + {value} * {1} * {2}",
}
"""The form in C of each operator, by its name, the number of its arguments, and options."""

_HEAD = """
#define T {0}
static void run_row(char **columns, int64_t leaves, int64_t start, int64_t length, const double *numbers, int64_t models,
                    int keep)
{{
{1}
    if (!keep) {{
        for (int64_t i = 0; i < length; i++) {{ {2} }}
        return;
    }}
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) {{
{3}
    }}
}}
"""
_ROW = """run_row(columns + leaf, leaves, model * sizes[leaf] + low, high - low, numbers + model, models,
                            !keep || keep[model])"""

_Columns = Sequence[Sequence[Tensor]]

MAX_INLINE_LEAVES = 16
"""With more leaves, a compiled step calls the kernel as one operator instead of generating code for every leaf."""

overwrites: ContextVar[bool] = ContextVar("overwrites", default=False)
"""Whether the operator ``update`` may write new parameters and slots into the old ones, which nobody else holds then."""


class Kernel:
    """The kernel of a rule ``rule(grad, param, k, *slots) -> change`` of one element that writes its slots."""

    def __init__(self, rule: Callable[..., Any], num_slots: int):
        self._rule, self._num_slots = rule, num_slots
        self._number = next(_NUMBERS)
        _KERNELS[self._number] = self

    def __call__(
        self, columns: _Columns, numbers: Mapping[str, Tensor], keep: Tensor | None, donate: bool, apply: bool
    ) -> _Columns | None:
        """Run the kernel over leaves ``[M, ...]``: lists of gradients and of parameters, and one for every slot.

        Members where ``keep`` is False keep parameters and slots. With ``donate`` slots and, with ``apply``, parameters are
        written. Returns a list of changes, or of parameters with ``apply``, and one for every slot; None if the kernel does
        not support these leaves.
        """
        leaves, compiles = [leaf for column in columns for leaf in column], torch.compiler.is_compiling()
        dtype, width = leaves[0].dtype, len(columns[0])
        if compiles and width <= MAX_INLINE_LEAVES:
            return None
        # What records operators must see one.
        compiles = compiles or num_dispatch_modes() > 0
        if not all(leaf.dtype == dtype and leaf.device.type == "cpu" for leaf in leaves) or dtype not in native.TYPES:
            return None
        source = _source_of(self._number, tuple(numbers), dtype, apply, compiles)
        if source is None:
            return None
        if compiles:
            _define()
            if donate and apply:
                torch.ops.hfta_func.update_(leaves[:width], leaves[width:], _stacked(numbers), keep, source)
                return [*columns[1:]]
            results = torch.ops.hfta_func.update(leaves[:width], leaves[width:], _stacked(numbers), keep, source, apply)
            return [results[at : at + width] for at in range(0, len(results), width)]
        # The kernel reads memory.
        plain = all(type(leaf) in (Tensor, torch.nn.Parameter) and leaf.is_contiguous() for leaf in leaves[width:])
        if any(leaf.requires_grad for leaf in leaves) or not plain:
            return None
        # The first column are parameters or, without ``apply``, changes, which are new.
        outs = [one if donate and (apply or i) else [*map(torch.empty_like, one)] for i, one in enumerate(columns[1:])]
        written = [leaf for column in outs for leaf in column]
        _run(written, leaves[:width], leaves[width:], _stacked(numbers), keep, source)
        if donate:
            _note_writes(written)
        return outs

    @functools.cache  # noqa: B019  as long as the optimizer lives
    def source(self, names: tuple[str, ...], dtype: torch.dtype, adds: bool) -> str | None:
        """The program in C; with ``adds`` it adds the change to the parameter, else it returns the change.

        None if the rule calls an operator that has no form in C.
        """
        graph = fx.Graph()
        tracer = GraphAppendingTracer(graph)

        def symbol(name: str) -> Any:
            return fx.Proxy(graph.placeholder(name), tracer)

        inputs = ["grad", "param", *(f"slot{i}" for i in range(self._num_slots))]
        tensors = [*map(symbol, inputs)]
        k = {name: symbol(f"number{i}") for i, name in enumerate(names)}
        change = self._rule(*tensors[:2], k, *tensors[2:])
        # The variable in C for each symbol; an in-place operator assigns to the variable of its input.
        held = {node: node.name for node in graph.nodes if node.op == "placeholder"}
        lines = [f"T {name} = {name}_[i];" for name in inputs]
        for node in [node for node in graph.nodes if node not in held]:
            target: Any = node.target
            name: str = target if isinstance(target, str) else target.__name__
            terms = [held[x] if isinstance(x, fx.Node) else f"(T){x!r}" for x in node.args]
            form = _FORMS.get((name.strip("_"), len(terms), *node.kwargs))
            if form is None:
                return None
            value = form.format(*terms, **{key: f"(T){x!r}" for key, x in node.kwargs.items()})
            in_place = isinstance(target, str) and name.endswith("_")
            held[node] = terms[0] if in_place else f"at_{node.name}"
            lines.append(f"{'' if in_place else 'T '}{held[node]} = {value};")
        result, slots = held[change.node], range(self._num_slots)
        old, new = ("param_[i]", f"param + {result}") if adds else ("0", result)
        lines += [f"change_[i] = {new};", *(f"after{i}_[i] = slot{i};" for i in slots)]
        same = [f"change_[i] = {old};", *(f"after{i}_[i] = slot{i}_[i];" for i in slots)]
        columns = [*inputs, "change", *(f"after{i}" for i in slots)]
        declarations = [f"T *{name}_ = (T *)columns[{i} * leaves] + start;" for i, name in enumerate(columns)]
        declarations += [f"const T number{i} = (T)numbers[{i} * models];" for i in range(len(names))]
        texts = ("\n".join(part) for part in (declarations, same, lines))
        head = _HEAD.format(native.TYPES[dtype], *texts)
        # The columns are all leaves of one after the other.
        return native.shared_out(head, "char **columns, const double *numbers, const char *keep", _ROW)


_NUMBERS = itertools.count()
_KERNELS: weakref.WeakValueDictionary[int, Kernel] = weakref.WeakValueDictionary()


@constant_to_compiler
def _source_of(number: int, names: tuple[str, ...], dtype: torch.dtype, adds: bool, in_one_line: bool) -> str | None:
    """The program of a kernel, given by number for compilers; None if there is none, or no C compiler that works.

    ``in_one_line`` it is a string argument of a graph, without characters that inductor would have to escape.
    """
    source = _KERNELS[number].source(names, dtype, adds)
    if source is None or native.program(source) is None:
        return None
    return base64.b64encode(source.encode()).decode() if in_one_line else source


@functools.cache
def _as_written(argument: str) -> str:
    return base64.b64decode(argument).decode()


@constant_to_compiler
def _define() -> bool:
    """Define the operators by which compiled graphs call kernels."""

    def fake(grads: list[Tensor], leaves: list[Tensor], *rest: Any) -> list[Tensor]:
        return [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]

    def outputs(leaves: list[Tensor], apply: bool) -> list[Tensor]:
        return leaves if apply and overwrites.get() else [*map(torch.empty_like, leaves)]

    def update(grads: list[Tensor], leaves: list[Tensor], numbers: Tensor, keep: Any, source: str, apply: bool) -> Any:
        plain = [leaf.contiguous() for leaf in leaves]
        outs = outputs(plain, apply)
        _run(outs, grads, plain, numbers, keep, _as_written(source))
        return outs

    def update_(grads: list[Tensor], leaves: list[Tensor], numbers: Tensor, keep: Any, source: str) -> None:
        plain = [leaf.contiguous() for leaf in leaves]
        _run(plain, grads, plain, numbers, keep, _as_written(source))
        for leaf, written in zip(leaves, plain, strict=True):
            if leaf is not written:
                leaf.copy_(written)
        _note_writes(leaves)

    def prepare(grads: list[Tensor], leaves: list[Tensor], numbers: Tensor, keep: Any, source: str, apply: bool) -> Any:
        if not all(leaf.is_contiguous() for leaf in (*grads, *leaves)):
            return None
        program, models = native.program(_as_written(source)), numbers.shape[1]
        sizes = [grad.numel() // models for grad in grads]
        assert program is not None

        def update(grads: list[Tensor], leaves: list[Tensor], numbers: Tensor, keep: Any, *_: Any) -> list[Tensor]:
            outs = outputs(leaves, apply)
            program(sizes, models, [[*grads, *leaves, *outs], numbers, keep])
            return outs

        return update

    arguments = "Tensor[] grads, Tensor{}[] leaves, Tensor numbers, Tensor? keep, str source"
    schema = f"update({arguments.format('')}, bool apply) -> Tensor[]"
    define_operator(schema, {"CPU": update}, fake=fake, prepare=prepare)
    define_operator(f"update_({arguments.format('(a!)')}) -> ()", {"CPU": update_}, fake=lambda *args: None)
    return True


DEFINITIONS.append(("update", _define))


def _stacked(numbers: Mapping[str, Tensor]) -> Tensor:
    # If all leaves of a state were converted to another dtype, these numbers were, too.
    return torch.stack([value.to(torch.float64) for value in numbers.values()])


def _run(
    outs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor], numbers: Tensor, keep: Any, source: str
) -> None:
    models, run = numbers.shape[1], native.program(source)
    assert run is not None
    tensors = [*(grad.contiguous() for grad in grads), *leaves, *outs]
    run([grad.numel() // models for grad in grads], models, [tensors, numbers, keep])


def _note_writes(leaves: Sequence[Tensor]) -> None:
    """Tell autograd of writes by the kernel, which it does not notice."""
    torch.autograd.graph.increment_version([leaf for leaf in leaves if not leaf.is_inference()])
