"""Steps without the Python that computes them: the operators of one step, replayed on the next ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import optree
import torch
from torch import Tensor

from hfta_func._torch import (
    NotReplayableError,
    Reads,
    Tape,
    can_look,
    function_modes,
    inside_transform,
    is_autocasting,
    num_dispatch_modes,
)
from hfta_func._types import Tree
from hfta_func.models.stack import members_of
from hfta_func.optim._base import is_of_package
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.batch import copied, is_plain, over
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.records import (
    MOST_SHAPES,
    Record,
    Records,
    Result,
    decided,
    kind_of,
    member_sizes,
    recorded,
    written,
)
from hfta_func.step.state import TrainState, stacked
from hfta_func.verify import autocasting


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
        self._shapes: dict[Any, Records] = {}
        self._latest: Records | None = None
        # One thread records at a time; others go on eagerly.
        self._recording = threading.Lock()

    def __call__(self, state: TrainState, batch: Tree) -> Result:
        """The next state and the metrics."""
        latest = self._latest
        if latest is not None and not torch.compiler.is_compiling():
            inputs, layout = optree.tree_flatten(cast(Any, (state, batch)))
            if latest.settings == self._settings(layout, state):
                known = self._in_context(state, functools.partial(latest.known_again, inputs))
                if known is not None:
                    return self._replay(known, inputs, state, batch)
        why_not = why_not_now(self._step, state, batch)
        if why_not is not None:
            self.status = f"eager: {why_not}"
            return self._step.eagerly(state, batch)
        inputs, layout = optree.tree_flatten(cast(Any, (state, batch)))
        settings = self._settings(layout, state)
        try:
            key = *settings, *map(kind_of, inputs)
        except (AttributeError, RuntimeError):
            return self._step.eagerly(state, batch)  # which says what is no tensor, or has no strides
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) == MOST_SHAPES:
                self.status = f"eager: the batches have more than {MOST_SHAPES} shapes"
                return self._step.eagerly(state, batch)
            shape = self._shapes[key] = Records(settings)
        known = self._in_context(state, functools.partial(shape.known, inputs))
        if known is not None and known.is_checked:
            self._latest = shape
            return self._replay(known, inputs, state, batch)
        if self.left is not None:
            self.left -= 1
        self.status = f"eager: {shape.why_not or 'a record has not paid yet'}"
        if not self._recording.acquire(blocking=False):
            return self._step.eagerly(state, batch)
        try:
            if known is not None:
                self._check(shape, known, state, batch)
            elif shape.is_worth_it(self.left) and not self._step.oracle.is_next():
                decision = self._record(shape, state, batch)
                if decision is not None:
                    self._step.oracle.calls += 1
                    return self._step.finish(state, *decision)
            elif shape.is_timed and self.left is not None:
                self.status = "eager: a record does not pay for the calls that are left"
            start = time.perf_counter()
            result = self._step.eagerly(state, batch)
            shape.note(time.perf_counter() - start)
            return result
        finally:
            self._recording.release()

    def _settings(self, layout: Any, state: TrainState) -> tuple[Any, ...]:
        """What a record rests on besides the kinds of its inputs."""
        return layout, _choice.state, *OUTSIDE.values(), *(tuple(leaf.tolist()) for leaf in member_sizes(state))

    def _replay(self, known: Record, inputs: list[Tensor], state: TrainState, batch: Tree) -> Result:
        self.status = known.status
        if self.left is not None:
            self.left -= 1
        return known(inputs, state, batch, self._step)

    def _in_context(self, state: TrainState, call: Callable[[], Any]) -> Any:
        """A call in the settings under which the user's functions run."""
        with torch.enable_grad(), autocasting(state.keys.device, self._step.options.autocast):
            return call()

    def _record(self, shape: Records, state: TrainState, batch: Tree) -> tuple[StepOutputs, Any] | None:
        """What the step decides in a call that is recorded; None if that cannot be."""
        step = self._step
        try:
            reads, fixed = self.reads(state, batch), member_sizes(state)
            first, decision = recorded(functools.partial(decided, step), state, batch, fixed=fixed)
            known, looks = Record(first, reads, state, decision), can_look(state.keys)
            closed = is_of_package(step.optimizer, closed=True)
            if not step.options.donate and closed and (looks or step.options.nonfinite != "raise"):
                with contextlib.suppress(NotReplayableError):
                    known.finish_by(*recorded(functools.partial(written, step), state, decision, fixed=fixed), looks)
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

    def _check(self, shape: Records, known: Record, state: TrainState, batch: Tree) -> None:
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
        tape, result = recorded(functools.partial(_at_once, step), state, batch, compiling=True)
    return tape, optree.tree_structure(result)


def _at_once(step: Any, state: TrainState, batch: Tree) -> Result:
    return step.finish(state, *step.decide(state, batch), looks=False)


def _turned(dim: int | None, leaf: Tensor) -> Tensor:
    axis = 0 if dim is None else 1
    return leaf.flip(axis) if isinstance(leaf, Tensor) and leaf.dim() > axis else leaf
