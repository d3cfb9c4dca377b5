"""Records of a training step: the operators of a call on tapes, and what they rest on."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from hfta_func._torch import NotReplayableError, Recorder, Tape, can_look, replaced
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree
from hfta_func.calls.body import Mode
from hfta_func.models.sizes import PRESENT, SIZE
from hfta_func.optim._base import is_of_package
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.state import TrainState
from hfta_func.verify import Held, Reached

Result: TypeAlias = Any
"""The next state and the metrics."""


def _decided(step: Any, state: TrainState, batch: Tree) -> Any:
    """What a step decides, in tensors without names: those of :class:`StepOutputs`, and a :class:`Verdict`."""
    outputs, verdict = step.decide(state, batch)
    return outputs[:-1], verdict


def _written(step: Any, state: TrainState, decision: Any) -> Result:
    """What a step writes then."""
    parts, verdict = decision
    # Where values can be looked at, the record is for steps that update all members.
    verdict = verdict._replace(keep=None) if can_look(state.keys) else verdict
    return step.finish(state, StepOutputs(*parts), verdict, looks=False)


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
    recorder = Recorder(inputs, compiling, numbers)
    try:
        with recorder, _Unread(recorder):
            results = call(*optree.tree_unflatten(layout, inputs))
    except NotReplayableError:
        raise
    except Exception as error:
        raise NotReplayableError(recorder.why_not or f"recording it raises {type(error).__name__}") from error
    return Tape(recorder, len(inputs), optree.tree_leaves(results)), results


def reached_by(step: Any) -> Reached:
    """What the step's functions can reach; the numbers of its optimizer are in its state."""
    model, loss_fn, _, options = step._made_from
    return Reached(loss_fn, options, model=model)


@contextlib.contextmanager
def only_computing(reads: Reached, func: Any, device: torch.device) -> Iterator[None]:
    """A block that raises a NotReplayableError if ``func`` does more than compute from what it can reach.

    What it has changed is then put back, as the call is made once more.
    """
    held, printed = Held([func], device), False

    def note(*args: Any, **kwargs: Any) -> None:
        nonlocal printed
        printed = True
        show(*args, **kwargs)

    show = builtins.print
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
    """Two tapes, for what a step decides and for what it writes then, and what they rest on.

    Args:
        step: The step, which is called once.
        state: A state.
        batch: A batch.

    Raises:
        NotReplayableError: if it cannot be recorded.
    """

    def __init__(self, step: Any, state: TrainState, batch: Tree):
        self.reads, self.is_checked, self.uses = reached_by(step), False, 0
        self._second: Tape | None = None
        self._looks, fixed = can_look(state.keys), member_sizes(state)
        with only_computing(self.reads, step._made_from[1], state.keys.device):
            self._first, decision = recorded(functools.partial(_decided, step), state, batch, fixed=fixed)
        self._decision: Any = optree.tree_structure(decision)
        self._width, self._keep = len(leaves(state)), len(leaves(decision[0]))
        closed = is_of_package(step.optimizer, closed=True)
        if not step.options.donate and closed and (self._looks or step.options.nonfinite != "raise"):
            with contextlib.suppress(NotReplayableError):
                writes = functools.partial(_written, step)
                self._second, result = recorded(writes, state, decision, fixed=fixed)
                self._result: Any = optree.tree_structure(result)
        self.status = f"replayed: {len(self._first) + (0 if self._second is None else len(self._second))} operators"
        # What the update starts from are the state's own tensors.
        (params, *others), verdict = decision
        outputs = StepOutputs({path: state.params[path] for path in params}, *others)
        self.first_result: Result | None = step.finish(state, outputs, verdict)

    def __call__(self, inputs: list[Tensor], state: TrainState, batch: Tree, step: Any) -> Result:
        """What the step returns."""
        self.uses += 1
        trial = step.oracle(state.keys)
        decision = self._first(inputs)
        if trial is not None:
            step._gradients.check(trial, state, batch, StepOutputs(*self._decision.unflatten(decision)[0]))
        if self._second is None or (self._looks and not decision[self._keep].all()):
            parts, verdict = self._decision.unflatten(decision)
            return step.finish(state, StepOutputs(*parts), verdict)
        return self._result.unflatten(self._second([*inputs[: self._width], *decision]))

    def check(self, step: Any, state: TrainState, batch: Tree, trial: Any) -> tuple[Result, str | None]:
        """What the step returns, compared with the record; why the record is wrong, if it is."""
        step._check(state, batch)
        outputs, verdict = step.decide(state, batch)
        step._gradients.check(trial, state, batch, outputs)
        why_not = self._differs(step, state, batch, (outputs[:-1], verdict))
        self.is_checked = why_not is None
        return step.finish(state, outputs, verdict), why_not

    def _differs(self, step: Any, state: TrainState, batch: Tree, decision: Any) -> str | None:
        decides = leaves(decision)
        try:
            if not all(map(_same_bits, decides, self._first.rehearse(leaves((state, batch))))):
                return "its record gives other values than the functions, which read what cannot be seen"
            if self._second is not None:
                expected = leaves(_written(step, state, decision))
                if not all(map(_same_bits, expected, self._second.rehearse([*leaves(state), *decides]))):
                    self._second = None
        except Exception as error:
            return f"its record cannot run: {type(error).__name__}"
        return None


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
