"""What recorded events belong to: phase, module, operator and lowering. Every moment belongs to one line, so lines add up."""

from __future__ import annotations

import bisect
import functools
import re
import statistics
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
_NODE = "autograd::engine::evaluate_function: "
_CHEAP = re.compile(
    r"(as_strided_?|resize_|empty\w*|expand|resolve_\w+|detach_?|view|_?reshape\w*|_unsafe_view|t|transpose|permute|movedim|"
    r"unsqueeze|squeeze|select|slice|alias|lift_fresh|fill_|zero_|copy_|to|_to_copy|clone|contiguous|unbind|narrow)\Z"
)
"""Operators that allocate, view or copy: a kernel may call these, and they are none themselves unless they copy."""
_COPIES = {"fill_", "zero_", "copy_", "cat"}


class Line(NamedTuple):
    """A line of a profile, the mean of a step; without numbers, what a moment belongs to."""

    phase: str
    module: str = ""  # its path; empty outside of modules and where several share a line
    operator: str = ""  # named as in rules.explain; empty for "Python" and the like
    lowering: str = ""  # empty if PyTorch batches the operator itself
    seconds: float = 0.0  # of this process, without what profiling costs
    in_kernels: float = 0.0  # seconds in kernels: of these, or on a GPU of the device
    kernels: float = 0.0  # number of kernels, on a GPU of launches


_ENTERING = Line("entering vmap")
_RECORDED = {"entering vmap", "forward", "loss", "noise", "backward", "judge", "update", "commit"}
"""Phases of operators that may be replayed."""
_NONE = [0.0, 0.0, 0.0]
_AUTOGRAD = Line("backward", operator="autograd")
"""What the backward pass does besides the nodes that operators have made."""


class Span:
    """An event and the events inside it."""

    def __init__(self, event: Any):
        self.name, self.start, self.sequence = str(event.name()), event.start_ns(), event.sequence_nr()
        self.end, self.id = self.start + event.duration_ns(), event.correlation_id()
        self.event, self.is_node = event, self.name.startswith(_NODE)
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
        if "::" not in self.name or self.is_node or self.event.scope() != 0:
            return False
        if self.operator in _COPIES:
            return True
        return not _CHEAP.match(self.operator) and all(_CHEAP.match(span.operator) for span in list(self)[1:])


def spans(events: Iterable[Any]) -> list[Span]:
    """The outermost events of this process, of which others are inside, on whatever thread: one waits for the other."""
    outermost: list[Span] = []
    around: list[Span] = []
    # An event of no length may begin with the one that it is inside.
    for span in sorted(map(Span, events), key=lambda span: (span.start, -span.end)):
        while around and around[-1].end <= span.start:
            around.pop()
        (around[-1].inside if around else outermost).append(span)
        around.append(span)
    return outermost


def _is_matched(span: Span) -> bool:
    """Whether an operator of a record is looked up: no marker, view or copy."""
    return "::" in span.name and not span.is_node and not _CHEAP.match(span.operator)


def _aligned(names: list[str], others: list[str]) -> dict[int, int]:
    """The longest common subsequence of two lists (Hunt and Szymanski, 1977): numbers in the second by those in the first."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for number in reversed(range(len(others))):
        numbers[others[number]].append(number)
    # For each length of a common subsequence the least number that it may end at, and the pairs of that one.
    ends: list[int] = []
    pairs: list[tuple[int, int, Any]] = []
    for at, name in enumerate(names):
        for number in numbers[name]:
            length = bisect.bisect_left(ends, number)
            pair = at, number, pairs[length - 1] if length else None
            ends[length : length + 1], pairs[length : length + 1] = [number], [pair]
    aligned, last = {}, pairs[-1] if pairs else None
    while last is not None:
        aligned[last[0]], last = last[1:]
    return aligned


class Timeline:
    """Self time by line, for each of the iterations that were recorded."""

    def __init__(
        self,
        lowerings: Mapping[tuple[str, str], str],
        like: list[tuple[str, Line]] | None = None,
        device: Mapping[int, tuple[float, int]] | None = None,
    ):
        # How operators run, by module and operator; where those of the same step belong, in order, for a step that is
        # replayed without modules; seconds and launches of a GPU by the number of the event that launched them.
        self._lowerings, self._like, self._device = lowerings, like, device
        self.order: list[tuple[str, Line]] = []
        """Every operator of losses and gradients that has none of its name inside, and where it belongs."""
        self._iterations: list[defaultdict[Line, list[float]]] = []
        self.counts: dict[str, int] = {"operator": 0, "marker": 0, "module": 0}
        self._origins: dict[int, Line] = {}
        self._names: list[str] = []
        self._like_of: dict[int, int] = {}
        self._next, self._latest = 0, _ENTERING

    def add(self, iteration: Span, costs: Mapping[str, float]) -> None:
        """Add an iteration; ``costs`` are the seconds that recording an event of each kind takes."""
        self._next, self._latest, self._costs = 0, _ENTERING, costs
        self._iterations.append(defaultdict(lambda: [0.0, 0.0, 0.0]))
        if self._like is not None:
            replayed = (span for outer in iteration if outer.mark == GRADIENTS for span in outer.inside)
            names = [span.operator for span in replayed if _is_matched(span)]
            if names != self._names:
                self._names, self._like_of = names, _aligned(names, [name for name, _ in self._like])
        marks = [span for span in iteration.inside if span.mark == STEP]
        begin = marks[0].start if marks else iteration.end
        self._visit(iteration, Line("data"), until=(begin, Line("loop")))

    def _visit(self, span: Span, where: Line, until: tuple[int, Line] | None = None) -> None:
        """Add a span that belongs ``where``, and what comes after a moment to another line."""
        at, last, cost = span.start, None, 0.0
        for inner in (*span.inside, None):
            current = until[1] if until is not None and at >= until[0] else where
            # The engine goes on from one node of the backward pass to the next.
            between = last is not None and inner is not None and last.is_node and inner.is_node
            end = span.end if inner is None else inner.start
            self._put(_AUTOGRAD if between else current, (end - at) / 1e9 - cost, span)
            if inner is None:
                return
            kind = "operator" if inner.mark is None else "module" if inner.mark.startswith((MODULE, BODY)) else "marker"
            self.counts[kind] += 1
            cost, at, last = self._costs.get(kind, 0.0), inner.end, inner
            if until is not None and inner.start >= until[0]:
                current = until[1]
            self._visit(inner, self._where(inner, current, is_outermost=span.mark is not None))

    def _put(self, where: Line, seconds: float, span: Span) -> None:
        """Add self time of a span to a line."""
        is_code = span.mark is not None and span.mark.startswith((MODULE, BODY)) and where.phase in ("forward", "loss")
        if is_code or (self._like is not None and span.mark == GRADIENTS):
            where = Line("Python")
        line = self._iterations[-1][where]
        line[0] += seconds
        if self._device is None and (span.is_kernel or where.phase == "graph"):
            line[1] += seconds

    def _where(self, span: Span, around: Line, is_outermost: bool) -> Line:
        """Line a span belongs, which is inside one that belongs ``around``: a marker if it is outermost."""
        if span.mark is not None:
            return self._marked(span.mark, around)
        if "Synchronize" in span.name:
            return Line("idle")
        if span.name.startswith(("Torch-Compiled Region", "TorchDynamo Cache", "Pregraph", "AOTDispatcher")):
            return Line("Python")
        if span.name.startswith("## Call CompiledFxGraph"):
            return Line("graph", operator="fused by the compiler")
        if span.is_node:
            origin = self._origins.get(span.sequence, _AUTOGRAD)
            return self._chosen(origin._replace(phase="backward"))
        if self._like is not None and is_outermost and around == _ENTERING:
            # Of a record: to what called it when it was recorded; what is spelt otherwise there, to the one before.
            if _is_matched(span):
                if self._next in self._like_of:
                    self._latest = self._like[self._like_of[self._next]][1]
                self._next += 1
            where = self._latest
        else:
            where = self._operator(span, around)
        seconds, launches = (0.0, span.is_kernel) if self._device is None else self._device.get(span.id, (0.0, 0))
        line = self._iterations[-1][where]
        line[1] += seconds
        line[2] += launches
        if span.sequence >= 0 and where.phase in ("forward", "loss", "noise"):
            # Of events with the same number, the last one to begin makes the node of the backward pass.
            self._origins[span.sequence] = where
        if where.phase in _RECORDED and all(inner.operator != span.operator for inner in list(span)[1:]):
            self.order.append((span.operator, where))
        return where

    def _marked(self, mark: str, around: Line) -> Line:
        if mark == GRADIENTS:
            return _ENTERING
        if mark == STEP:
            return Line("Python")
        if around.phase == "noise":
            return around
        if mark == BODY:
            return Line("loss")
        if mark.startswith(MODULE):
            # Rematerialised modules run again in the backward pass.
            phase = "backward" if around.phase == "backward" else "forward"
            return Line(phase, mark.removeprefix(MODULE))
        return Line(mark)

    def _operator(self, span: Span, around: Line) -> Line:
        if around.phase == "Python":
            around = Line("step")
        if around.phase not in _NAMED or (around.operator and around.operator != "fused by the compiler"):
            return around
        known = (inner.operator for inner in span if (around.module, inner.operator) in self._lowerings)
        return self._chosen(around._replace(operator=next(known, span.operator)))

    def _chosen(self, where: Line) -> Line:
        """With the lowering; the gradients of a convolution have their own."""
        key = where.module, where.operator
        parts = [self._lowerings.get((key[0], f"{key[1]}{part}")) for part in ("_input_grad", "_weight_grad")]
        if where.phase == "backward" and any(parts):
            return where._replace(lowering="/".join(dict.fromkeys(part for part in parts if part)))
        return where._replace(lowering=self._lowerings.get(key, ""))

    def table(self) -> list[Line]:
        """The lines of an iteration: medians, as what disturbs a step falls on any line; the last one is what they leave."""
        names = dict.fromkeys(where for lines in self._iterations for where in lines)
        columns = {where: zip(*(lines.get(where, _NONE) for lines in self._iterations), strict=True) for where in names}
        lines = [Line(*where[:4], *map(statistics.median, parts)) for where, parts in columns.items()]
        lines = [line for line in lines if line.seconds or line.kernels]
        whole = sum(part[0] for one in self._iterations for part in one.values()) / len(self._iterations)
        lines.sort(key=lambda line: PHASES.index(line.phase))
        return [*lines, Line("disturbed", seconds=whole - sum(line.seconds for line in lines))]


def iterations_of(events: Iterable[Any]) -> list[Span]:
    """The iterations among events of this process and of a device."""
    return [span for span in spans(event for event in events if not _is_of_device(event)) if span.mark == ITERATION]


def _is_of_device(event: Any) -> bool:
    return event.device_type().name != "CPU"


def of_device(events: Iterable[Any]) -> tuple[dict[int, tuple[float, int]], float]:
    """Seconds and launches of a device by the event that launched them, and seconds in which any kernel ran."""
    launched: dict[int, tuple[float, int]] = {}
    busy, end = 0, 0
    kernels = [event for event in events if _is_of_device(event) and not event.is_user_annotation()]
    for event in sorted(kernels, key=lambda event: event.start_ns()):
        seconds, count = launched.get(event.linked_correlation_id(), (0.0, 0))
        launched[event.linked_correlation_id()] = seconds + event.duration_ns() / 1e9, count + 1
        start = event.start_ns()
        busy += max(0, start + event.duration_ns() - max(start, end))
        end = max(end, start + event.duration_ns())
    return launched, busy / 1e9
