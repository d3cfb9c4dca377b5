"""Records of a training step: the operators of a call on tapes, and what they rest on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from hfta_func._torch import (
    NotReplayableError,
    Reads,
    Recorder,
    Tape,
    can_look,
    function_modes,
    is_tracer_loaded,
    likeness,
)
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.models.sizes import PRESENT, SIZE
from hfta_func.rules import _choice
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.state import TrainState

Result: TypeAlias = Any
"""The next state and the metrics."""

Decision: TypeAlias = Any
"""The tensors of :class:`StepOutputs`, and a :class:`Verdict`."""


_FIRST = 3
"""Calls before the first capture: the model is known, and chunk sizes are chosen."""
_IMPORTS, _TRACING, _STEPS = 1.2, 0.15, 6
"""What a capture costs: seconds for the compiler's modules, seconds to trace the user's functions, and steps."""
_SAVED, _PYTHON = 0.3, 0.05
"""The least share of a step that a replay is expected to save, of at most so many seconds: what takes longer are kernels."""
_SAVED_OF_SMALL, _SMALL = 0.7, 0.002
"""The same for small steps, of which most is Python, in seconds."""
_TAPES, MOST_SHAPES = 3, 8
"""Most tapes of a shape of batch, one for each set of Python values, and most shapes: more would cost more than they save."""


def decided(step: Any, state: TrainState, batch: Tree) -> Decision:
    """What a step decides, in tensors without names."""
    outputs, verdict = step.decide(state, batch)
    return outputs[:-1], verdict


def written(step: Any, state: TrainState, decision: Decision) -> Result:
    """What a step writes then."""
    parts, verdict = decision
    # Where values can be looked at, the record is for steps that update all members.
    verdict = verdict._replace(keep=None) if can_look(state.keys) else verdict
    return step.finish(state, StepOutputs(*parts), verdict, looks=False)


def recorded(
    call: Callable[..., Any], *arguments: Tree, compiling: bool = False, fixed: Sequence[Tensor] = ()
) -> tuple[Tape, Any]:
    """The tape of a call, for calls in which the ``fixed`` arguments have the same values, and what it returned."""
    numbers = [number for number, leaf in enumerate(leaves(arguments)) if any(leaf is one for one in fixed)]
    # A tensor that stands in two places now may be two in the next call.
    inputs, layout = optree.tree_flatten(tree_map(Tensor.detach, arguments))
    recorder = Recorder(inputs, compiling, numbers)
    try:
        with recorder:
            results = call(*optree.tree_unflatten(layout, inputs))
    except Exception as error:
        raise NotReplayableError(recorder.why_not or f"recording it raises {type(error).__name__}") from error
    return Tape(recorder, len(inputs), optree.tree_leaves(results)), results


class Record:
    """Two tapes, for what a step decides and for what it writes then, and what they rest on."""

    def __init__(self, first: Tape, reads: Reads, state: TrainState, decision: Decision):
        self.reads, self.is_checked, self.uses = reads, False, 0
        self._first = first
        self._decision: Any = optree.tree_structure(decision)
        self._result: Any = None
        self._width, self._keep = len(leaves(state)), len(leaves(decision[0]))
        self._second: Tape | None = None

    def __len__(self) -> int:
        return len(self._first) + (0 if self._second is None else len(self._second))

    @functools.cached_property
    def status(self) -> str:
        """How a call runs."""
        return f"replayed: {len(self)} operators"

    def finish_by(self, second: Tape, result: Result, looks: bool) -> None:
        """Use a tape for what is written, which is right only if all members are updated if the step ``looks`` at that."""
        self._second, self._result, self._looks = second, optree.tree_structure(result), looks

    def __call__(self, inputs: list[Tensor], state: TrainState, batch: Tree, step: Any) -> Result:
        """What the step returns."""
        self.uses += 1
        trial = step.oracle(state.keys)
        decision = self._first(inputs)
        second = self._second
        if trial is not None:
            step._gradients.compare(trial, state, batch, StepOutputs(*self._decision.unflatten(decision)[0]))
        if second is None or (self._looks and not decision[self._keep].all()):
            parts, verdict = self._decision.unflatten(decision)
            return step.finish(state, StepOutputs(*parts), verdict)
        return self._result.unflatten(second([*inputs[: self._width], *decision]))

    def is_right(self, step: Any, state: TrainState, batch: Tree) -> bool:
        """Whether the tapes give what the step gives."""
        decision = decided(step, state, batch)
        inputs, decides = leaves((state, batch)), leaves(decision)
        if not all(map(_same_bits, decides, self._first.rehearse(inputs))):
            return False
        if self._second is not None:
            expected = leaves(written(step, state, decision))
            if not all(map(_same_bits, expected, self._second.rehearse([*leaves(state), *decides]))):
                self._second = None
        return True


class Records:
    """The tapes for batches of one shape, and whether to record another."""

    def __init__(self, settings: tuple[Any, ...]) -> None:
        self.settings = settings
        self._is_like: Callable[..., bool] | None = None
        self.tapes: list[Record] = []
        self.why_not: str | None = None
        self._calls, self._least, self._uses = 0, float("inf"), 0

    def known(self, inputs: Sequence[Tensor]) -> Record | None:
        """The tape that is right for the Python values of now."""
        self._is_like = self._is_like or likeness(inputs)
        return next((one for one in self.tapes if one.reads.hold()), None)

    def known_again(self, inputs: Sequence[Tensor]) -> Record | None:
        """The same if it is used already, and these inputs and what is around the call are like those before."""
        if torch.is_anomaly_enabled() or _choice.is_explaining() or function_modes():
            return None
        known = self.known(inputs) if self._is_like is not None and self._is_like(*inputs) else None
        return known if known is not None and known.is_checked else None

    def note(self, seconds: float) -> None:
        """Note how long an ordinary call has taken."""
        self._calls, self._least = self._calls + 1, min(self._least, seconds)

    @property
    def is_timed(self) -> bool:
        """Whether it is known how long a call takes, of what can be recorded."""
        return self.why_not is None and self._calls >= _FIRST

    def is_worth_it(self, left: int | None) -> bool:
        """Whether a tape is expected to save more than it costs: over the calls that are left, or as many as there were."""
        if not self.is_timed:
            return False
        cost = _TRACING + _STEPS * self._least + (0.0 if is_tracer_loaded() else _IMPORTS)
        python = min(self._least, _PYTHON)
        if left is None:
            return self._calls * python >= cost
        # Python values that have changed are expected to change again after as many calls.
        saved = max(_SAVED * python, _SAVED_OF_SMALL * min(self._least, _SMALL))
        return min([left, *[self._uses for _ in self.tapes[:1]]]) * saved >= cost

    def add(self, known: Record) -> None:
        """Keep a tape, instead of the oldest one if there are many."""
        self._uses = self.tapes[-1].uses if self.tapes else 0
        self.tapes = [*self.tapes[1 - _TAPES :], known]
        self._calls = 0

    def refuse(self, why: str) -> None:
        """Record no more, and use no record."""
        self.why_not, self.tapes = why, []


def member_sizes(state: TrainState) -> list[Tensor]:
    """What tells the sizes of the members of a padded model, where reading it costs nothing."""
    if state.keys.device.type != "cpu":
        return []
    return [leaf for path, leaf in state.buffers.items() if path.rpartition(".")[2] in (SIZE, PRESENT)]


def kind_of(leaf: Tensor) -> tuple[Any, ...]:
    """What a graph of operators rests on about a tensor."""
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))
