"""Several steps in one call, with batches that are given or collected, or evaluations of one batch for a search."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from hfta_func._torch import Compiled, NotReplayableError, can_look, inside_transform, untraced
from hfta_func._tree import leaves, tree_map, where
from hfta_func._types import Tree, check_counts, recorded
from hfta_func.calls.scan import alike, looped
from hfta_func.errors import BatchError, LossError, TraceError
from hfta_func.optim._base import GradientTransformation
from hfta_func.step import replay
from hfta_func.step.batch import plain, restored
from hfta_func.step.commit import Commit, Failure
from hfta_func.step.members import Rehearsed
from hfta_func.step.state import TrainState, stored
from hfta_func.verify import Oracle, Reached


class ManySteps(Compiled):
    """``many(state, batches) -> (state, metrics)``, see :attr:`TrainStep.many`."""

    def __init__(self, step: Any):
        self._step, self.options, self.base = step, step.options, step.base
        # In a graph, what a loop carries can neither be written nor recorded.
        options = replace(step.options, donate=False, replay=None)
        self.in_graph = type(step)(*step._made_from[:3], options) if step.options.donate else step

    def __reduce__(self) -> Any:
        return type(self), (self._step,)

    def __call__(self, state: TrainState, batches: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """Take a step with each batch in turn.

        Args:
            state: The state before the first one.
            batches: Batches stacked along a new first axis: every leaf ``[K, M, N, ...]``, or ``[K, N, ...]`` of what members
                share.

        Returns:
            The state after the last one, and the metrics of all, each ``[K, M, ...]``.

        Raises:
            BatchError: if the leaves do not have the same number of batches.
            Exception: what the step raises.
        """

        def rehearse() -> None:
            # A compiler knows the values of a graph's inputs, but none of a loop.
            gradients = self.in_graph._gradients
            gradients.rehearse(gradients.tensors(state), gradients.with_carry(state, _first(batches)), {})

        return self._run(state, lambda step, state: self._take(step, state, batches), rehearse)

    def _take(self, step: Any, state: TrainState, batches: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        tree = plain(batches)
        counts = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves(tree)}
        if len(counts) != 1 or 0 in counts:
            raise BatchError(f"the batches have {sorted(counts)} as first axes; stack as many in each, [K, M, N, ...]")
        return looped(lambda state, batch, _: step(state, restored(batch, batches)), state, tree, counts.pop())

    def _run(self, state: TrainState, call: Any, rehearse: Callable[[], None]) -> tuple[TrainState, dict[str, Tensor]]:
        """``call(step, state)``, in a graph with a step that writes nothing."""
        if not torch.compiler.is_dynamo_compiling() or inside_transform():
            return call(self._step, state)
        rehearse()
        after, metrics = call(self.in_graph, state)
        return stored(state, after, self.options.donate), metrics


class Loop(ManySteps, Rehearsed):
    """``loop(state, iterations) -> (state, metrics)``, see :attr:`TrainStep.loop`."""

    def __init__(self, step: Any):
        super().__init__(step)
        self._gradients = step._gradients
        # Nobody compares what is collected with members alone.
        self.oracle = Oracle(False, step.options.collect, step.outline)
        self.collecting = replay.Replay(self, Collected, float("inf"))

    def _rehearsal(self, state: TrainState) -> None:
        gradients, (_, batches, _) = self.in_graph._gradients, self._collect(state)
        gradients.rehearse_eagerly(gradients.tensors(state), _first(batches), {})

    def __call__(self, state: TrainState, iterations: int = 1) -> tuple[TrainState, dict[str, Tensor]]:
        """Collect batches and take a step with each of them, again and again.

        Args:
            state: The state before the first iteration.
            iterations: How often to collect.

        Returns:
            The state after the last iteration, and the metrics: the steps' ``[iterations, K, M, ...]``, and those that
            ``collect`` returns, ``[iterations, M, ...]``.

        Raises:
            ValueError: if there is no iteration.
            TraceError: if ``collect`` returns a carry of another structure, shape or dtype; it names the leaf.
            LossError: if ``collect`` reports a metric of a name that the step reports, too, or returns something else.
            Exception: what the steps and ``collect`` raise.
        """
        check_counts(iterations=iterations)

        def call(step: Any, state: TrainState) -> Any:
            return looped(lambda state, *_: self._iterate(step, state)[:2], state, None, iterations)

        return self._run(state, call, lambda: self.rehearse(state))

    def once(self, state: TrainState) -> tuple[TrainState, dict[str, Tensor]]:
        """One iteration as a step of :func:`fit`: metrics ``[M, ...]``, which sum up those of its K steps.

        ``failure`` is each member's first one, ``failed_step`` its step then.
        """

        def call(step: Any, state: TrainState) -> tuple[TrainState, dict[str, Tensor]]:
            start = state.step.clone()
            after, metrics, reports = self._iterate(step, state)
            failure = metrics.pop("failure")
            first = (failure != 0).int().argmax(0)
            summed = {name: value if name in reports else _summary(value) for name, value in metrics.items()}
            return after, summed | {"failure": failure.gather(0, first[None])[0], "failed_step": start + first}

        return self._run(state, call, lambda: self.rehearse(state))

    def _iterate(self, step: Any, state: TrainState) -> tuple[TrainState, dict[str, Tensor], dict[str, Tensor]]:
        """Collect, and take a step with each batch: the state, all metrics, and those that ``collect`` returns."""
        carry, batches, reports = self._collect(state)
        if not can_look(state.active) or not bool(state.active.all()):
            carry = where(state.active, carry, state.carry)
        state, metrics = self._take(step, state._replace(carry=carry), batches)
        if hidden := (metrics.keys() | {"failed_step"}) & reports.keys():
            raise LossError(f"collect reports '{min(hidden)}', which the step reports too; give it another name")
        return state, metrics | reports, reports

    def _collect(self, state: TrainState) -> tuple[Any, Any, dict[str, Tensor]]:
        """What members carry next, their batches, and metrics."""
        with torch.set_grad_enabled(inside_transform()):
            is_plain = self._step._replay is None or torch.compiler.is_compiling()
            result = (self.eagerly if is_plain else self.collecting)(state, ())
        parts = (*result, {}) if isinstance(result, tuple) and len(result) == 2 else result
        alike(state.carry, "carry", ("the state", "what collect returns"))(parts[0])
        return parts

    def eagerly(self, state: TrainState, batch: Tree, watch: Callable[[Any], None] = lambda _: None) -> Any:
        """What ``collect`` returns, which ``watch`` is called with."""
        collect: Any = self.options.collect
        watch(result := collect(state))
        return result


class Collected(replay.Record):
    """The tape of what ``collect`` returns."""

    def __init__(self, loop: Loop, state: TrainState, batch: Tree):
        def collect(state: TrainState, _: Tree) -> Any:
            before, result = leaves(state), loop.eagerly(state, ())
            if [*map(id, leaves(state))] != [*map(id, before)]:
                raise NotReplayableError("it changes the state that it is given")
            return result

        func = loop.options.collect
        self.reads = Reached(func)
        with replay.only_computing(self.reads, func, state.keys.device):
            self._first, self.first_result = replay.recorded(collect, state, batch)
        self._decision: Any = optree.tree_structure(self.first_result)
        self.status = f"replayed: {len(self._first)} operators"

    def __call__(self, inputs: list[Tensor], *_: Any) -> Any:
        """What ``collect`` returns."""
        self.uses += 1
        return self._decision.unflatten(self._first(inputs))


def _summary(value: Tensor) -> Tensor:
    """Of a metric of K steps ``[K, M, ...]``: the mean of numbers, whether all are true, the largest of integers."""
    return value.mean(0) if value.is_floating_point() else value.all(0) if value.dtype == torch.bool else value.amax(0)


def _first(batches: Tree) -> Any:
    return restored(tree_map(lambda leaf: leaf[0], plain(batches)), batches)


@recorded
def _latest_gradients() -> GradientTransformation:
    """An optimizer that changes nothing, and whose state is the latest gradients."""
    zeros = functools.partial(tree_map, torch.zeros_like)
    return GradientTransformation(lambda params: zeros(params), lambda grads, state, params: (zeros(grads), grads))


class Searching:
    """``searching(state, batch)``: a step with an optimizer that has a ``search``.

    Args:
        step: The training step, of whose kind each evaluation is one.
        model: Its model.
    """

    def __init__(self, step: Any, model: nn.Module):
        if step.options.shared_params or leaves(step.options.carry):
            why = "lbfgs evaluates each member as often as its own search asks for"
            raise ValueError(f"{why}; leave out shared_params and carry, or take another optimizer")
        self._search = step.optimizer.search
        optimizer, options = _latest_gradients(), replace(step.options, donate=False)
        # The step itself, with what computes its gradients, but for what it does with them.
        self.evaluate = object.__new__(type(step))
        given = {"optimizer": optimizer, "options": options, "_made_from": (*step._made_from[:2], optimizer, options)}
        vars(self.evaluate).update(vars(step) | given, _searching=None)
        self.evaluate._commit = Commit(model, optimizer, options, False, ())
        # One batch is evaluated many times.
        self.evaluate._replay = None if options.replay is False else replay.Replay(self.evaluate)

    @untraced("lbfgs evaluates as often as losses ask for, which is no graph")
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """Evaluate members until all searches have ended; the metrics are those of the first evaluation."""
        if inside_transform():
            raise TraceError("lbfgs evaluates as often as losses ask for; no transform can map or differentiate it")
        trained = {path: param for path, param in state.params.items() if path in self.evaluate.trainable}
        search, metrics, active = self._search(state.opt_state, trained, state.active), {}, state.active
        latest = state._replace(opt_state=self.evaluate.optimizer.init(trained))
        while bool(search.searching.any()) or not metrics:
            # All evaluations draw the noise of the step.
            latest = latest._replace(params=state.params | search.params, active=search.searching, step=state.step)
            latest, report = self.evaluate(latest, batch)
            metrics, active = (metrics, active) if metrics else (report, latest.active)
            search.tell(report["loss"], latest.opt_state, report["finite"])
        metrics["failure"] = torch.where(search.stuck, int(Failure.SEARCH), metrics["failure"])
        params, step = state.params | search.params, state.step + state.active
        return latest._replace(params=params, opt_state=search.state, active=active, step=step), metrics
