"""The rule of an optimizer as one kernel: all leaves of all members in one pass over memory.

The rule is followed once with symbols for its tensors, and what it does to them is written down in C.
"""

from __future__ import annotations

import base64
import functools
import itertools
import operator
import string
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from hfta_func._kernels import native, rows
from hfta_func._kernels.operators import define_operator
from hfta_func._torch import constant_to_compiler

_FORMS: Mapping[Any, str] = {
    **{"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}"},
    **{"sqrt": "sqrt({0})", "abs": "fabs({0})", "sign": "(T)(({0} > 0) - ({0} < 0))"},
    # As PyTorch does, NaN stays NaN.
    "clamp_min": "({0} >= {1} || {0} != {0} ? {0} : {1})",
    "lerp": "{0} + {2} * ({1} - {0})",
    "addcmul": "{0} + {value} * {1} * {2}",
}
"""What operators are in C."""

_SAME = {operator.truediv: "div", operator.neg: "neg"}


AT_ONCE = 16
"""More leaves than this are one operator to a compiler, which would make a program for every one of them."""


class Kernel:
    """A rule ``rule(grad, param, k, *slots) -> change``, which writes its slots, over all leaves at once.

    Args:
        rule: What is done to one element.
        num_slots: How many tensors stand beside each parameter.
    """

    def __init__(self, rule: Callable[..., Any], num_slots: int):
        self._rule, self._num_slots = rule, num_slots
        self._number = next(_NUMBERS)
        _KERNELS[self._number] = self

    def __call__(
        self,
        columns: Sequence[Sequence[Tensor]],
        numbers: Mapping[str, Tensor],
        keep: Tensor | None = None,
        *,
        donate: bool = False,
        apply: bool = False,
    ) -> Sequence[Sequence[Tensor]] | None:
        """Run the rule; None if there is no program for these leaves.

        Args:
            columns: Leaves ``[M, ...]`` of one dtype: a list of gradients, one of parameters, and one for every slot.
            numbers: The numbers by name, ``float64[M]``.
            keep: ``bool[M]``; other members keep parameters and slots.
            donate: Write into the parameters, with ``apply``, and slots.
            apply: Add the changes to the parameters.

        Returns:
            Lists of changes, or of parameters with ``apply``, and of every slot.
        """
        leaves, compiles = [leaf for column in columns for leaf in column], torch.compiler.is_compiling()
        dtype, width = leaves[0].dtype, len(columns[0])
        if compiles and width <= AT_ONCE:
            return None
        if not all(leaf.dtype == dtype and leaf.device.type == "cpu" for leaf in leaves) or dtype not in rows.TYPES:
            return None
        source = _source_of(self._number, tuple(numbers), dtype, apply)
        if source is None:
            return None
        if compiles:
            _define()
            source = _in_one_line(source)
            if donate and apply:
                torch.ops.hfta_func.update_(leaves[:width], leaves[width:], _stacked(numbers), keep, source)
                return [*columns[1:]]
            found = torch.ops.hfta_func.update(leaves[:width], leaves[width:], _stacked(numbers), keep, source)
            return [*_rows(found, width)]
        if any(leaf.requires_grad for leaf in leaves) or not all(map(_is_plain, leaves[width:])):
            return None
        outs = [column if donate else [*map(torch.empty_like, column)] for column in columns[1:]]
        if donate and not apply:
            outs[0] = [*map(torch.empty_like, columns[1])]
        grads = [grad.contiguous() for grad in columns[0]]
        _run(source, [grads, *columns[1:]], outs, _stacked(numbers), keep)
        return outs

    @functools.cache  # noqa: B019  as long as the optimizer lives
    def source(self, names: tuple[str, ...], dtype: torch.dtype, adds: bool) -> str:
        """The program in C; the change is added to the parameter or given back."""
        graph = fx.Graph()
        tracer = GraphAppendingTracer(graph)

        def symbol(name: str) -> Any:
            return fx.Proxy(graph.placeholder(name), tracer)

        inputs = ["grad", "param", *(f"slot{i}" for i in range(self._num_slots))]
        tensors = [*map(symbol, inputs)]
        k = {name: symbol(f"number{i}") for i, name in enumerate(names)}
        change = self._rule(*tensors[:2], k, *tensors[2:])
        # The variable in C that holds what a symbol stands for; an operator in place gives it another value.
        held = {node: node.name for node in graph.nodes if node.op == "placeholder"}
        lines = [f"T {name} = {name}_[i];" for name in inputs]
        for node in graph.nodes:
            if node in held:
                continue
            target: Any = node.target
            name: str = target if isinstance(target, str) else _SAME.get(target) or target.__name__
            terms = [held[x] if isinstance(x, fx.Node) else f"(T){x!r}" for x in node.args]
            value = _in_c(name.strip("_"), terms, {key: f"(T){x!r}" for key, x in node.kwargs.items()})
            in_place = isinstance(target, str) and name.endswith("_")
            held[node] = terms[0] if in_place else f"at_{node.name}"
            lines.append(f"{'' if in_place else 'T '}{held[node]} = {value};")
        result, slots = held[change.node], range(self._num_slots)
        lines.append(f"change_[i] = param + {result};" if adds else f"change_[i] = {result};")
        lines += [f"after{i}_[i] = slot{i};" for i in slots]
        same = [
            "change_[i] = param_[i];" if adds else "change_[i] = 0;",
            *(f"after{i}_[i] = slot{i}_[i];" for i in slots),
        ]
        columns = ["grad", "param", "change", *inputs[2:], *(f"after{i}" for i in slots)]
        return rows.source(dtype, columns, len(names), lines, same)


def _in_c(name: str, terms: Sequence[str], options: Mapping[str, str]) -> str:
    """One operator in C; raises if it has no form in C, or none with these arguments."""
    form = _FORMS.get(name, "")
    fields = [field for _, field, _, _ in string.Formatter().parse(form) if field]
    if {*map(str, range(len(terms))), *options} != {*fields}:
        raise TypeError(
            f"the rule of an optimizer calls '{name}' with {len(terms)} arguments and {sorted(options) or 'no options'}, "
            f"which has no form in C; the operators that have one are {', '.join(_FORMS)} (addcmul with value=); write the "
            f"rule with these, or pass elementwise=False to leafwise"
        )
    return form.format(*terms, **options)


_NUMBERS = itertools.count()
_KERNELS: weakref.WeakValueDictionary[int, Kernel] = weakref.WeakValueDictionary()


@constant_to_compiler
def _source_of(number: int, names: tuple[str, ...], dtype: torch.dtype, adds: bool) -> str | None:
    """The program of a kernel, which is known by a number so that compilers can ask for it; None if it cannot be had."""
    if native.compiler() is None:
        return None
    source = _KERNELS[number].source(names, dtype, adds)
    return None if native.program(source) is None else source


@constant_to_compiler
def _in_one_line(source: str) -> str:
    """A program as an argument in a graph, which some of inductor's programs quote as it is."""
    return base64.b64encode(source.encode()).decode()


@functools.cache
def _as_written(argument: str) -> str:
    return base64.b64decode(argument).decode()


def _is_plain(leaf: Tensor) -> bool:
    """Whether a tensor lies in memory as programs read it."""
    return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.is_contiguous()


@constant_to_compiler
def _define() -> bool:
    """Make the kernel an operator that graphs call."""

    def run(outs: list[Tensor], grads: list[Tensor], leaves: list[Tensor], *rest: Any) -> list[Tensor]:
        width, source = len(grads), _as_written(rest[-1])
        plain = [[leaf.contiguous() for leaf in column] for column in (grads, leaves, outs)]
        _run(source, [plain[0], *_rows(plain[1], width)], [*_rows(plain[2], width)], *rest[:-1])
        for out, written in zip(outs, plain[2], strict=True):
            if out is not written:
                out.copy_(written)
        return outs

    def fake(grads: list[Tensor], leaves: list[Tensor], *rest: Any) -> list[Tensor]:
        return [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]

    def update(grads: list[Tensor], leaves: list[Tensor], *rest: Any) -> list[Tensor]:
        return run(fake(grads, leaves), grads, leaves, *rest)

    def update_(grads: list[Tensor], leaves: list[Tensor], *rest: Any) -> None:
        run(leaves, grads, leaves, *rest)

    arguments = "Tensor[] grads, Tensor{}[] leaves, Tensor numbers, Tensor? keep, str source"
    define_operator(f"update({arguments.format('')}) -> Tensor[]", {"CPU": update}, fake=fake)
    define_operator(f"update_({arguments.format('(a!)')}) -> ()", {"CPU": update_}, fake=lambda *args: None)
    return True


def _rows(leaves: list[Tensor], width: int) -> Iterator[list[Tensor]]:
    return (leaves[at : at + width] for at in range(0, len(leaves), width))


def _stacked(numbers: Mapping[str, Tensor]) -> Tensor:
    # A state whose leaves somebody has converted all at once holds narrower ones.
    return torch.stack([value.to(torch.float64) for value in numbers.values()])


def _run(
    source: str, columns: Sequence[Sequence[Tensor]], outs: Sequence[Sequence[Tensor]], numbers: Tensor, keep: Any
) -> None:
    grads, params, *slots = columns
    models = numbers.shape[1]
    order = [grads, params, outs[0], *slots, *outs[1:]]
    places = [leaf for row in zip(*order, strict=True) for leaf in row]
    run = native.program(source)
    assert run is not None
    run([grad.numel() // models for grad in grads], models, [places, numbers, keep])
    # Autograd notices operators only.
    torch.autograd.graph.increment_version([leaf for column in outs for leaf in column if not leaf.is_inference()])
