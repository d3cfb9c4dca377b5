"""Tensors that a model makes in a call and then writes members' values into.

``out = torch.zeros(6, 8)`` makes one tensor for all members, into which ``out[:, :4] = self.layer(x)`` cannot write a value
per member. So the function runs again, and from then on each member gets its own of the tensors that the function makes;
and if that is not enough, once more with its own copy of what members share of the batch, which stays one otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import constant_to_compiler
from hfta_func.calls.body import Diverged, Mode


class MadeCalls:
    """Whether each member gets its own of the tensors that a function makes, because members' values are written into one."""

    _level = 0

    def need(self) -> None:
        """Give each member its own from now on."""
        self._level = max(self._level, 1)

    def within(self, func: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
        """``func``, for a ``vmap`` with these ``in_dims``."""

        def member(*args: Any, **kwargs: Any) -> Any:
            if not self.is_needed():
                return func(*args, **kwargs)
            with _made(_mapped_leaf(args, in_dims) if torch.compiler.is_compiling() else batched_in((args, kwargs))):
                return func(*args, **kwargs)

        return member

    def retried(self, run: Callable[[], Any], is_written: Callable[[], bool]) -> Any:
        """``run()``, and again with such tensors, then with copies of the batch, if it fails and has written no argument."""
        start = self._level
        for self._level in range(start, 3):
            try:
                return run()
            except RuntimeError as error:
                if isinstance(error, Diverged | torch.OutOfMemoryError) or (self._level == start and is_written()):
                    raise
                if self._level == 2:
                    self._level = start
                    raise

    @constant_to_compiler
    def is_needed(self) -> bool:
        """Whether it is so."""
        return self._level > 0

    @constant_to_compiler
    def shares_batch(self) -> bool:
        """Whether what members share of the batch stays one nevertheless."""
        return self._level == 1


class _made(Mode):
    """Gives each member its own of every new tensor."""

    def __init__(self, batched: Tensor | None):
        super().__init__()
        self._true = None if batched is None else batched.new_ones((), dtype=torch.bool)
        self._level = 0 if torch.compiler.is_compiling() else _torch.depth()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        result = func(*args, **kwargs)
        if self._true is None or not isinstance(result, Tensor):
            return result
        if not torch.compiler.is_compiling() and (_torch.depth() < self._level or batched_in([result]) is not None):
            return result
        return torch.where(self._true, result, result) if _makes(func) else result


_MAKERS = frozenset("arange as_tensor clone empty eye full linspace logspace new ones tensor zeros".split())


@constant_to_compiler
def _makes(func: Any) -> bool:
    """Whether a function makes a new tensor; an operator has the name of its overload, too, as in ``zeros.default``."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name in _MAKERS or name.endswith("_like") or name.startswith("new_")


def is_making() -> bool:
    """Whether each member gets its own of new tensors around this call."""
    return any(isinstance(mode, _made) for mode in _torch.function_modes())


def making(tensors: Any) -> Mode:
    """A block, a part that runs once more in the backward pass, in which each member gets its own of new tensors."""
    return _made(batched_in(tensors))


def making_for_each(run: Callable[[], Any], tensors: Any) -> Any:
    """``run()``, a pass of an autograd function of these tensors, and once more with such tensors if it fails."""
    try:
        return run()
    except RuntimeError:
        with making(tensors):
            return run()


def batched_in(tree: Any) -> Tensor | None:
    """A tensor that is mapped over at a level of ``vmap``."""
    for tensor in tensors_in(tree):
        inside = tensor
        while _torch.is_wrapped(inside):
            if _torch.is_batched(inside):
                return tensor
            inside = _torch.get_unwrapped(inside)
    return None


REFUSAL = (
    "writes a member's value in place into a tensor that all members share; if the model makes it, make it by a function "
    "such as torch.zeros; otherwise write into a copy, x = x.clone(), or make it a buffer, of which each member has its own"
)


def _mapped_leaf(tree: Any, dims: Any) -> Tensor | None:
    """The first tensor whose entry of ``dims``, one int or a tree of them, is not None."""
    flat, spec = _torch.pytree.tree_flatten(tree)
    axes = _torch.broadcast_prefix(dims, spec)
    return next((leaf for leaf, dim in zip(flat, axes, strict=True) if dim is not None), None)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
