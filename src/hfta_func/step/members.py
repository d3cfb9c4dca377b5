"""How training, evaluation and prediction call one model's function for all members, and whether a state fits them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func._torch import constant_to_compiler, current_trace, inside_transform, pytree, set_compiling
from hfta_func._tree import tree_map
from hfta_func._types import Params, Tree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.made import MadeCalls
from hfta_func.errors import HyperparameterError
from hfta_func.models.functional import Bound
from hfta_func.models.scalar_attributes import filled, numbers_text
from hfta_func.models.sharing import base_of
from hfta_func.models.stack import Shapes, check_state
from hfta_func.rules import _measured
from hfta_func.rules.vmap import vmap_routed
from hfta_func.step.batch import check_batch, copied, is_plain, of_member, over, plain, restored, take_batch
from hfta_func.step.chunks import Chunks
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState
from hfta_func.verify import Case, Oracle, Trial, assigned, autocasting, same


class Rehearsed:
    """What runs members eagerly just before a compiler traces them, so that both learn and refuse the same."""

    _rehearsed: Callable[[], Any] | None = None

    _rehearsal: Callable[..., None]

    def rehearse(self, *given: Tree) -> None:
        """Make the rehearsal while a compiler traces, once in each trace, as padded sizes depend on shapes.

        A compiler knows the values of a graph's inputs, in containers that it can take apart, and outside of transforms.
        """
        if torch.compiler.is_dynamo_compiling() and not inside_transform() and is_plain(given):
            if not self._is_rehearsed():
                values, spec = pytree.tree_flatten(given)
                self._rehearse(pytree.tree_unflatten([*range(len(values))], spec), *values)

    @constant_to_compiler
    def _is_rehearsed(self) -> bool:
        return self._rehearsed is not None and self._rehearsed() is current_trace()

    @constant_to_compiler
    def _rehearse(self, layout: Tree, *values: Any) -> bool:
        compiling, context = set_compiling(False), contextvars.copy_context()
        try:
            context.run(rehearsing.set, True)
            context.run(self.rehearse_eagerly, *tree_map(values.__getitem__, layout))
        finally:
            set_compiling(compiling)
        return True

    def rehearse_eagerly(self, *given: Tree) -> None:
        """Make the rehearsal where the values are known."""
        self._rehearsal(*given)
        self._rehearsed = weakref.ref(trace) if (trace := current_trace()) is not None else None


class Tensors(NamedTuple):
    """What members run with; every leaf is ``[M, ...]``."""

    keys: Tensor
    trained: Params  # of which there are gradients
    frozen: Params
    buffers: Params
    hparams: Params
    scale: Any = ()  # what each member's loss is multiplied by


class ArrayFunction(Rehearsed):
    """A user's function of one model, which is called for all members and compared with members alone.

    Subclasses compute it in :meth:`_run`, and say what of its results is compared by :meth:`_read` and :meth:`_results`.

    Args:
        model: A module of the architecture.
        outline: The same without values, which is kept.
        func: ``func(model, batch)`` or ``func(model, batch, hparams)``.
        options: Of the step.
        held: Whose Python values are put back after calls that compare; ``func`` by default.
        how: Further arguments of :class:`Bound`.
    """

    training: bool | None = None
    takes_gradients = False
    _run: Callable[..., Any]
    """``run(batch, given, tree, common, judged)``: the results of members; what is ``common`` they hold once."""
    _read: Callable[[Any], tuple[Any, dict[str, Params]]]
    """What is differentiated of one member's result, and what is compared, by kind."""
    _results: Callable[[Any, Tensors, Params], dict[str, Params]]
    """The same of what :attr:`_run` returns for all members."""
    keeps: bool | None = None
    """Whether who calls keeps the buffers that members write in eval mode; None if that is all buffers."""

    def __init__(self, model: nn.Module, outline: nn.Module, func: Any, options: Options, held: Any = None, **how: Any):
        self.takes_hparams = num_positional(func) >= 3
        self.chunks = Chunks(options.chunk_size)

        def call(model: nn.Module, tree: Tree, hparams: Params, like: Callable[[], Tree]) -> Any:
            # A loss or a metric may write its batch and its numbers.
            arguments = copied((tree, hparams) if self.takes_hparams else (tree,), self._made.shares_batch())
            return func(model, restored(arguments[0], like()), *arguments[1:])

        self._bound: Any = Bound(model, call, training=self.training, share_frozen=options.share_frozen, **how)
        self._bound.ends_calls = False
        self._source, self.options = (outline, func), options
        self.base: Params = base_of(outline, options.share_frozen)
        """What all members share, by path, with ``share_frozen=True``: the model's own tensors."""
        self.oracle = Oracle(options.verify, held or func, outline)
        self._made = MadeCalls()

    @property
    def written(self) -> list[str]:
        """The buffers that calls in eval mode have written."""
        return [*self._bound.written]

    def count_with(self, other: ArrayFunction) -> None:
        """Go on with the counters of the model that another function calls."""
        self._bound.count_with(other._bound)

    def dims_of(self, batch: Tree) -> Tree:
        """The ``batch_dims`` of a batch."""
        return self.options.batch_dims

    def _mapped(
        self, batch: Tree, given: Tensors, tree: Tree, common: Params, take: Callable[..., Any], judged: bool = False
    ) -> Any:
        """``take(result, new_buffers)`` of every member."""
        params = given.trained | given.frozen
        dims = dict.fromkeys(params, 0) | dict.fromkeys(common, None)

        def member(key: Tensor, params: Params, buffers: Params, hparams: Params, tree: Tree) -> Any:
            return take(*self._bound(params, buffers, tree, hparams, lambda: batch, key=key))

        def expanded(dim: int | None, leaf: Any) -> Any:
            return leaf.expand(len(given.keys), *leaf.shape) if dim is None and _may_differentiate(leaf) else leaf

        batch_dims, differentiates = self.dims_of(batch), self._bound.differentiates_shared
        dims_of_leaves = over(lambda dim, x: 0 if differentiates and _may_differentiate(x) else dim, batch_dims, tree)
        if differentiates:
            self._made.need()
            tree = over(expanded, batch_dims, tree)
        run = vmap_routed(member, (0, dims, 0, 0, dims_of_leaves), self._made)
        with autocasting(given.keys.device, None if judged else self.options.autocast):
            return run(given.keys, params | common, given.buffers, given.hparams, tree)

    def compute(self, given: Tensors, batch: Tree, common: Params, **how: Any) -> Any:
        """The results of all members, in groups if they are to run so."""
        self.rehearse(given, batch, common)
        if not torch.compiler.is_compiling():
            self._bound.assigned = [] if self.oracle.is_comparing else None
        run = functools.partial(self._run, batch, common=common)
        calls = self.oracle.as_one_call(run, len(given.keys))
        results = self.chunks(calls or run, given, plain(batch), self.dims_of(batch), **how)
        if calls is not None:
            calls.end()
        self._bound.end_call()
        return results

    def called(self, given: Tensors, batch: Tree, shared: Params, base: Params) -> Any:
        """The results of all members, compared with members alone in some calls."""
        trial, common = None if torch.compiler.is_compiling() else self.oracle(given.keys, plain(batch)), shared | base
        outputs = self.compute(given, batch, common)
        if trial is not None:
            self.compare(trial, given, batch, common, None if given.trained else self._results(outputs, given, common))
        return outputs

    def compare(self, trial: Trial | None, given: Tensors, batch: Tree, common: Params, results: Any = None) -> None:
        """Raise a VerifyError if members alone compute something else, in a call that is compared."""
        if trial is not None:
            case, attributes = self._case(given, batch, common), self._assigned(given)
            trial(case, case.again(same, None, False) if results is None else results | attributes)

    def _assigned(self, given: Tensors) -> dict[str, Params]:
        """What the latest call has assigned to attributes of the model, if it was one of all members."""
        calls, self._bound.assigned = self._bound.assigned or (), None
        return {"attribute": assigned(calls[0], len(given.keys))} if len(calls) == 1 else {}

    def verify(self, given: Tensors, batch: Tree, common: Params, members: Sequence[int]) -> None:
        """Compare a call with these members alone, once more; raises a VerifyError where it differs."""
        if (trial := Oracle(True, self._source[1], self._source[0])(given.keys, plain(batch))) is not None:
            case = self._case(given, batch, common)
            trial(case, case.again(same, None, False), members)

    def _rehearsal(self, given: Tensors, batch: Tree, common: Params) -> None:
        """What a compiler traces, before it does: of the first member, and compared with members alone."""
        part, held = take_batch(self.dims_of(batch), batch, slice(0, 1)), self.oracle.reached(given.keys.device).held
        try:
            self._run(part, tree_map(lambda leaf: leaf[:1].detach().clone(), given), part, common)
            self.compare(self.oracle(given.keys, plain(batch)), given, batch, common)
        finally:
            # A counter counts the steps of the graph.
            held.restore()

    def _case(self, given: Tensors, batch: Tree, common: Params) -> Case:
        """The call, for the oracle."""
        (model, func), options, base = self._source, self.options, self.base

        def measure(model: nn.Module, member: int, cast: Any) -> Any:
            arguments = [model, of_member(self.dims_of(batch), batch, member, cast)]
            if self.takes_hparams:
                arguments.append({name: cast(leaf[member]) for name, leaf in given.hparams.items()})
            return self._read(func(*arguments))

        def again(cast: Any, watch: Any, judged: bool, some: list[int] | None = None) -> Any:
            part, rows = given, batch
            if some is not None:
                part = tree_map(lambda leaf: leaf[some], given)
                rows = take_batch(self.dims_of(batch), batch, torch.tensor(some))
            members, held = Tensors(part.keys, *cast(part[1:])), (cast(base) if judged else {}) | cast(common)
            members = members._replace(trained={k: x.detach().requires_grad_() for k, x in members.trained.items()})
            run = functools.partial(self._run, rows, common=held, judged=judged)
            # By the same lowerings as the call, whatever else could be timed by now.
            with _measured.lending(0), contextlib.nullcontext() if watch is None else self._bound.observed(watch):
                size, self._bound.assigned = watch and len(part.keys), []
                outputs = self.chunks(run, members, cast(plain(rows)), self.dims_of(batch), size=size)
                return self._results(outputs, members, held) | self._assigned(part)

        return Case(
            *(model, (given.trained | given.frozen, given.buffers), base | common, given.keys, measure, again),
            trained=frozenset(given.trained),
            scale=given.scale if isinstance(given.scale, Tensor) else None,
            autocast=options.autocast,
            training=self.training,
            takes_gradients=self.takes_gradients,
            counts=self._bound.counts,
            kept=None if self.keeps is None else self.written if self.keeps else (),
        )


def _may_differentiate(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided


def num_positional(func: Callable[..., Any]) -> int:
    """How many arguments a loss or a metric takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(func).parameters.values())


def check_hparams(names: Iterable[str], known: Set[str], takes_hparams: bool) -> None:
    """Raise a HyperparameterError unless a loss function that ``takes_hparams``, or the model, has numbers of these names."""
    for name in sorted({*names} - known):
        if "." in name or not takes_hparams:
            why = "" if takes_hparams else ", and the loss takes only (model, batch); give it a third argument"
            raise HyperparameterError(f"'{name}' is no number of the model{why}; {numbers_text(known, name)}")


def check(state: TrainState, batch: Tree, known: Shapes, dims: Tree) -> None:
    """Raise a StateError or a BatchError that names what does not fit a model of these shapes and its ``batch_dims``."""
    check_state((state.params, filled(state.buffers, state.hparams)), known)
    check_batch(dims, plain(batch), state.keys.shape[0])
