"""Where the time of a step goes: a table of one screen, and what to do about its largest part."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._torch import original, replaced
from hfta_func._tree import leaves, num_models, tree_map
from hfta_func._types import check_counts, text_table
from hfta_func.errors import BatchError
from hfta_func.rules import _choice
from hfta_func.run.memory import profiler
from hfta_func.run.recording import ITERATION, STEP, Line, Timeline, iterations_of, mark, marking, of_device
from hfta_func.step import replay
from hfta_func.step.chunks import now
from hfta_func.step.state import TrainState

_ROWS = 24
"""Lines of a table that are shown; the others are one."""
_QUIET = 0.3
"""The share of steps that count."""
_WARM, _PATIENCE = 3, 30.0
"""Steps before the first recorded one, and seconds to wait for a step that may be replayed later."""
_ROUNDS, _SECONDS, _MOST = 5, 0.2, 50
"""Rounds of steps as they are and of recorded ones, and about how long and how many steps each of both lasts."""


class Profile(NamedTuple):
    """Where the time of a step goes; printing it shows a table and what to do about the largest part.

    Args:
        kind: How the step ran: ``"eager"``, ``"replayed"`` or ``"compiled"``.
        num_models: Number of members.
        lines: The parts of a step, in its order; their seconds add up to :attr:`seconds`.
        unprofiled: Seconds of a step that was not profiled.
        profiled: Seconds of a profiled step, with what profiling costs.
        advice: What to do about the largest part.
    """

    kind: str
    num_models: int
    lines: list[Line]
    unprofiled: float
    profiled: float
    advice: str

    @property
    def seconds(self) -> float:
        """Seconds of a step: the sum of the lines."""
        return sum(line.seconds for line in self.lines)

    @property
    def bias(self) -> float:
        """By what share :attr:`seconds` is off from the unprofiled step: what lines that cost less than recording leave."""
        return self.seconds / self.unprofiled - 1

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order of a step."""
        sums: dict[str, float] = defaultdict(float)
        for line in self.lines:
            sums[line.phase] += line.seconds
        return dict(sums)

    def __str__(self) -> str:
        head = f"{self.num_models} models, {self.kind}: {1e3 * self.seconds:.3f} ms a step"
        times = f"profiled {1e3 * self.profiled:.3f} ms, unprofiled {1e3 * self.unprofiled:.3f} ms"
        return f"{head}\n{self._table()}\n{times}: remaining bias {self.bias:+.1%}\n{self.advice}"

    def _table(self) -> str:
        rows = [("phase", "module", "operator", "lowering", "ms", "%", "ms in kernels", "kernels")]
        kept = sorted(self.lines, key=lambda line: -line.seconds)[:_ROWS]
        rows += [self._row(line) for line in self.lines if line in kept]
        if rest := [line for line in self.lines if line not in kept]:
            rows.append(self._row(_total(f"{len(rest)} others", rest)))
        rows.append(self._row(_total("sum", self.lines)))
        return text_table(rows, "<<<<>>>>")

    def _row(self, line: Line) -> tuple[str, ...]:
        share = 100 * line.seconds / self.seconds
        numbers = f"{1e3 * line.seconds:.3f}", f"{share:.1f}", f"{1e3 * line.in_kernels:.3f}", f"{line.kernels:.0f}"
        return (*line[:4], *numbers)


def profile(step: Callable[..., Any], state: TrainState, batch: Any, *, steps: int | None = None) -> Profile:
    """Find out where the time of a step goes: by phase, module, operator and lowering.

    Steps are recorded by turns with steps as they are. The difference is what recording costs, and is taken off the lines by
    the events that each has. While a step is recorded, its phases and modules are wrapped in markers; at other times there is
    nothing in its way. A replayed step has a line for each kind of operator, without modules; a compiled one shows the
    operators that its graph calls, and the rest as one line.

    Args:
        step: A training step: as :func:`make_train_step` made it, compiled, or what :func:`compile` returned. One made with
            ``replay=True`` is called until it is replayed, at most for half a minute.
        state: A state, which is not written.
        batch: A batch, or a loader, whose time is then the phase ``"data"``. It is gone through as often as needed; an
            :class:`ArrayLoader` is then where it was.
        steps: How many steps are recorded; by default as many as take about a second.

    Returns:
        A :class:`Profile`, which prints as a table.

    Raises:
        BatchError: if a loader has no batch left.
        ValueError: if ``step`` evaluates, or ``steps`` is less than 1.
        Exception: what the step raises.

    Example:
        >>> factory = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> step = make_train_step(factory(), lambda model, batch: model(batch).square().mean(), sgd(lr=0.1))
        >>> state = step.init(*init_params(factory, seeds=[0, 1]), seeds=[0, 1])
        >>> result = profile(step, state, torch.randn(2, 8, 4), steps=5)
        >>> [line.lowering for line in result.lines if line.phase == "forward" and line.operator == "linear"]
        ['folded', 'folded']
    """
    check_counts(steps=1 if steps is None else steps)
    # A copy, because a step with donate=True writes the state.
    given, state = state, tree_map(torch.clone, state)
    device, begin, plain, sessions, kind = leaves(state)[0].device, time.perf_counter(), list[float](), list[Any](), ""

    def seconds() -> float:
        """How long the next step takes, its batch included."""
        nonlocal state
        start = now(device)
        state, _ = step(state, next(batches))
        return now(device) - start

    with contextlib.closing(_batches(batch)) as batches:
        first = next(batches)
        state, _ = step(state, first)
        took = [seconds() for _ in range(1, _WARM)][-1]
        # Until the step runs as it will.
        while "has not paid" in getattr(step, "status", "") and time.perf_counter() - begin < _PATIENCE:
            took = seconds()
        number = max(2, min(_MOST, math.ceil(_SECONDS / max(took, 1e-6))))
        number = number if steps is None else math.ceil(steps / _ROUNDS)
        for _ in range(_ROUNDS):
            plain += [seconds() for _ in range(number)]
            kind = getattr(step, "status", "eager" if original(step) is step else "compiled").partition(":")[0]
            # A record made now would hold the markers.
            with replaced(replay, "_STEPS", math.inf), marking(kind), profiler(device) as recorded:
                # One more, because the first one after the start is slow.
                for _ in range(number + 1):
                    with mark(ITERATION):
                        rows = next(batches)
                        with mark(STEP):
                            state, _ = step(state, rows)
            sessions.append(recorded.kineto_results.events())
    return _summed_up(original(step), given, first, kind, plain, sessions)


def _batches(batch: Any) -> Generator[Any]:
    """A batch again and again, or all of a loader, which has its position back at the end."""
    if not isinstance(batch, Iterable) or all(isinstance(part, Tensor) for part in leaves(batch)):
        yield from itertools.repeat(batch)
    loader: Any = batch
    position = loader.state_dict() if hasattr(loader, "load_state_dict") else None
    try:
        for epoch in itertools.count():
            rows = None
            for rows in loader:
                yield rows
            if rows is None:
                raise BatchError(f"the loader has no batch in epoch {epoch}; pass one that can be gone through again")
    finally:
        if position is not None:
            loader.load_state_dict(position)


def _summed_up(step: Any, state: Any, batch: Any, kind: str, plain: list[float], sessions: list[Any]) -> Profile:
    """The profile of steps, by their seconds when they were not recorded and by the events when they were."""
    iterations = [span for events in sessions for span in iterations_of(events)[1:]]
    # As it runs eagerly: a record has no rules.
    with replaced(replay.Replay, "__call__", lambda replay, state, batch, *_: replay._step.eagerly(state, batch)):
        choices = _choice.explain(step, tree_map(torch.clone, state), batch)
    lowerings, reasons = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
    for choice in choices:
        key = choice.module, choice.op.partition(".")[0]
        known = lowerings.get(key, choice.lowering)
        lowerings[key] = known if choice.lowering in known.split("/") else f"{known}/{choice.lowering}"
        reasons[key] = choice.reason
    on_gpu = leaves(state)[0].device.type == "cuda"
    timeline = Timeline(lowerings, of_device(itertools.chain.from_iterable(sessions)) if on_gpu else None)
    chosen, plain = _quickest(iterations, lambda span: span.seconds), _quickest(plain, lambda each: each)
    for iteration in chosen:
        timeline.add(iteration)
    unprofiled, profiled = statistics.mean(plain), statistics.mean(span.seconds for span in chosen)
    lines = timeline.table(len(chosen), unprofiled, profiled)
    advice = _advice(kind, lines, reasons)
    return Profile(kind, num_models(state), lines, unprofiled, profiled, advice)


def _quickest(steps: list[Any], seconds: Callable[[Any], float]) -> list[Any]:
    """The quickest steps: the others were disturbed."""
    return sorted(steps, key=seconds)[: max(1, round(_QUIET * len(steps)))]


def _advice(kind: str, lines: list[Line], reasons: dict[tuple[str, str], str]) -> str:
    """What to do about the largest part: a phase that is no computation, Python as a whole, or the kernels of a line."""
    parts: dict[Any, float] = defaultdict(float)
    for line in lines:
        if line.phase in _CURES:
            parts[line.phase] += line.seconds
        else:
            parts[kind] += line.seconds - line.in_kernels
            parts[line] += line.in_kernels
    largest = max(parts, key=parts.__getitem__)
    share = f"takes {parts[largest] / sum(line.seconds for line in lines):.0%}"
    if isinstance(largest, str):
        return f"{'Python' if largest == kind else largest} {share}: {_CURES[largest]}"
    module = f" of module '{largest.module}'" if largest.module else ""
    kernels = "no rule" if "no batching rule" in reasons.get((largest.module, largest.operator), "") else "kernels"
    return f"{largest.operator or largest.phase}{module} ({largest.phase}) {share}: {_CURES[kernels]}"


_CURES = {
    "eager": "make_train_step(replay=True) and fit run recorded operators instead, hfta_func.compile a graph; or more models",
    "replayed": "hfta_func.compile(step) or fit(compile=True) goes on with a graph if that is faster; more models share it",
    "compiled": "step.many takes several steps in a call, and more models share it",
    "data": "keep the data on the device in an ArrayLoader, or load it by processes, DatasetLoader(num_workers=2)",
    "update": "make the step with donate=True, which writes in place, or compile it",
    "no rule": "it has no batching rule and runs one member after another; write one, hfta_func.rules.register",
    "kernels": "its kernels are the limit; autocast=torch.bfloat16 makes them shorter, compiling fuses small ones",
    "idle": "the device is the limit: see the kernels in the table; autocast=torch.bfloat16 makes them shorter",
}
"""What to do about Python, by how the step ran; about phases that one cure is for; and kernels, with no rule or with one."""


def _total(name: str, lines: list[Line]) -> Line:
    seconds, in_kernels, kernels = map(sum, zip(*(line[4:] for line in lines), strict=True))
    return Line(name, "", "", "", seconds, in_kernels, kernels)
