"""Autograd functions (``torch.autograd.Function``) without a batching rule run for one member after another.

A step differentiates outside of ``vmap``. There a function is applied to the tensors of one member, and autograd calls its
backward pass as for a model alone.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func._types import LoopWarning, RandomnessError, TraceError
from hfta_func.calls.captured import tensors_in, with_tensors
from hfta_func.calls.routing import routed
from hfta_func.calls.validation import inside_array
from hfta_func.rules._function_graphs import apply_to_all

_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_restore: Callable[[], None] | None = None


def install() -> None:
    """Apply the autograd functions of models as this module does."""
    global _restore
    _restore = _torch.replace_apply(_apply, _batch)


def uninstall() -> None:
    """Restore PyTorch's way to apply them."""
    global _restore
    if _restore is not None:
        _restore()
        _restore = None
        _warned.clear()


def _apply(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``function.apply(*args, **kwargs)``."""
    interpreter = _torch.peek_interpreter()
    if interpreter is None:
        if inside_array():
            mode = _routing()
            # One member alone has Python numbers.
            tensors = {id(x): x.item() if mode is not None and mode.is_number(x) else x for x in tensors_in((args, kwargs))}
            args, kwargs = with_tensors((args, kwargs), tensors)
        return original(function, *args, **kwargs)
    if not _has_rule(function) and _torch.is_captured(tensors_in((args, kwargs))):
        return apply_to_all(function, args, kwargs)
    if function.setup_context is not torch.autograd.Function.setup_context:
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return _torch.apply_in_transforms(function, *bound.args, **bound.kwargs)
    if interpreter.key() == _torch.TransformType.Vmap:
        return _one_by_one(function, args, kwargs)
    raise TraceError(
        f"{function.__qualname__} has no setup_context, which PyTorch needs under torch.func.grad and its like; write it, or "
        f"take the gradient with torch.autograd.grad, as gradient penalties do"
    )


def _has_rule(function: Any) -> bool:
    return function.generate_vmap_rule or function.vmap is not torch.autograd.Function.vmap


def _batch(rule: Callable[..., Any], interpreter: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that has ``setup_context``, by its own rule if it has one."""
    if not _has_rule(function):
        return _one_by_one(function, args, kwargs)
    mode = _routing()
    with contextlib.nullcontext() if mode is None or function.generate_vmap_rule else _Undrawn(mode.key):
        return rule(interpreter, function, *args, **kwargs)


class _Undrawn(routed):
    """A mode for rules, which compute with the tensors of all members, for which there is no key."""

    def next_key(self, rate: Any = None) -> Any:
        """Refuse a draw."""
        raise RandomnessError(
            "a vmap staticmethod draws random numbers, and each member has its own; draw them outside of the function and "
            "pass them to it, or write generate_vmap_rule = True"
        )


def _routing() -> routed | None:
    """The mode that routes the noise of the member that is running."""
    return next((mode for mode in reversed(_torch.function_modes()) if isinstance(mode, routed)), None)


def _one_by_one(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to the arguments of each member, below the innermost level of ``vmap``."""
    name, interpreter = function.__qualname__, _torch.current_interpreter()
    _warn_of(function, name)
    level, count = interpreter.level(), interpreter.batch_size()
    given, results = tensors_in((args, kwargs)), []
    noise = _Noise(interpreter, given)
    plain, dims = _torch.unwrap_leaves(given, level)
    with interpreter.lower():
        parts = [[x] * count if dim is None else [*x.unbind(dim)] for x, dim in zip(plain, dims, strict=True)]
        # Copies of the first member's tensors show which ones a function writes. Inference mode would count no writes.
        with torch.inference_mode(False):
            parts = [part if dim is None else [part[0].clone(), *part[1:]] for part, dim in zip(parts, dims, strict=True)]
        versions = [_torch.writes(part[0]) for part in parts]
        written: list[int] = []
        for m in range(count):
            tensors = {id(x): part[m] for x, part in zip(given, parts, strict=True)}
            member_args, member_kwargs = with_tensors((args, kwargs), tensors)
            with noise.of(m, tensors):
                results.append(function.apply(*member_args, **member_kwargs))
            if m == 0:
                written = [i for i, part in enumerate(parts) if _torch.writes(part[0]) != versions[i]]
                if not written and not noise.is_drawn() and all(dim is None for dim in dims):
                    return results[0]
                for i in written:
                    if dims[i] is None:
                        raise RuntimeError(f"vmap: inplace arithmetic of {name} into a tensor that all members share")
                    parts[i][1:] = [x.clone() for x in parts[i][1:]]
        noise.end(name)
        for i in written:
            plain[i].copy_(torch.stack(parts[i]).movedim(0, dims[i]))
        firsts = [(part[0], x) for part, x, dim in zip(parts, given, dims, strict=True) if dim is not None]
        leaves, specs = zip(*map(pytree.tree_flatten, results), strict=True)
        if any(spec != specs[0] for spec in specs):
            raise TraceError(f"{name} returns {results[0]!r} for member 0; it must return as many results for each member")
        return pytree.tree_unflatten([_joined(name, column, firsts, level) for column in zip(*leaves)], specs[0])


def _warn_of(function: Any, name: str) -> None:
    if function in _warned:
        return
    _warned.add(function)
    warnings.warn(
        f"{name} is an autograd function without a batching rule and runs one member after another; write setup_context and "
        f"a vmap staticmethod, or generate_vmap_rule = True, or compute with operators; or silence this with "
        f"warnings.filterwarnings('ignore', category=hfta_func.LoopWarning)",
        LoopWarning,
        stacklevel=5,
    )


def _joined(name: str, column: Sequence[Any], firsts: Sequence[tuple[Tensor, Tensor]], level: int) -> Any:
    """The members' results as one; ``firsts`` are the tensors of the first member, each with that of all members."""
    first, *others = column
    if not isinstance(first, Tensor):
        if all(other is first or (other == first) is True for other in others):
            return first
        raise TraceError(f"{name} returns {first!r} for member 0 and other values for others; return a tensor instead")
    for part, whole in firsts:
        # What is returned as it was given, or as a view of it that has no history, is the array that was given.
        if part is first or (not first.requires_grad and _is_same(part, first)):
            return whole
    if any(other.shape != first.shape for other in others):
        raise TraceError(
            f"{name} returns tensors whose shapes depend on values, and each member has its own; keep all entries and mask "
            f"them (torch.where, masks)"
        )
    return _torch.add_batch_dim(torch.stack(column), 0, level)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same view of one storage."""
    return _torch.is_alias(x, y) and (x.shape, x.stride(), x.storage_offset()) == (y.shape, y.stride(), y.storage_offset())


class _Noise:
    """The draws of members that run one after another: by their keys, or as their level of ``vmap`` lets them draw."""

    def __init__(self, interpreter: Any, given: Sequence[Tensor]):
        self._mode = mode = _routing()
        self._numbers = [id(x) for x in given if mode is not None and mode.is_number(x)]
        self._level, self._randomness, count = interpreter.level(), interpreter.randomness(), interpreter.batch_size()
        state = (None, None) if mode is None else (mode.key, mode.skipped)
        plain, dims = _torch.unwrap_leaves(state, self._level)
        with interpreter.lower():
            unbound = [[x] * count if dim is None else x.unbind(dim) for x, dim in zip(plain, dims, strict=True)]
        self._keys, self._skipped = unbound
        self._modes: list[routed] = []
        self._before = torch.default_generator.get_state()

    def of(self, member: int, tensors: Mapping[int, Tensor]) -> contextlib.AbstractContextManager[Any]:
        """A context in which a member draws, with its ``tensors`` for those given."""
        if self._randomness == "same":
            torch.default_generator.set_state(self._before)
        if self._mode is None:
            return contextlib.nullcontext()
        mode = self._mode.again(self._keys[member], self._mode.site, [tensors[key] for key in self._numbers])
        mode.skipped = self._skipped[member]
        self._modes.append(mode)
        return mode

    def is_drawn(self) -> bool:
        """Whether the first member has drawn."""
        by_key = self._mode is not None and self._modes[0].site != self._mode.site
        return by_key or not torch.equal(torch.default_generator.get_state(), self._before)

    def end(self, name: str) -> None:
        """Go on behind the call sites of all members; raises a RuntimeError if a draw was not routed to the keys."""
        if self._mode is not None and self._mode.key is not None:
            site = max(mode.site for mode in self._modes)
            # A member that has drawn less than another one has skipped sites.
            skipped = [site - mode.site + (0 if mode.skipped is None else mode.skipped) for mode in self._modes]
            if any(isinstance(count, Tensor) or count for count in skipped):
                counts = [torch.as_tensor(count, device=self._mode.key.device) for count in skipped]
                self._mode.skipped = _torch.add_batch_dim(torch.stack(counts), 0, self._level)
            self._mode.site = site
        if self._randomness == "error" and not torch.equal(torch.default_generator.get_state(), self._before):
            torch.default_generator.set_state(self._before)
            raise RuntimeError(f"vmap: called random operation while in randomness error mode: {name}")
