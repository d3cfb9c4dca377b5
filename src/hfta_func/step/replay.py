"""Steps without the Python that computes them: the operators of one step, replayed on the next ones."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import Any, cast

import optree
import torch
from torch import Tensor

from hfta_func._torch import (
    NotReplayableError,
    Tape,
    function_modes,
    inside_transform,
    is_autocasting,
    likeness,
    num_dispatch_modes,
)
from hfta_func._types import Tree
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.batch import is_plain
from hfta_func.step.records import Record, Result, kind_of, member_sizes, recorded
from hfta_func.step.state import TrainState

_STEPS = 4
"""What a record and its check cost, in steps."""
_CHEAP = 0.1
"""So many seconds for a record are spent at once, where the number of calls is not known."""
_SAVED, _PYTHON = 0.3, 0.05
"""The least share of a step that a replay is expected to save, of at most so many seconds: what takes longer are kernels."""
_SAVED_OF_SMALL, _SMALL = 0.7, 0.002
"""The same for small steps, of which most is Python, in seconds."""
_RECORDS, _SHAPES = 3, 8
"""Most records of a shape of batch, one for each set of Python values, and most shapes: more cost more than they save."""


@dataclasses.dataclass(eq=False)
class _Shape:
    """The records for batches of one shape, and whether to make another."""

    settings: tuple[Any, ...]
    is_like: Any
    records: list[Record] = dataclasses.field(default_factory=list)
    why_not: str | None = None
    calls: int = 0
    least: float = float("inf")

    def known(self) -> Record | None:
        """The record that is right for the Python values of now."""
        return next((one for one in self.records if one.reads.holds()), None)

    def pays(self, left: int | None) -> bool:
        """Whether a record is expected to save more than it costs: over the calls that are left, or as many as there were."""
        if not self.calls or self.why_not is not None:
            return False
        cost = _STEPS * self.least
        saved = max(_SAVED * min(self.least, _PYTHON), _SAVED_OF_SMALL * min(self.least, _SMALL))
        if left is None:
            left = self.calls if cost > _CHEAP else 1_000
        # Python values that have changed are expected to change again after as many calls, but are tried again now and then.
        return min([left, *[max(one.uses, self.calls // 20) for one in self.records[-1:]]]) * saved >= cost

    def add(self, record: Record) -> None:
        """Keep a record, instead of the oldest one if there are many."""
        self.records = [*self.records[1 - _RECORDS :], record]
        self.calls = 0

    def refuse(self, why: str) -> None:
        """Record no more, and use no record."""
        self.why_not, self.records = why, []


class Replay:
    """``replay(state, batch)``: what ``step.eagerly`` returns, to the bit.

    Once it pays, the operators of one call are recorded, and later calls run these. A record is used only while every Python
    value that the user's functions can reach is as it was, and not before it has given the bits of the step itself on another
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
        if self.left is not None:
            self.left -= 1
        if (why_not := why_not_now(self._step, state, batch)) is not None:
            self.status = f"eager: {why_not}"
            return self._step.eagerly(state, batch)
        inputs, layout = optree.tree_flatten(cast(Any, (state, batch)))
        shape = self._shape(inputs, layout, state)
        if shape is None:
            return self._step.eagerly(state, batch)
        record = shape.known()
        if record is not None and record.is_checked:
            self._latest, self.status = shape, record.status
            return record(inputs, state, batch, self._step)
        self.status = f"eager: {shape.why_not or 'a record has not paid yet'}"
        if not self._recording.acquire(blocking=False):
            return self._step.eagerly(state, batch)
        try:
            return self._learn(shape, record, state, batch)
        finally:
            self._recording.release()

    def _shape(self, inputs: list[Tensor], layout: Any, state: TrainState) -> _Shape | None:
        sizes = (tuple(leaf.tolist()) for leaf in member_sizes(state))
        modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        settings = layout, _choice.state, *OUTSIDE.values(), *modes, *sizes
        latest = self._latest
        if latest is not None and latest.settings == settings and latest.is_like(*inputs):
            return latest
        try:
            key = *settings, *map(kind_of, inputs)
        except (AttributeError, RuntimeError):
            return None  # The step says what is no tensor, or has no strides.
        if key not in self._shapes and len(self._shapes) == _SHAPES:
            self.status = f"eager: the batches have more than {_SHAPES} shapes"
            return None
        if key not in self._shapes:
            self._shapes[key] = _Shape(settings, likeness(inputs))
        return self._shapes[key]

    def _learn(self, shape: _Shape, record: Record | None, state: TrainState, batch: Tree) -> Result:
        """An eager call, in which a record is checked, made, or found to pay."""
        step = self._step
        if record is not None:
            result = step.eagerly(state, batch, functools.partial(record.check, step, state, batch))
            if record.why_not is not None:
                shape.refuse(record.why_not)
            return result
        if shape.pays(self.left) and not step.oracle.is_next():
            try:
                shape.add(record := Record(step, state, batch))
            except Exception as error:
                # Whatever keeps a call from being recorded, it runs as it is, and raises what is the user's to see.
                shape.refuse(str(error) if isinstance(error, NotReplayableError) else type(error).__name__)
            else:
                step.oracle.calls += 1
                # The record would hold a second state as long as the step lives.
                result, record.first_result = record.first_result, None
                return result
        elif shape.calls and self.left is not None and shape.why_not is None:
            self.status = "eager: a record does not pay for the calls that are left"
        start = time.perf_counter()
        result = step.eagerly(state, batch)
        shape.calls, shape.least = shape.calls + 1, min(shape.least, time.perf_counter() - start)
        return result


def why_not_now(step: Any, state: Any, batch: Tree) -> str | None:
    """Why this call cannot be replayed, whatever the functions do."""
    if type(state) is not TrainState or torch.is_inference_mode_enabled():
        return "the step refuses it"
    observers = num_dispatch_modes() or function_modes() or is_autocasting() or torch.is_anomaly_enabled()
    if torch.compiler.is_compiling() or inside_transform() or observers or _choice.is_explaining():
        return "it is part of another computation, or a context around the step observes or changes operators"
    if state.keys.device.type == "xla" or state.shared or step._gradients.rewrites_params or not is_plain(batch):
        return (
            "members share trained parameters, the model writes its own, the batch is of its own class, or this is XLA"
        )
    return None


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
