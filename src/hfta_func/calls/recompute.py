"""Computes results again that the backward pass needs, instead of keeping them.

Autograd keeps every tensor that a derivative reads: an activation stays in memory although it is the GELU of another one that
is kept as well, a normalised row beside the row it was made from. Such a result is replaced by a recipe, the function and its
arguments, if these are in memory anyway, and computed again when its derivative is. Nothing else is repeated, unlike under
rematerialisation, so a step takes hardly longer.

Reference: Andoorveedu et al., "Tempo: Accelerating Transformer-Based Model Training through Memory Footprint Reduction",
NeurIPS 2022, which does so for GELU, layer normalisation and attention by special kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hfta_func import _torch
from hfta_func.calls.draws import spellings
from hfta_func.calls.routing import routed
from hfta_func.errors import StateError

WRITTEN = (
    "a tensor that the backward pass needs was written in place after it was used; write a copy instead, or make the step "
    "without save='less'"
)
_SMALL = 8
"""An argument that is this many times smaller than the result is kept for it."""


class Kept:
    """What a derivative, or a recipe, keeps for a tensor: the tensor itself, or its recipe."""

    __slots__ = ("__weakref__", "_layout", "recipe", "tensor")

    def __init__(self, tensor: Tensor, recipe: Recipe | None):
        # Detached, because a result whose derivative reads it would keep itself alive through its history.
        self.tensor: Any = tensor if recipe is not None else tensor.detach()
        self.recipe: Recipe | None = None
        if recipe is not None:
            self.forget(recipe)

    def forget(self, recipe: Recipe) -> None:
        """Free the tensor, which ``recipe`` computes again."""
        self._layout = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self.tensor, self.recipe = None, recipe
        recipe.wanted += 1

    def get(self) -> Tensor:
        """The tensor."""
        if self.recipe is None:
            return self.tensor
        return self.recipe.take().as_strided(*self._layout)


class Recipe:
    """A call of a function, to be repeated."""

    def __init__(self, call: Callable[..., Tensor], leaves: list[Any], made: Tensor):
        self._call, self._leaves = call, leaves
        self._made = made.size(), made.stride(), made.storage_offset(), made.dtype, made.device
        self._written = [_torch.writes(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self._autocast = autocast_now(made.device.type)
        self._cached: Tensor | None = None
        self.wanted = 0
        """Number of derivatives, and of other recipes, that still need the result."""

    def take(self) -> Tensor:
        """The result for one of those that need it; it is computed once for all of them."""
        made = self._make() if self._cached is None else self._cached
        self.wanted -= 1
        # For the others, which usually follow soon.
        self._cached = made if self.wanted > 0 else None
        return made

    def _make(self) -> Tensor:
        """The result, with the layout that the first one had in its storage."""
        for leaf, written in zip(self._leaves, self._written, strict=True):
            if isinstance(leaf, Tensor) and _torch.writes(leaf) != written:
                raise StateError(WRITTEN)
        leaves = [leaf.get() if isinstance(leaf, Kept) else leaf for leaf in self._leaves]
        with torch.no_grad(), self._autocast():
            made = self._call(*leaves)
        size, stride, offset, dtype, device = self._made
        if (made.size(), made.stride(), made.storage_offset()) == (size, stride, offset):
            return made
        length = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        return torch.empty(length, dtype=dtype, device=device).as_strided(size, stride, offset).copy_(made)


class Recalls:
    """The tensors that a forward pass keeps for the backward pass, and the recipes of those that it can compute again."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.ref[Kept]] = {}
        # A weak reference keeps the number of a storage from being given to another one.
        self._made: dict[int, tuple[Any, int, Recipe]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A block whose derivatives keep recipes where possible."""
        token = _recalls.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, Kept.get):
                yield
        finally:
            _recalls.reset(token)
            # PyTorch keeps the hooks, and so this, with every kept tensor: recipes must not outlive their derivatives.
            self._kept.clear()
            self._made.clear()

    def _pack(self, tensor: Tensor) -> Kept:
        number = _torch.storage_number(tensor)
        kept = Kept(tensor, self._recipe(tensor, number))
        if kept.recipe is None:
            self._kept[number] = weakref.ref(kept)
        return kept

    def _recipe(self, tensor: Tensor, number: int) -> Recipe | None:
        """The recipe of a tensor with this number, if it has not been written since."""
        made = self._made.get(number)
        return made[2] if made is not None and made[1] == _torch.writes(tensor) else None

    def note(self, call: Callable[..., Tensor], leaves: list[Any], result: Tensor) -> None:
        """Keep a recipe for ``result = call(*leaves)`` from now on, if its arguments are in memory anyway."""
        number = _torch.storage_number(result)
        arguments: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if (argument := _torch.storage_number(leaf)) == number:
                    return
                if leaf.nbytes * _SMALL <= result.nbytes or self._is_there(leaf, argument):
                    leaf = leaf.detach()
                elif (recipe := self._recipe(leaf, argument)) is not None:
                    leaf = Kept(leaf, recipe)
                else:
                    return
            arguments.append(leaf)
        recipe = Recipe(call, arguments, result)
        self._made[number] = StorageWeakRef(result.untyped_storage()), _torch.writes(result), recipe
        # The derivative of the call may have kept the result already.
        kept = self._kept.get(number, lambda: None)()
        if kept is not None:
            kept.forget(recipe)

    def _is_there(self, tensor: Tensor, number: int) -> bool:
        """Whether a tensor with this number stays in memory until the backward pass anyway."""
        kept = self._kept.get(number, lambda: None)()
        return (kept is not None and kept.tensor is not None) or (tensor.requires_grad and tensor.is_leaf)


_recalls: contextvars.ContextVar[Recalls | None] = contextvars.ContextVar("recalls", default=None)


def recalls() -> Recalls | None:
    """The :class:`Recalls` of the block that is running."""
    return None if torch.compiler.is_compiling() else _recalls.get()


@contextlib.contextmanager
def unrecalled() -> Iterator[None]:
    """A block of operators that a :class:`Recalls` around it does not change, such as those that run again after its end."""
    token = _recalls.set(None)
    try:
        yield
    finally:
        _recalls.reset(token)


def cheap(func: Callable[..., Tensor], *leaves: Any) -> Tensor:
    """``func(*leaves)`` of plain tensors, which is called again for the backward pass in a block of :class:`Recalls`."""
    result, running = func(*leaves), recalls()
    if running is not None and torch.is_grad_enabled():
        running.note(func, [*leaves], result)
    return result


def autocast_now(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context of autocast as it is now."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext
    return functools.partial(torch.autocast, device, torch.get_autocast_dtype(device), cache_enabled=False)


def routing(key: Tensor | None, numbers: Sequence[Tensor], padding: Any) -> routed:
    """``routed(key)``, or inside a block of :class:`Recalls`, a mode that notes repeatable calls."""
    running = None if numbers or padding is not None else recalls()
    mode = routed(key, numbers=numbers) if running is None else _Noting(key, running)
    mode.padding = padding
    return mode


class _Noting(routed):
    redraws = True

    def __init__(self, key: Tensor | None, recalls: Recalls):
        super().__init__(key)
        # Also where a checkpoint runs a part again, outside the block.
        self._recalls = recalls

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and note its result if it is cheap to recompute."""
        result = super().call(func, args, kwargs)
        if func in _CHEAP and isinstance(result, Tensor):
            self._note(func, (args, kwargs), result)
        return result

    def dropped(self, func: Callable[..., Tensor], *args: Any) -> Tensor:
        """See :class:`routed`; the backward pass makes the result again."""
        result = super().dropped(func, *args)
        # A scale of each member's own is no number for all elements.
        if not isinstance(args[-1], Tensor):
            self._note(func, (args, {}), result)
        return result

    def _note(self, func: Callable[..., Any], given: Any, result: Tensor) -> None:
        if _torch.depth() != self.depth or not torch.is_grad_enabled():
            return
        leaves, spec = optree.tree_flatten(given, none_is_leaf=True)
        if self.depth:
            pairs = [_torch.unwrap_batched(x, self.depth) if isinstance(x, Tensor) else (x, None) for x in leaves]
            leaves, dims = map(list, zip(*pairs, strict=True))
            result, dim = _torch.unwrap_batched(result, self.depth)
            # An elementwise function needs no level of vmap if all arguments have the model axis in one position.
            tensors = (isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves)
            if dim is None or {*itertools.compress(dims, tensors)} != {dim}:
                return

        def call(*leaves: Any) -> Tensor:
            args, kwargs = optree.tree_unflatten(spec, leaves)
            return func(*args, **kwargs)

        self._recalls.note(call, leaves, result)


_ACTIVATIONS = (
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6",
    "selu", "sigmoid", "silu", "softplus", "softsign", "tanh", "tanhshrink",
)  # fmt: skip
_CHEAP = {function for name in _ACTIVATIONS for function, _ in spellings(name)}
"""Elementwise functions whose results cost about as much to compute as to read; batching rules note normalisations."""
