"""Steps without the Python that computes them: the operators of one step, replayed on the next ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

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
    inside_transform,
    is_autocasting,
    is_tracer_loaded,
    likeness,
    num_dispatch_modes,
)
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.models.stack import members_of
from hfta_func.optim._base import is_of_package
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.batch import copied, is_plain, over
from hfta_func.step.gradients import StepOutputs, autocasting
from hfta_func.step.state import TrainState, stacked

Result: TypeAlias = Any
"""The next state and the metrics."""

Decision: TypeAlias = Any
"""The tensors of :class:`StepOutputs`, and a :class:`Verdict`."""


_FIRST = 3
"""Calls before the first capture: the model is known, and chunk sizes are chosen."""
_IMPORTS, _TRACING, _STEPS = 2.0, 0.4, 6
"""What a capture costs: seconds for the compiler's modules, seconds to trace the user's functions, and steps."""
_SAVED, _PYTHON = 0.3, 0.05
"""The least share of a step that a replay is expected to save, of at most so many seconds: what takes longer are kernels."""
_TAPES, _SHAPES = 3, 8
"""Most tapes of a shape of batch, one for each set of Python values, and most shapes: more would cost more than they save."""


class Replay:
    """``replay(state, batch)``: what ``step.eagerly`` returns, to the bit.

    Once it pays, the operators of one call are recorded, and later calls run these. A record is used only while every Python
    value that the user's functions have read is as it was, and not before it has given the bits of the step itself on another
    batch. What cannot be replayed keeps running as it is.

    Args:
        step: The training step.

    Attributes:
        left: How many calls are left, if that is known.
    """

    def __init__(self, step: Any):
        self._step = step
        self.left: int | None = None
        self.status = "eager: not called yet"
        self._shapes: dict[Any, _Shape] = {}
        self._latest: _Shape | None = None
        # One thread records at a time; others go on eagerly.
        self._recording = threading.Lock()

    def __call__(self, state: TrainState, batch: Tree) -> Result:
        """The next state and the metrics."""
        why_not = why_not_now(self._step, state, batch)
        if why_not is not None:
            self.status = f"eager: {why_not}"
            return self._step.eagerly(state, batch)
        if self.left is not None:
            self.left -= 1
        inputs, layout = optree.tree_flatten(cast(Any, (state, batch)))
        settings = layout, _choice.state, *OUTSIDE.values()
        shape, known = self._in_context(state, lambda: self._known(settings, inputs))
        if shape is None:
            self.status = f"eager: the batches have more than {_SHAPES} shapes"
            return self._step.eagerly(state, batch)
        if known is not None and known.is_checked:
            self.status = f"replayed: {len(known)} operators"
            return known(inputs, state, self._step)
        self.status = f"eager: {shape.why_not or 'a record has not paid yet'}"
        if not self._recording.acquire(blocking=False):
            return self._step.eagerly(state, batch)
        try:
            if known is not None:
                self._check(shape, known, state, batch)
            elif shape.is_worth_it(self.left):
                decision = self._record(shape, state, batch)
                if decision is not None:
                    return self._step.finish(state, *decision)
            elif shape.is_timed and self.left is not None:
                self.status = "eager: a record does not pay for the calls that are left"
            start = time.perf_counter()
            result = self._step.eagerly(state, batch)
            shape.note(time.perf_counter() - start)
            return result
        finally:
            self._recording.release()

    def _known(self, settings: tuple[Any, ...], inputs: Sequence[Tensor]) -> tuple[_Shape | None, _Known | None]:
        """What is known of inputs like these, None if there are too many shapes, and the record that is right now."""
        shape = self._latest
        if shape is None or shape.settings != settings or not shape.is_like(*inputs):
            if not all(isinstance(leaf, Tensor) for leaf in inputs):
                return None, None  # the step says what is no tensor
            key = *settings, *map(kind_of, inputs)
            shape = self._shapes.get(key)
            if shape is None:
                if len(self._shapes) == _SHAPES:
                    return None, None
                shape = self._shapes[key] = _Shape(settings, inputs)
            self._latest = shape
        return shape, next((one for one in shape.tapes if one.reads.hold()), None)

    def _in_context(self, state: TrainState, call: Callable[[], Any]) -> Any:
        """A call in the settings under which the user's functions run."""
        with torch.enable_grad(), autocasting(state.keys.device, self._step.options.autocast):
            return call()

    def _record(self, shape: _Shape, state: TrainState, batch: Tree) -> tuple[StepOutputs, Any] | None:
        """What the step decides in a call that is recorded; None if that cannot be."""
        step = self._step
        try:
            reads = self.reads(state, batch)
            first, decision = _recorded(functools.partial(_decided, step), state, batch)
            known, looks = _Known(first, reads, state, decision), can_look(state.keys)
            closed = is_of_package(step.optimizer, closed=True)
            if not step.options.donate and closed and (looks or step.options.nonfinite != "raise"):
                with contextlib.suppress(NotReplayableError):
                    known.finish_by(*_recorded(functools.partial(_written, step), state, decision), looks)
            shape.add(known)
        except Exception as error:
            # Whatever keeps a call from being recorded, it runs as it is, and raises what is the user's to see.
            shape.refuse(str(error) if isinstance(error, NotReplayableError) else type(error).__name__)
            return None
        (params, *others), verdict = decision
        # What the update starts from are the state's own tensors.
        return StepOutputs({path: state.params[path] for path in params}, *others), verdict

    def reads(self, state: TrainState, batch: Tree) -> Reads:
        """What the loss function reads; raises a NotReplayableError if it does more than compute."""
        arguments = self._member(state, batch)
        return self._in_context(state, lambda: Reads(self._step._made_from[1], arguments))

    def _member(self, state: TrainState, batch: Tree) -> tuple[Any, ...]:
        """The loss function's arguments for the first member, in tensors of their own."""
        params, buffers = ({path: leaf[:1] for path, leaf in tree.items()} for tree in stacked(state))
        model = members_of(self._step._made_from[0], params, buffers, {})[0]
        part = copied(over(lambda dim, leaf: leaf if dim is None else leaf[0], self._step.options.batch_dims, batch))
        hparams = {name: leaf[0].clone() for name, leaf in state.hparams.items()}
        return (model, part, hparams) if self._step._gradients.takes_hparams else (model, part)

    def _check(self, shape: _Shape, known: _Known, state: TrainState, batch: Tree) -> None:
        """Find out whether the record gives what the step gives for another batch."""
        try:
            # The same rows in another order: valid data, and other values.
            other = over(_turned, self._step.options.batch_dims, batch)
            known.is_checked = known.is_right(self._step, state, other)
            why_not = "gives other values than the functions, which read what cannot be seen"
        except Exception as error:
            why_not = f"cannot run: {type(error).__name__}"
        if not known.is_checked:
            shape.refuse(f"its record {why_not}")


def why_not_now(step: Any, state: Any, batch: Tree) -> str | None:
    """Why this call cannot be replayed, whatever the functions do."""
    if type(state) is not TrainState or torch.is_inference_mode_enabled():
        return "the step refuses it"
    if torch.compiler.is_compiling() or inside_transform():
        return "it is part of another computation"
    if (
        num_dispatch_modes()
        or function_modes()
        or is_autocasting()
        or torch.is_anomaly_enabled()
        or _choice.is_explaining()
    ):
        return "a context around the step observes or changes operators"
    if state.keys.device.type == "xla":
        return "XLA records operators itself"
    if state.shared or step._gradients.rewrites_params:
        return "members share trained parameters, or the model writes its own"
    if not is_plain(batch):
        return "the batch is a container of its own class"
    return None


def require_pure(step: Any, state: TrainState, batch: Tree) -> None:
    """Raise a NotReplayableError if the step's functions do more than compute from what they can reach."""
    Replay(step).reads(state, batch)


def recorded_whole(step: Any, state: TrainState, batch: Tree) -> tuple[Tape, Any]:
    """The tape of a step as compilers see it, and the layout of its results: not in place, and without a look at values."""
    if step.options.donate:
        step = type(step)(*step._made_from[:3], dataclasses.replace(step.options, donate=False))
    with torch.no_grad():
        # The first call learns what the model does.
        step.eagerly(state, batch)
        tape, result = _recorded(functools.partial(_at_once, step), state, batch, compiling=True)
    return tape, optree.tree_structure(result)


def _decided(step: Any, state: TrainState, batch: Tree) -> Decision:
    outputs, verdict = step.decide(state, batch)
    return outputs[:-1], verdict


def _written(step: Any, state: TrainState, decision: Decision) -> Result:
    parts, verdict = decision
    # Where values can be looked at, the record is for steps that update all members.
    verdict = verdict._replace(keep=None) if can_look(state.keys) else verdict
    return step.finish(state, StepOutputs(*parts), verdict, looks=False)


def _at_once(step: Any, state: TrainState, batch: Tree) -> Result:
    return step.finish(state, *step.decide(state, batch), looks=False)


def _recorded(call: Callable[..., Any], *arguments: Tree, compiling: bool = False) -> tuple[Tape, Any]:
    """The tape of a call, and what it returned."""
    # A tensor that stands in two places now may be two in the next call.
    inputs, layout = optree.tree_flatten(tree_map(Tensor.detach, arguments))
    recorder = Recorder(inputs, compiling)
    try:
        with recorder:
            results = call(*optree.tree_unflatten(layout, inputs))
    except Exception as error:
        raise NotReplayableError(recorder.why_not or f"recording it raises {type(error).__name__}") from error
    return Tape(recorder, len(inputs), optree.tree_leaves(results)), results


class _Known:
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

    def finish_by(self, second: Tape, result: Result, looks: bool) -> None:
        """Use a tape for what is written, which is right only if all members are updated if the step ``looks`` at that."""
        self._second, self._result, self._looks = second, optree.tree_structure(result), looks

    def __call__(self, inputs: list[Tensor], state: TrainState, step: Any) -> Result:
        self.uses += 1
        decision = self._first(inputs)
        second = self._second
        if second is None or (self._looks and not decision[self._keep].all()):
            parts, verdict = self._decision.unflatten(decision)
            return step.finish(state, StepOutputs(*parts), verdict)
        return self._result.unflatten(second([*inputs[: self._width], *decision]))

    def is_right(self, step: Any, state: TrainState, batch: Tree) -> bool:
        """Whether the tapes give what the step gives."""
        decision = _decided(step, state, batch)
        inputs, decided = leaves((state, batch)), leaves(decision)
        if not all(map(_same_bits, decided, self._first.rehearse(inputs))):
            return False
        if self._second is not None:
            expected = leaves(_written(step, state, decision))
            if not all(map(_same_bits, expected, self._second.rehearse([*leaves(state), *decided]))):
                self._second = None
        return True


class _Shape:
    """The tapes for batches of one shape, and whether to record another."""

    def __init__(self, settings: tuple[Any, ...], inputs: Sequence[Tensor]) -> None:
        self.settings, self.is_like = settings, likeness(inputs)
        self.tapes: list[_Known] = []
        self.why_not: str | None = None
        self._calls, self._least, self._uses = 0, float("inf"), 0

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
        return min([left, *[self._uses for _ in self.tapes[:1]]]) * python * _SAVED >= cost

    def add(self, known: _Known) -> None:
        """Keep a tape, instead of the oldest one if there are many."""
        self._uses = self.tapes[-1].uses if self.tapes else 0
        self.tapes = [*self.tapes[1 - _TAPES :], known]
        self._calls = 0

    def refuse(self, why: str) -> None:
        """Record no more, and use no record."""
        self.why_not, self.tapes = why, []


def kind_of(leaf: Tensor) -> tuple[Any, ...]:
    """What a graph of operators rests on about a tensor."""
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)


def _turned(dim: int | None, leaf: Tensor) -> Tensor:
    axis = 0 if dim is None else 1
    return leaf.flip(axis) if isinstance(leaf, Tensor) and leaf.dim() > axis else leaf


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))
