"""Markers of phases and modules, and recorded events summed up by phase, module, operator and lowering."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hfta_func import random
from hfta_func._kernels import noise
from hfta_func._torch import marker, replaced
from hfta_func.calls.body import Body, path_in
from hfta_func.step import replay, train
from hfta_func.step.commit import Commit
from hfta_func.step.gradients import Gradients

_MOST_EACH = 3e-6
"""Seconds that recording an event costs at most: what is more is other work on the machine."""
MARK = "hfta_func/"
"""Names of markers begin with it: ``hfta_func/<phase>`` and, of modules, ``hfta_func/module:<path>``."""
ITERATION, STEP, GRADIENTS, BODY, MODULE = "iteration", "step", "gradients", "body", "module:"
PHASES = (
    *("data", "check", "entering vmap", "forward", "loss", "noise", "backward", "replayed", "judge"),
    *("update", "commit", "Python", "step", "graph", "idle"),
)
"""The phases of a line, in the order of a step."""
_NAMED = {"forward", "loss", "backward", "replayed", "step", "graph"}
"""Phases whose operators have lines of their own."""
_FUSED = "fused by the compiler"
_CHEAP = re.compile(
    r"(as_strided_?|resize_|empty\w*|expand|resolve_\w+|detach_?|view|_?reshape\w*|_unsafe_view|t|transpose|permute|movedim|"
    r"unsqueeze|squeeze|select|slice|alias|lift_fresh|fill_|zero_|copy_|to|_to_copy|clone|contiguous|unbind|narrow)\Z"
)
"""Operators that allocate, view or copy: a kernel may call these, and they are none themselves unless they copy."""
_COPIES = {"fill_", "zero_", "copy_", "cat"}


class Line(NamedTuple):
    """A line of a profile, the mean of a step; without numbers, what an event belongs to."""

    phase: str
    module: str = ""  # its path; empty outside of modules and where several share a line
    operator: str = ""  # named as in rules.explain; empty for "Python" and the like
    lowering: str = ""  # empty if PyTorch batches the operator itself
    seconds: float = 0.0  # of this process, without what profiling costs
    in_kernels: float = 0.0  # seconds in kernels: of these, or on a GPU of the device
    kernels: float = 0.0  # number of kernels, on a GPU of launches


def mark(name: str) -> Any:
    """A block that a profiler records under a name."""
    return marker(MARK + name)


def _marked(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mark(name):
            return func(*args, **kwargs)

    return call


@contextlib.contextmanager
def _marking_modules() -> Iterator[None]:
    paths: dict[nn.Module, str] = {}
    open_marks: list[Any] = []
    forward = Body.forward

    def run(body: Body, *args: Any, **kwargs: Any) -> Any:
        if body not in paths:
            paths.update({child: MODULE + path_in(body, child) for child in body.modules()})
        with mark(BODY):
            return forward(body, *args, **kwargs)

    def enter(module: nn.Module, _: Any) -> None:
        open_marks.append(mark(paths.get(module, f"{MODULE}{type(module).__name__}")))
        open_marks[-1].__enter__()

    def leave(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    with hooks[0], hooks[1], replaced(Body, "forward", run):
        yield


@contextlib.contextmanager
def marking(kind: str) -> Iterator[None]:
    """A block in which steps mark their phases, and models their modules; compiled steps have none, replayed no modules."""
    places = [(random, name, "noise") for name in ("fold_in", "stream", "streams", "bits", "bernoulli")]
    places += [(noise, "drop", "noise")]
    places += [(train, "judge", "judge"), (train, "check", "check"), (Commit, "renewed_shared", "update")]
    places += [(Gradients, "__call__", GRADIENTS), (replay.Replay, "__call__", "replayed")]
    places += [(Commit, "renewed", "update"), (Commit, "__call__", "commit")]
    with contextlib.ExitStack() as stack:
        for owner, name, phase in places if kind != "compiled" else ():
            stack.enter_context(replaced(owner, name, _marked(phase, getattr(owner, name))))
        if kind == "eager":
            stack.enter_context(_marking_modules())
        yield


class Span:
    """An event and the events inside it."""

    def __init__(self, event: Any):
        self.name, self.start, self.sequence = str(event.name()), event.start_ns(), event.sequence_nr()
        self.end, self.id = self.start + event.duration_ns(), event.correlation_id()
        self.seconds = event.duration_ns() / 1e9
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

    @property
    def is_kernel(self) -> bool:
        """Whether it is an operator that calls none but those that allocate, view or copy."""
        if not self.is_operator or self.operator in _COPIES:
            return self.is_operator
        return not _CHEAP.match(self.operator) and all(_CHEAP.match(span.operator) for span in [*self][1:])


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
    """Self time by line, over iterations: every moment belongs to one line, so lines add up.

    Args:
        lowerings: How operators run, by module and operator.
        device: Seconds and launches of a GPU by the number of the event that launched them; None on a CPU.
    """

    def __init__(self, lowerings: Mapping[tuple[str, str], str], device: Mapping[int, tuple[float, int]] | None = None):
        self._lowerings, self._device = lowerings, device
        # Seconds, seconds in kernels, kernels, and the number of events whose recording the seconds include.
        self._lines: defaultdict[Line, list[float]] = defaultdict(lambda: [0.0] * 4)
        self._origins: dict[int, Line] = {}

    def add(self, span: Span, where: Line = Line("data")) -> None:  # noqa: B008
        """Add an iteration, or a span inside that belongs ``where``."""
        is_python = span.mark is not None and (span.mark.startswith((MODULE, BODY)) or where.phase == "replayed")
        line = self._lines[Line("Python") if is_python else where]
        seconds = max(0.0, span.seconds - sum(inner.seconds for inner in span.inside))
        line[0] += seconds
        line[3] += len(span.inside)
        if self._device is not None:
            in_kernels, launches = self._device.get(span.id, (0.0, 0))
        else:
            in_kernels, launches = seconds * (span.is_kernel or where.phase == "graph"), span.is_kernel
        line[1] += in_kernels
        line[2] += launches
        for inner in span.inside:
            self.add(inner, self._where(inner, where))

    def _where(self, span: Span, around: Line) -> Line:
        """Where a span belongs that is inside one that belongs ``around``."""
        if span.mark is not None:
            return self._marked(span.mark, around)
        if "Synchronize" in span.name:
            return Line("idle")
        if span.name.startswith(("Torch-Compiled Region", "TorchDynamo Cache", "Pregraph", "AOTDispatcher")):
            return Line("Python")
        if span.name.startswith("## Call CompiledFxGraph"):
            return Line("graph", operator=_FUSED)
        if span.is_node:
            origin = self._origins.get(span.sequence, Line("backward", operator="autograd"))
            return self._chosen(origin._replace(phase="backward"))
        where = Line("step") if around.phase == "Python" else around
        if where.phase in _NAMED and where.operator in ("", _FUSED):
            known = (inner.operator for inner in span if (where.module, inner.operator) in self._lowerings)
            where = self._chosen(where._replace(operator=next(known, span.operator)))
        if span.sequence >= 0 and where.phase in ("forward", "loss", "noise"):
            # Of events with the same number, the last one to begin makes the node of the backward pass.
            self._origins[span.sequence] = where
        return where

    def _marked(self, mark: str, around: Line) -> Line:
        if around.phase == "noise":
            return around
        if mark.startswith(MODULE):
            # Rematerialised modules run again in the backward pass.
            return Line("backward" if around.phase == "backward" else "forward", mark.removeprefix(MODULE))
        known = {STEP: "Python", BODY: "loss", GRADIENTS: "entering vmap"}
        return Line(known.get(mark, mark))

    def _chosen(self, where: Line) -> Line:
        """With the lowering; the gradients of a convolution have their own."""
        parts = ("_input_grad", "_weight_grad") if where.phase == "backward" else ()
        names = [self._lowerings.get((where.module, where.operator + part), "") for part in parts]
        whole = self._lowerings.get((where.module, where.operator), "")
        return where._replace(lowering="/".join(dict.fromkeys(filter(None, names))) or whole)

    def table(self, count: int, unprofiled: float, profiled: float) -> list[Line]:
        """The lines of one of so many iterations, without what recording costs: the difference, by the events recorded."""
        events = sum(line[3] for line in self._lines.values())
        each = min(_MOST_EACH, max(0.0, profiled - unprofiled) * count / max(events, 1))
        lines = []
        for where, (seconds, in_kernels, kernels, inside) in self._lines.items():
            if seconds or kernels:
                seconds = max(0.0, seconds - each * inside)
                numbers = seconds, in_kernels if self._device is not None else min(in_kernels, seconds), kernels
                lines.append(Line(*where[:4], *(number / count for number in numbers)))
        return sorted(lines, key=lambda line: PHASES.index(line.phase))
