"""Autograd functions (``torch.autograd.Function``) without a batching rule run for one member after another.

A step differentiates outside of ``vmap``. There a function is applied to the tensors of one member, and autograd calls its
backward pass as for a model alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import warn
from hfta_func.calls.captured import tensors_in, with_tensors
from hfta_func.calls.made import made_for_each
from hfta_func.calls.rewrites import lowered
from hfta_func.calls.routing import routed
from hfta_func.errors import LoopWarning, RandomnessError, TraceError
from hfta_func.rules._function_graphs import apply_to_all

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def inside_array() -> bool:
    """Whether the code of a member is running in this thread."""
    return any(isinstance(mode, lowered | routed) for mode in _torch.function_modes())


def applied() -> contextlib.AbstractContextManager[None]:
    """A context in which the autograd functions of models are applied as this module does."""
    _warned.clear()
    return _torch.apply_replaced(_apply, _batch)


def _apply(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``function.apply(*args, **kwargs)``."""
    interpreter = _torch.peek_interpreter()
    if interpreter is None:
        if inside_array():
            mode = _routing()
            # One member alone has Python numbers.
            tensors = {
                id(x): x.item() if mode is not None and mode.is_number(x) else x for x in tensors_in((args, kwargs))
            }
            args, kwargs = with_tensors((args, kwargs), tensors)
        return original(function, *args, **kwargs)
    if _torch.is_derivative_of_operator():
        # PyTorch writes the derivatives of custom operators as autograd functions.
        return _torch.apply_at_level(function, *args, **kwargs)
    if not _has_rule(function) and _torch.is_captured(tensors_in((args, kwargs))):
        return apply_to_all(function, args, kwargs)
    is_mapped = interpreter.key() == _torch.TransformType.Vmap
    if function.setup_context is not Function.setup_context:
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        if function.generate_vmap_rule or not is_mapped:
            function = _writing(function)
        return _torch.apply_in_transforms(function, *bound.args, **bound.kwargs)
    if is_mapped:
        return _one_by_one(function, args, kwargs)
    raise TraceError(
        f"{function.__qualname__} has no setup_context, which PyTorch needs under torch.func.grad and its like; write it, or "
        f"take the gradient with torch.autograd.grad, as gradient penalties do"
    )


def _has_rule(function: Any) -> bool:
    return function.generate_vmap_rule or function.vmap is not Function.vmap


def _batch(rule: Callable[..., Any], interpreter: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that has ``setup_context``, by its own rule if it has one."""
    if not _has_rule(function):
        return _one_by_one(function, args, kwargs)
    mode = _routing()
    with contextlib.nullcontext() if mode is None or function.generate_vmap_rule else _Undrawn(mode.key):
        return rule(interpreter, function, *args, **kwargs)


@functools.cache
def _writing(function: Any) -> Any:
    """A function whose backward pass PyTorch calls for all members, which may write into tensors that it makes."""
    if function.backward is Function.backward:
        return function

    def backward(ctx: Any, *grads: Any) -> Any:
        with made_for_each((grads, ctx.saved_tensors)):
            return function.backward(ctx, *grads)

    members = {"backward": staticmethod(backward), "__qualname__": function.__qualname__}
    return type(function.__name__, (function,), members)


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
    name, interpreter, mode = function.__qualname__, _torch.current_interpreter(), _routing()
    _warn_of(function)
    level, count = interpreter.level(), interpreter.batch_size()
    given = [*{id(x): x for x in tensors_in((args, kwargs))}.values()]
    noise = () if mode is None else (mode.key, mode.skipped)
    plain, dims = _torch.unwrap_leaves([*given, *noise], level)
    before = torch.default_generator.get_state()
    results, modes = [], []
    with interpreter.lower():
        parts = [[x] * count if dim is None else [*x.unbind(dim)] for x, dim in zip(plain, dims, strict=True)]
        # Copies of the first member's tensors show which ones a function writes. Inference mode would count no writes.
        firsts = [part[0] for part in parts[: len(given)]]
        with torch.inference_mode(False):
            for part in parts[: len(given)]:
                part[0] = part[0].clone()
        versions = [_torch.writes(part[0]) for part in parts[: len(given)]]
        written, counted = list[int](), list[bool]()
        for m in range(count):
            tensors: dict[int, Any] = {id(x): part[m] for x, part in zip(given, parts, strict=False)}
            with _drawing(mode, [part[m] for part in parts[len(given) :]], given, tensors) as inner:
                member_args, member_kwargs = with_tensors((args, kwargs), dict(tensors))
                results.append(function.apply(*member_args, **member_kwargs))
            modes.append(inner)
            if m == 0:
                counted = [_torch.writes(part[0]) != version for part, version in zip(parts, versions, strict=False)]
                written = [i for i, first in enumerate(firsts) if counted[i] or _is_written_unseen(first, parts[i][0])]
                for i in written:
                    parts[i][1:] = [x.clone() for x in parts[i][1:]]
        if interpreter.randomness() != "different" and not torch.equal(torch.default_generator.get_state(), before):
            torch.default_generator.set_state(before)
            raise RuntimeError(f"vmap: called random operation while in randomness error mode: {name}")
        if mode is not None:
            _go_on(mode, modes, level)
        for i in written:
            # A write into .data leaves no trace for autograd, and so must its copy.
            target, rows = (plain[i], parts[i]) if counted[i] else (plain[i].data, [x.data for x in parts[i]])
            if dims[i] is not None:
                target.copy_(torch.stack(rows).movedim(0, dims[i]))
            elif count > 1 and all(torch.equal(x, rows[0]) for x in rows):
                target.copy_(rows[0])
            else:
                raise RuntimeError("vmap: inplace arithmetic into a tensor that all members share")
        leaves, specs = zip(*map(pytree.tree_flatten, results), strict=True)
        if any(spec != specs[0] for spec in specs):
            raise TraceError(
                f"{name} returns {results[0]!r} for member 0; it must return as many results for each member"
            )
        pairs = [(part[0], x) for x, part in zip(given, parts, strict=False)]
        joined = [_joined(name, column, pairs, level) for column in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, specs[0])


def _is_written_unseen(first: Tensor, copy: Tensor) -> bool:
    """Whether a function has written a copy through ``.data``, which no count of writes shows."""
    if first.is_meta or first.layout != torch.strided or _torch.peek_interpreter() is not None:
        return False
    return not bool(torch.isclose(first.data, copy.data, 0, 0, equal_nan=True).all())


def _warn_of(function: Any) -> None:
    # A compiled step, which is rehearsed for one member, runs all members at once.
    if function not in _warned and not rehearsing.get():
        _warned.add(function)
        warn(
            f"{function.__qualname__} is an autograd function without a batching rule and runs one member after another; "
            f"write setup_context and a vmap staticmethod, or generate_vmap_rule = True, or compute with operators; or "
            f"silence this with warnings.filterwarnings('ignore', category=hfta_func.errors.LoopWarning)",
            LoopWarning,
        )


def _drawing(mode: routed | None, noise: Sequence[Any], given: Sequence[Tensor], tensors: dict[int, Tensor]) -> Any:
    """A context in which a member, which has these tensors for those given, draws from its key."""
    if mode is None:
        return contextlib.nullcontext()
    key, skipped = noise
    inner = mode.again(key, mode.site, [tensors[id(x)] for x in given if mode.is_number(x)])
    inner.skipped = skipped
    return inner


def _go_on(mode: routed, modes: Sequence[routed], level: int) -> None:
    """Let the members' mode go on behind the call sites of all members; one that has drawn less has skipped sites."""
    site = max(inner.site for inner in modes)
    skipped = [site - inner.site + (0 if inner.skipped is None else inner.skipped) for inner in modes]
    if mode.key is not None and any(isinstance(number, Tensor) or number for number in skipped):
        numbers = [torch.as_tensor(number, device=mode.key.device) for number in skipped]
        mode.skipped = _torch.add_batch_dim(torch.stack(numbers), 0, level)
    mode.site = site


def _joined(name: str, column: Sequence[Any], firsts: Sequence[tuple[Tensor, Tensor]], level: int) -> Any:
    """The members' results as one; ``firsts`` are the tensors given for the first member, each with that for all."""
    first, *others = column
    if not isinstance(first, Tensor):
        if all(other is first or (other == first) is True for other in others):
            return first
        raise TraceError(f"{name} returns {first!r} for member 0 and other values for others; return a tensor instead")
    for part, whole in firsts:
        # What is returned as it was given, or without a history as a view of all of it, is the array that was given.
        if part is first or (
            not first.requires_grad and _torch.is_alias(part, first) and _layout(part) == _layout(first)
        ):
            return whole
    if any(other.shape != first.shape for other in others):
        raise TraceError(
            f"{name} returns tensors whose shapes depend on values, and each member has its own; keep all entries and mask "
            f"them (torch.where, masks)"
        )
    return _torch.add_batch_dim(torch.stack(list(column)), 0, level)


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()
