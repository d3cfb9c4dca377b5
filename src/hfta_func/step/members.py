"""How training, evaluation and prediction call one model's function for all members."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hfta_func._torch import (
    can_look,
    constant_to_compiler,
    current_trace,
    inside_transform,
    is_walked,
    set_compiling,
)
from hfta_func._tree import tree_map
from hfta_func._types import Params, Tree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.made import MadeCalls
from hfta_func.rules.vmap import vmap_routed
from hfta_func.step.batch import copied, is_plain, numbered, restored, take_batch
from hfta_func.step.check import unwritten

T = TypeVar("T")


class Members:
    """Maps a function of one member over all of them.

    Args:
        rehearsal: A function that runs members eagerly just before a compiler traces, so that both learn and refuse the same.
    """

    def __init__(self, rehearsal: Callable[..., Any]):
        self._rehearsal = rehearsal
        self._made = MadeCalls()
        self._has_run = False
        self._rehearsed: Callable[[], Any] | None = None

    def vmap(self, member: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
        """``member`` for all members."""
        return vmap_routed(member, in_dims, self._made)

    def is_first(self, keys: Tensor) -> bool:
        """Whether the members have not been called yet, where values can be looked at: eagerly on a CPU, outside transforms.

        To a compiler it is always False; it would compile again once the answer changes.
        """
        return can_look(keys) and not self._has_run and not is_walked()

    def guard(self, keys: Tensor, call: Callable[..., T], *params: Params) -> T:
        """``call(*params)``; raises a StateError if it writes one of them in place, where that can be seen.

        Until :meth:`has_run` it gets copies, so that the caller's parameters are as they were when it is refused.
        """
        if self.is_first(keys):
            params = copied(params)
        with unwritten({path: leaf for tree in params for path, leaf in tree.items()}):
            return call(*params)

    def rehearse(self, *given: Tree) -> None:
        """Make the ``rehearsal`` while a compiler traces, once in each trace, as padded sizes depend on shapes.

        A compiler knows the values of a graph's inputs, in containers that it can take apart, and outside of transforms.
        """
        if torch.compiler.is_dynamo_compiling() and not inside_transform() and is_plain(given):
            if not self._is_rehearsed():
                layout, values = numbered(given)
                self._rehearse(layout, *values)

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
        """Make the ``rehearsal`` where the values are known."""
        self._rehearsal(*given)
        self._rehearsed = weakref.ref(trace) if (trace := current_trace()) is not None else None

    def has_run(self, keys: Tensor) -> None:
        """Note that all members have been called: from now on, parameters are not copied."""
        if can_look(keys) and not is_walked():
            self._has_run = True


def of_first(run: Callable[[Tree, Any, Tree], Any], batch_dims: Tree) -> Callable[[Any, Tree], Any]:
    """A rehearsal for :class:`Members`: ``run(batch, members, batch)`` with what belongs to the first member alone."""

    def rehearse(members: Any, batch: Tree) -> Any:
        batch = take_batch(batch_dims, batch, slice(0, 1))
        return run(batch, tree_map(lambda leaf: leaf[:1].detach().clone(), members), batch)

    return rehearse


def with_batch(func: Callable[..., Any], takes_hparams: bool) -> Callable[..., Any]:
    """``func(model, batch)``, or ``func(model, batch, hparams)``, for :func:`bind`: a function of a plain tree.

    Its argument ``like`` returns the batch whose containers the tree is put back into. A loss or a metric may write its
    batch and its numbers, so it gets copies.
    """

    def call(model: nn.Module, tree: Tree, hparams: Params, like: Callable[[], Tree]) -> Any:
        batch = restored(copied(tree), like())
        return func(model, batch, copied(hparams)) if takes_hparams else func(model, batch)

    return call
