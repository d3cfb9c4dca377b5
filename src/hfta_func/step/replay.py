"""Losses and gradients without the Python that computes them: the operators of one step, replayed on the next ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

from hfta_func._torch import (
    NotReplayableError,
    Reads,
    Recorder,
    Tape,
    function_modes,
    inside_transform,
    is_autocasting,
    is_tracer_loaded,
    num_dispatch_modes,
)
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.models.stack import members_of
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.batch import copied, is_plain, over
from hfta_func.step.gradients import Gradients, StepOutputs, autocasting
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, stacked

_FIRST = 3
"""Calls before the first capture: the model is known, and chunk sizes are chosen."""
_IMPORTS, _TRACING, _STEPS = 2.0, 0.4, 6
"""What a capture costs: seconds for the compiler's modules, seconds to trace the user's functions, and steps."""
_SAVED, _PYTHON = 0.3, 0.05
"""The least share of a step that a replay is expected to save, of at most so many seconds: what takes longer are kernels."""
_TAPES, _SHAPES = 3, 8
"""Most tapes of a shape of batch, one for each set of Python values, and most shapes: more would cost more than they save."""


class Replay:
    """``replay(state, batch)``: what ``gradients`` returns, to the bit.

    Once it pays, the operators of one call are recorded, and later calls run these. A record is used only while every Python
    value that the user's functions have read is as it was, and not before it has given the bits of ``gradients`` on another
    batch. What cannot be replayed keeps running as it is.

    Args:
        gradients: The computation.
        model: The model, for its code and settings.
        loss_fn: The user's loss function.
        options: The step's options.

    Attributes:
        left: How many calls are left, if that is known.
    """

    def __init__(self, gradients: Gradients, model: nn.Module, loss_fn: Callable[..., Any], options: Options):
        self._gradients, self._model, self._loss_fn, self._options = gradients, model, loss_fn, options
        self.left: int | None = None
        self.status = "eager: not called yet"
        self._shapes: dict[Any, _Shape] = {}
        # One thread records at a time; others go on eagerly.
        self._recording = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        # What others ask of the computation, such as whether the loss function takes numbers.
        return getattr(object.__getattribute__(self, "_gradients"), name)

    def __call__(self, state: TrainState, batch: Tree) -> StepOutputs:
        """Losses, gradients, metrics and buffers of every member."""
        why_not = self._why_not(state, batch)
        if why_not is not None:
            self.status = f"eager: {why_not}"
            return self._gradients(state, batch)
        if self.left is not None:
            self.left -= 1
        inputs, layout = optree.tree_flatten(_inputs(state, batch))
        key = layout, _choice.state, *OUTSIDE.values(), *map(_kind, inputs)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == _SHAPES:
                self.status = f"eager: the batches have more than {_SHAPES} shapes"
                return self._gradients(state, batch)
            shape = self._shapes[key] = _Shape()
        known = _in_context(state, self._options, lambda: next((one for one in shape.tapes if one.reads.hold()), None))
        if known is not None and known.is_checked:
            self.status = f"replayed: {len(known.tape)} operators"
            return known(inputs)
        self.status = f"eager: {shape.why_not or 'a record has not paid yet'}"
        if not self._recording.acquire(blocking=False):
            return self._gradients(state, batch)
        try:
            return self._recorded(shape, state, batch) if known is None else self._checked(shape, known, state, batch)
        finally:
            self._recording.release()

    def _why_not(self, state: TrainState, batch: Tree) -> str | None:
        """Why this call cannot be replayed, whatever the functions do."""
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
        if state.shared or self._gradients.rewrites_params:
            return "members share trained parameters, or the model writes its own"
        if not is_plain(batch):
            return "the batch is a container of its own class"
        return None

    def _recorded(self, shape: _Shape, state: TrainState, batch: Tree) -> StepOutputs:
        """The outputs of an ordinary call, which is recorded if that pays."""
        if shape.is_worth_it(self.left):
            try:
                return self._record(shape, state, batch)
            except Exception as error:
                # Whatever keeps a call from being recorded, it runs as it is, and raises what is the user's to see.
                why_not = str(error) if isinstance(error, NotReplayableError) else type(error).__name__
                shape.refuse(why_not)
        start = time.perf_counter()
        outputs = self._gradients(state, batch)
        shape.note(time.perf_counter() - start)
        return outputs

    def _record(self, shape: _Shape, state: TrainState, batch: Tree) -> StepOutputs:
        reads = _in_context(state, self._options, lambda: Reads(self._loss_fn, self._member(state, batch)))
        # A tensor that stands in two places now may be two in the next call.
        inputs, layout = optree.tree_flatten(tree_map(Tensor.detach, _inputs(state, batch)))
        names = ("params", "buffers", "keys", "step", "hparams", "loss_scale")
        *parts, tree = optree.tree_unflatten(layout, inputs)
        recorder = Recorder(inputs)
        try:
            with recorder:
                outputs = self._gradients(state._replace(**dict(zip(names, parts, strict=True))), tree)
        except Exception as error:
            raise NotReplayableError(recorder.why_not or f"recording it raises {type(error).__name__}") from error
        shape.add(_Known(Tape(recorder, len(inputs), leaves(_tensors(outputs))), reads, _tensors(outputs)))
        # What the update starts from are the state's own tensors.
        return outputs._replace(params={path: state.params[path] for path in outputs.params})

    def _member(self, state: TrainState, batch: Tree) -> tuple[Any, ...]:
        """The loss function's arguments for the first member, in tensors of their own."""
        params, buffers = ({path: leaf[:1] for path, leaf in tree.items()} for tree in stacked(state))
        model = members_of(self._model, params, buffers, {})[0]
        part = copied(over(lambda dim, leaf: leaf if dim is None else leaf[0], self._options.batch_dims, batch))
        hparams = {name: leaf[0].clone() for name, leaf in state.hparams.items()}
        return (model, part, hparams) if self._gradients.takes_hparams else (model, part)

    def _checked(self, shape: _Shape, known: _Known, state: TrainState, batch: Tree) -> StepOutputs:
        """The outputs of an ordinary call, after it is found out whether the record gives those for another batch."""
        # The same rows in another order: valid data, and other values.
        other = over(_turned, self._options.batch_dims, batch)
        expected = leaves(_tensors(self._gradients(state, other)))
        try:
            known.is_checked = all(map(_same_bits, expected, known.tape.rehearse(leaves(_inputs(state, other)))))
            why_not = "gives other values than the functions, which read what cannot be seen"
        except Exception as error:
            why_not = f"cannot run: {type(error).__name__}"
        if not known.is_checked:
            shape.refuse(f"its record {why_not}")
        return self._gradients(state, batch)


class _Known:
    """A tape, what it rests on, and the structure of its outputs."""

    def __init__(self, tape: Tape, reads: Reads, outputs: Tree):
        self.tape, self.reads, self._layout = tape, reads, optree.tree_structure(outputs)
        self.is_checked, self.uses = False, 0

    def __call__(self, inputs: list[Tensor]) -> StepOutputs:
        self.uses += 1
        parts: Any = optree.tree_unflatten(self._layout, self.tape(inputs))
        return StepOutputs(*parts)


class _Shape:
    """The tapes for batches of one shape, and whether to record another."""

    def __init__(self) -> None:
        self.tapes: list[_Known] = []
        self.why_not: str | None = None
        self._calls, self._least, self._uses = 0, float("inf"), 0

    def note(self, seconds: float) -> None:
        """Note how long an ordinary call has taken."""
        self._calls, self._least = self._calls + 1, min(self._least, seconds)

    def is_worth_it(self, left: int | None) -> bool:
        """Whether a tape is expected to save more than it costs: over the calls that are left, or as many as there were."""
        if self.why_not is not None or self._calls < _FIRST:
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


def _in_context(state: TrainState, options: Options, call: Callable[[], Any]) -> Any:
    """A call in the settings under which the user's functions run."""
    with torch.enable_grad(), autocasting(state.keys.device, options.autocast):
        return call()


def _inputs(state: TrainState, batch: Tree) -> Any:
    return state.params, state.buffers, state.keys, state.step, state.hparams, state.loss_scale, batch


def _tensors(outputs: StepOutputs) -> tuple[Any, ...]:
    return outputs[:-1]


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)


def _turned(dim: int | None, leaf: Tensor) -> Tensor:
    axis = 0 if dim is None else 1
    return leaf.flip(axis) if isinstance(leaf, Tensor) and leaf.dim() > axis else leaf


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))
