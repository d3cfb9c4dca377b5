"""What recorded events belong to: phase, module, operator and lowering. Every moment belongs to one line, so lines add up."""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

MARK = "hfta_func/"
"""Names of markers begin with it: ``hfta_func/<phase>`` and, of modules, ``hfta_func/module:<path>``."""
ITERATION, STEP, GRADIENTS, BODY, MODULE = "iteration", "step", "gradients", "body", "module:"
PHASES = (
    *("data", "check", "entering vmap", "forward", "loss", "noise", "backward", "judge", "update", "commit"),
    *("Python", "step", "graph", "loop", "idle"),
)
"""The phases of a line, in the order of a step."""
_NAMED = {"forward", "loss", "backward", "step", "graph"}
"""Phases whose operators have lines of their own."""
_FUSED = "fused by the compiler"
_CHEAP = re.compile(
    r"(as_strided_?|resize_|empty\w*|expand|resolve_\w+|detach_?|view|_?reshape\w*|_unsafe_view|t|transpose|permute|movedim|"
    r"unsqueeze|squeeze|select|slice|alias|lift_fresh|fill_|zero_|copy_|to|_to_copy|clone|contiguous|unbind|narrow)\Z"
)
"""Operators that allocate, view or copy: a kernel may call these, and they are none themselves unless they copy."""
_COPIES = {"fill_", "zero_", "copy_", "cat"}
_OF_MARKER, _OF_MODULE = 3, 10
"""What recording a marker and a module costs, in that of an operator."""
_MOST_EACH = 3e-6
"""Seconds that recording an operator costs at most: what is more is other work on the machine."""


class Line(NamedTuple):
    """A line of a profile, the mean of a step; without numbers, what a moment belongs to."""

    phase: str
    module: str = ""  # its path; empty outside of modules and where several share a line
    operator: str = ""  # named as in rules.explain; empty for "Python" and the like
    lowering: str = ""  # empty if PyTorch batches the operator itself
    seconds: float = 0.0  # of this process, without what profiling costs
    in_kernels: float = 0.0  # seconds in kernels: of these, or on a GPU of the device
    kernels: float = 0.0  # number of kernels, on a GPU of launches


_ENTERING, _AUTOGRAD = Line("entering vmap"), Line("backward", operator="autograd")


class Span:
    """An event and the events inside it."""

    def __init__(self, event: Any):
        self.name, self.start, self.sequence = str(event.name()), event.start_ns(), event.sequence_nr()
        self.end, self.id = self.start + event.duration_ns(), event.correlation_id()
        self.is_node = self.name.startswith("autograd::engine::evaluate_function: ")
        self.is_operator = "::" in self.name and not self.is_node and event.scope() == 0
        self.inside: list[Span] = []
        self.mark = self.name.removeprefix(MARK) if self.name.startswith(MARK) else None
        self.operator = re.sub(r"(_[0-9a-f]{8})?\Z", "", self.name.rpartition("::")[2])

    def __iter__(self) -> Iterator[Span]:
        """The span and all inside, in the order in which they began."""
        yield self
        for span in self.inside:
            yield from span

    @functools.cached_property
    def is_kernel(self) -> bool:
        """Whether it is an operator that calls none but those that allocate, view or copy."""
        if not self.is_operator or self.operator in _COPIES:
            return self.is_operator
        return not _CHEAP.match(self.operator) and all(_CHEAP.match(span.operator) for span in [*self][1:])

    @property
    def is_matched(self) -> bool:
        """Whether an operator of a record is looked up: no marker, view or copy."""
        return "::" in self.name and not self.is_node and not _CHEAP.match(self.operator)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


def iterations_of(events: Iterable[Any]) -> list[Span]:
    """The iterations, of which other events of this process are inside, on whatever thread: one waits for the other."""
    iterations: list[Span] = []
    around: list[Span] = []
    # An event of no length may begin with the one that it is inside.
    spans = [Span(event) for event in events if event.device_type().name == "CPU"]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1].end <= span.start:
            around.pop()
        (around[-1].inside if around else iterations).append(span)
        around.append(span)
    return [span for span in iterations if span.mark == ITERATION]


def of_device(events: Iterable[Any]) -> dict[int, tuple[float, int]]:
    """Seconds and launches of a device by the event that launched them."""
    launched: dict[int, tuple[float, int]] = {}
    for event in events:
        if event.device_type().name != "CPU" and not event.is_user_annotation():
            seconds, count = launched.get(event.linked_correlation_id(), (0.0, 0))
            launched[event.linked_correlation_id()] = seconds + event.duration_ns() / 1e9, count + 1
    return launched


class Timeline:
    """Self time by line, over the iterations that were recorded.

    Args:
        lowerings: How operators run, by module and operator.
        like: For a step that is replayed without modules, the operators of the same step as it was recorded, in order.
        device: Seconds and launches of a GPU by the number of the event that launched them.
    """

    def __init__(
        self,
        lowerings: Mapping[tuple[str, str], str],
        like: list[tuple[str, Line]] | None = None,
        device: Mapping[int, tuple[float, int]] | None = None,
    ):
        self._lowerings, self._like, self._device = lowerings, like, device
        self.order: list[tuple[str, Line]] = []
        """Every operator of losses and gradients that has none of its name inside, and where it belongs."""
        # Seconds, seconds in kernels, kernels, and the weight of the events whose recording the seconds include.
        self._lines: defaultdict[Line, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.count = 0
        self._origins: dict[int, Line] = {}

    def add(self, iteration: Span) -> None:
        """Add an iteration: what is before its step loads data, and what is after it is the loop."""
        self.count += 1
        self._replayed = iter(self._recorded(iteration) if self._like is not None else ())
        self._latest = _ENTERING
        begin = next((span.start for span in iteration.inside if span.mark == STEP), iteration.end)
        self._visit(iteration, Line("data"), begin)

    def _recorded(self, iteration: Span) -> list[Line | None]:
        """Where each operator of a replayed iteration belonged as it was recorded; None if that is spelt otherwise."""
        spans = (span for outer in iteration if outer.mark == GRADIENTS for span in outer.inside)
        names = [span.operator for span in spans if span.is_matched]
        lines: list[Line | None] = [None] * len(names)
        matcher = difflib.SequenceMatcher(None, names, [name for name, _ in self._like or ()], autojunk=False)
        for at, other, size in matcher.get_matching_blocks():
            lines[at : at + size] = [line for _, line in (self._like or ())[other : other + size]]
        return lines

    def _visit(self, span: Span, where: Line, until: float = float("inf")) -> None:
        """Add a span that belongs ``where``; what comes after a moment is the loop's."""
        at, last = span.start, None
        for inner in (*span.inside, None):
            # The engine goes on from one node of the backward pass to the next.
            between = last is not None and inner is not None and last.is_node and inner.is_node
            line = self._put(_AUTOGRAD if between else where if at < until else Line("loop"), span)
            seconds = ((span.end if inner is None else inner.start) - at) / 1e9
            line[0] += seconds
            if self._device is None and (span.is_kernel or where.phase == "graph"):
                line[1] += seconds
            if inner is None:
                return
            line[3] += 1 if inner.mark is None else _OF_MODULE if inner.mark.startswith((MODULE, BODY)) else _OF_MARKER
            at, last = inner.end, inner
            around = where if inner.start < until else Line("loop")
            self._visit(inner, self._where(inner, around, is_outermost=span.mark is not None))

    def _put(self, where: Line, span: Span) -> list[float]:
        """The line that self time of a span belongs to."""
        is_code = span.mark is not None and span.mark.startswith((MODULE, BODY)) and where.phase in ("forward", "loss")
        is_python = is_code or (self._like is not None and span.mark == GRADIENTS)
        return self._lines[Line("Python") if is_python else where]

    def _where(self, span: Span, around: Line, is_outermost: bool) -> Line:
        """Line a span belongs, which is inside one that belongs ``around``: a marker if it is outermost."""
        if span.mark is not None:
            return self._marked(span.mark, around)
        if "Synchronize" in span.name:
            return Line("idle")
        if span.name.startswith(("Torch-Compiled Region", "TorchDynamo Cache", "Pregraph", "AOTDispatcher")):
            return Line("Python")
        if span.name.startswith("## Call CompiledFxGraph"):
            return Line("graph", operator=_FUSED)
        if span.is_node:
            origin = self._origins.get(span.sequence, _AUTOGRAD)
            return self._chosen(origin._replace(phase="backward"))
        if self._like is not None and is_outermost and around == _ENTERING:
            # Of a record: to what called it when it was recorded; what is spelt otherwise there, to the one before.
            if span.is_matched:
                self._latest = next(self._replayed, None) or self._latest
            where = self._latest
        else:
            where = self._operator(span, around)
        seconds, launches = (0.0, span.is_kernel) if self._device is None else self._device.get(span.id, (0.0, 0))
        line = self._lines[where]
        line[1] += seconds
        line[2] += launches
        if span.sequence >= 0 and where.phase in ("forward", "loss", "noise"):
            # Of events with the same number, the last one to begin makes the node of the backward pass.
            self._origins[span.sequence] = where
        if where.phase in PHASES[2:10] and all(inner.operator != span.operator for inner in [*span][1:]):
            self.order.append((span.operator, where))
        return where

    def _marked(self, mark: str, around: Line) -> Line:
        if around.phase == "noise":
            return around
        if mark.startswith(MODULE):
            # Rematerialised modules run again in the backward pass.
            return Line("backward" if around.phase == "backward" else "forward", mark.removeprefix(MODULE))
        return {GRADIENTS: _ENTERING, STEP: Line("Python"), BODY: Line("loss")}.get(mark, Line(mark))

    def _operator(self, span: Span, around: Line) -> Line:
        if around.phase == "Python":
            around = Line("step")
        if around.phase not in _NAMED or around.operator not in ("", _FUSED):
            return around
        known = (inner.operator for inner in span if (around.module, inner.operator) in self._lowerings)
        return self._chosen(around._replace(operator=next(known, span.operator)))

    def _chosen(self, where: Line) -> Line:
        """With the lowering; the gradients of a convolution have their own."""
        parts = ("_input_grad", "_weight_grad") if where.phase == "backward" else ()
        names = [self._lowerings.get((where.module, where.operator + part), "") for part in parts]
        whole = self._lowerings.get((where.module, where.operator), "")
        return where._replace(lowering="/".join(dict.fromkeys(filter(None, names))) or whole)

    def table(self, unprofiled: float, profiled: float) -> list[Line]:
        """The lines of an iteration, without what recording costs: the difference of both, by the events recorded."""
        weights = sum(line[3] for line in self._lines.values())
        each = min(_MOST_EACH, max(0.0, profiled - unprofiled) * self.count / max(weights, 1))
        lines = []
        for where, (seconds, in_kernels, kernels, weight) in self._lines.items():
            if seconds or kernels:
                seconds = max(0.0, seconds - each * weight)
                numbers = seconds, in_kernels if self._device is not None else min(in_kernels, seconds), kernels
                lines.append(Line(*where[:4], *(number / self.count for number in numbers)))
        return sorted(lines, key=lambda line: PHASES.index(line.phase))
