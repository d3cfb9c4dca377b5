"""Steps without the Python that computes them: the operators of one step on tapes, replayed on the next ones."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import NotReplayableError, Recorder, Tape, can_look, inside_transform, replaced
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.body import Mode
from hfta_func.models.sizes import PRESENT, SIZE
from hfta_func.optim._base import is_of_package
from hfta_func.optim._kernel import overwrites
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.batch import is_plain
from hfta_func.step.state import TrainState
from hfta_func.verify import Reached

_STEPS = 4
"""What a record and its check cost, in steps."""
_CHEAP = 0.1
"""So many seconds for a record are spent at once, where the number of calls is not known."""
_SAVED, _PYTHON = 0.3, 0.05
"""The least share of a call that a replay is expected to save, of at most so many seconds: what takes longer are kernels."""
_RECORDS, _SHAPES = 3, 8
"""Most records of a shape of batch, one for each set of Python values, and most shapes: more cost more than they save."""


class _Unread(Mode):
    """Refuses functions that read values past the dispatcher, of tensors that have others in the next call."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and not self._recorder.is_fixed(args[0]):
            raise NotReplayableError("it reads the values of a tensor")
        return func(*args, **kwargs)


def recorded(
    call: Callable[..., Any], *arguments: Tree, compiling: bool = False, fixed: Sequence[Tensor] = ()
) -> tuple[Tape, Any]:
    """The tape of a call, for calls in which the ``fixed`` arguments have the same values, and what it returned."""
    numbers = [number for number, leaf in enumerate(leaves(arguments)) if any(leaf is one for one in fixed)]
    # A tensor that stands in two places now may be two in the next call.
    inputs, layout = optree.tree_flatten(tree_map(Tensor.detach, arguments))
    given = dict(zip(map(id, inputs), leaves(arguments), strict=True))
    recorder = Recorder(inputs, compiling, numbers)
    try:
        with recorder, _Unread(recorder):
            results = call(*optree.tree_unflatten(layout, inputs))
    except NotReplayableError:
        raise
    except Exception as error:
        raise NotReplayableError(recorder.why_not or f"recording it raises {type(error).__name__}") from error
    tape = Tape(recorder, len(inputs), optree.tree_leaves(results))
    return tape, tree_map(lambda leaf: given.get(id(leaf), leaf), results)


def reached_by(step: Any) -> Reached:
    """What the step's functions can reach; the numbers of its optimizer are in its state."""
    model, loss_fn, _, options = step._made_from
    return Reached(loss_fn, options, model=model)


@contextlib.contextmanager
def only_computing(reads: Reached, func: Any, device: torch.device) -> Iterator[None]:
    """A block that raises a NotReplayableError if ``func`` does more than compute from what it can reach.

    What it has changed is then put back, as the call is made once more.
    """
    held, show, printed = Reached(func, device=device).held, builtins.print, list[None]()

    def note(*args: Any, **kwargs: Any) -> None:
        printed.append(None)
        show(*args, **kwargs)

    if reads.why_not is not None:
        raise NotReplayableError(f"its functions can reach {reads.why_not}")
    try:
        with replaced(builtins, "print", note):
            yield
        is_pure = reads.holds() and not printed
    finally:
        moved = held.restore()
    if moved or not is_pure:
        raise NotReplayableError("it prints, draws from another generator, or changes objects of Python")


class Record:
    """Two tapes, for what a step decides and for what it writes then, and what they rest on; making it calls the step."""

    is_checked, uses = False, 0
    why_not: str | None = None
    _second: Tape | None = None

    def __init__(self, step: Any, state: TrainState, batch: Tree):
        self.reads = reached_by(step)
        self._looks, fixed = can_look(state.keys), member_sizes(state)
        with only_computing(self.reads, step._made_from[1], state.keys.device):
            self._first, decision = recorded(step.decide, state, batch, fixed=fixed)
        self._decision: Any = optree.tree_structure(decision)
        self._width, self._keep = len(leaves(state)), len(leaves(decision[0]))
        closed, result = is_of_package(step.optimizer, closed=True), None

        def written(state: TrainState, decision: Any) -> Any:
            outputs, verdict = decision
            # Where values can be looked at, the record is for steps that update all members.
            verdict = verdict._replace(keep=None) if self._looks else verdict
            return step.finish(state, outputs, verdict, looks=False)

        if not step.options.donate and closed and (self._looks or step.options.nonfinite != "raise"):
            with contextlib.suppress(NotReplayableError):
                self._second, after = recorded(written, state, decision, fixed=fixed)
                self._result: Any = optree.tree_structure(after)
                # A metric may be a parameter of the state.
                others = state._replace(params={}), decision[0][1:], decision[1]
                self._is_apart = _storages(state.params).isdisjoint(_storages(others))
                result = after if not self._looks or leaves(decision)[self._keep].all() else None
        self.status = f"replayed: {len(self._first) + (0 if self._second is None else len(self._second))} operators"
        self.first_result: Any = result or step.finish(state, *decision)

    def __call__(self, inputs: list[Tensor], state: TrainState, batch: Tree, step: Any, owned: bool) -> Any:
        """What the step returns; what is trained of a state that is ``owned`` is overwritten where that is faster."""
        self.uses += 1
        trial = step.oracle(state.keys)
        decision = self._first(inputs)
        if trial is not None:
            step._gradients.check(trial, state, batch, self._decision.unflatten(decision)[0])
        if self._second is None or (self._looks and not decision[self._keep].all()):
            return step.finish(state, *self._decision.unflatten(decision))
        token = overwrites.set(owned and self._is_apart)
        try:
            return self._result.unflatten(self._second([*inputs[: self._width], *decision]))
        finally:
            overwrites.reset(token)

    def check(self, state: TrainState, batch: Tree, *decided: Tree) -> None:
        """Compare what the step has decided with the record, which is used from then on, or says why not."""
        decision = leaves(decided)
        try:
            if not all(map(_same_bits, decision, self._first.rehearse(leaves((state, batch))))):
                self.why_not = "its record gives other values than the functions, which read what cannot be seen"
            elif self._second is not None:
                # Of this package's own functions alone.
                self._second.rehearse([*leaves(state), *decision])
        except Exception as error:
            self.why_not = f"its record cannot run: {type(error).__name__}"
        self.is_checked = self.why_not is None


def member_sizes(state: TrainState) -> list[Tensor]:
    """What tells the sizes of the members of a padded model, where reading it costs nothing."""
    if state.keys.device.type != "cpu":
        return []
    return [leaf for path, leaf in state.buffers.items() if path.rpartition(".")[2] in (SIZE, PRESENT)]


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in leaves(tree)}


def kind_of(leaf: Tensor) -> tuple[Any, ...]:
    """What a graph of operators rests on about a tensor."""
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True)


@dataclasses.dataclass(eq=False)
class _Shape:
    """The records for batches of one shape, and whether to make another."""

    settings: tuple[Any, ...]
    is_like: Any
    python: float  # the most seconds of a call that are not kernels
    records: list[Record] = dataclasses.field(default_factory=list)
    why_not: str | None = None
    calls: int = 0
    least: float = float("inf")

    def pays(self, left: int | None) -> bool:
        """Whether a record is expected to save more than it costs: over the calls that are left, or as many as there were."""
        if not self.calls or self.why_not is not None:
            return False
        cost = _STEPS * self.least
        saved = _SAVED * min(self.least, self.python)
        if left is None:
            left = self.calls if cost > _CHEAP else 1_000
        # Python values that have changed are expected to change again after as many calls, but are tried again now and then.
        return min([left, *[max(one.uses, self.calls // 20) for one in self.records[-1:]]]) * saved >= cost


class Replay:
    """``replay(state, batch)``: what ``step.eagerly`` returns, to the bit.

    Once it pays, the operators of one call are recorded, and later calls run these. A record is used only while every Python
    value that the user's functions can reach is as it was, and not before it has given the bits of the step itself on another
    batch. What cannot be replayed keeps running as it is.

    Attributes:
        left: How many calls are left, if that is known.
    """

    def __init__(self, step: Any, record: Callable[..., Record] = Record, python: float = _PYTHON):
        self._step, self._record, self._python = step, record, python
        self.left: int | None = None
        self.status, self._shapes = "eager: not called yet", dict[Any, _Shape]()
        self._latest: _Shape | None = None
        # What the call before this one decided from what, if this one is to be recorded.
        self._decided: tuple[Any, ...] = ()
        # One thread records at a time; others go on eagerly.
        self._recording = threading.Lock()

    def __call__(self, state: TrainState, batch: Tree, owned: bool = False) -> Any:
        """The next state and the metrics; what is trained of a state that is ``owned`` may be overwritten."""
        if self.left is not None:
            self.left -= 1
        decided, self._decided = self._decided, ()
        inputs, layout = optree.tree_flatten(cast(Any, (state, batch)))
        shape = why_not_now(self._step, state, batch) or self._shape(inputs, layout, state)
        if isinstance(shape, str):
            self.status = f"eager: {shape}"
            return self._step.eagerly(state, batch)
        record = next((one for one in shape.records if one.reads.holds()), None)
        if record is not None and record.is_checked:
            self._latest, self.status = shape, record.status
            return record(inputs, state, batch, self._step, owned)
        self.status = f"eager: {shape.why_not or 'a record has not paid yet'}"
        if not self._recording.acquire(blocking=False):
            return self._step.eagerly(state, batch)
        try:
            return self._learn(shape, record, state, batch, decided)
        finally:
            self._recording.release()

    def _shape(self, inputs: list[Tensor], layout: Any, state: TrainState) -> _Shape | str:
        sizes = (tuple(leaf.tolist()) for leaf in member_sizes(state))
        modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        settings = layout, _choice.state, *OUTSIDE.values(), *modes, *sizes
        latest = self._latest
        if latest is not None and latest.settings == settings and latest.is_like(*inputs):
            return latest
        try:
            key = *settings, *map(kind_of, inputs)
        except (AttributeError, RuntimeError):
            return "the batch holds what is no tensor, or has no strides"
        if key not in self._shapes:
            if len(self._shapes) == _SHAPES:
                return f"the batches have more than {_SHAPES} shapes"
            self._shapes[key] = _Shape(settings, _torch.likeness(inputs), self._python)
        return self._shapes[key]

    def _learn(
        self, shape: _Shape, record: Record | None, state: TrainState, batch: Tree, decided: tuple[Any, ...]
    ) -> Any:
        """An eager call, in which a record is checked, made, or found to pay."""
        step = self._step
        if record is not None:
            result = step.eagerly(state, batch, functools.partial(record.check, state, batch))
            if record.why_not is not None:
                shape.why_not, shape.records = record.why_not, []
            return result
        if shape.pays(self.left) and not step.oracle.is_next():
            try:
                record = self._record(step, state, batch)
            except Exception as error:
                # Whatever keeps a call from being recorded, it runs as it is, and raises what is the user's to see.
                why_not = str(error) if isinstance(error, NotReplayableError) else type(error).__name__
                shape.why_not, shape.records = why_not, []
            else:
                # Instead of the oldest one, if there are many.
                shape.records, shape.calls = [*shape.records[1 - _RECORDS :], record], 0
                step.oracle.calls += 1
                if decided[:1] == (shape,):
                    record.check(*decided[1:])
                    # If values in Python have changed since, or the batch's memory, the next call says more.
                    record.why_not = None
                # The record would hold a second state as long as the step lives.
                result, record.first_result = record.first_result, None
                return result
        elif shape.calls and self.left is not None and shape.why_not is None:
            self.status = "eager: a record does not pay for the calls that are left"
        start = time.perf_counter()

        def note(*decision: Any) -> None:
            shape.calls, shape.least = shape.calls + 1, min(shape.least, time.perf_counter() - start)
            # A step that donates overwrites what it was given.
            if not step.options.donate and shape.pays(self.left):
                self._decided = shape, state, batch, *decision

        return step.eagerly(state, batch, note)


def why_not_now(step: Any, state: Any, batch: Tree) -> str | None:
    """Why this call cannot be replayed, whatever the functions do."""
    if type(state) is not TrainState or torch.is_inference_mode_enabled():
        return "the step refuses it"
    if torch.compiler.is_compiling() or inside_transform():
        return "it is part of another computation"
    observers = _torch.num_dispatch_modes() or _torch.function_modes() or _torch.is_autocasting()
    if observers or torch.is_anomaly_enabled() or _choice.is_explaining():
        return "a context around the step observes or changes operators"
    if not (state.shared or step._gradients.rewrites_params or state.keys.device.type == "xla") and is_plain(batch):
        return None
    return "members share trained parameters, the model writes its own, the batch is of its own class, or this is XLA"
