"""Rematerialisation: parts of a model keep only their inputs and run again in the backward pass.

The gradient is taken outside ``vmap``, so :func:`torch.utils.checkpoint.checkpoint` must be called there too: at a part's
boundary the call leaves the levels of ``vmap`` with plain tensors ``[M, ...]``, and the checkpointed function enters the
levels again. This way it can run again after the levels it was first called in have ended.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func.calls import made
from hfta_func.calls.autodiff import only_vmap
from hfta_func.calls.recompute import unrecalled
from hfta_func.calls.routing import routed
from hfta_func.models.sizes import PRESENT


def rematerialise(model: nn.Module, chosen: bool | Sequence[str]) -> None:
    """Replace the ``forward`` of submodules, by path or True for :func:`blocks`, to run again in the backward pass."""
    paths = [chosen] if isinstance(chosen, str) else (blocks(model) if chosen is True else chosen or [])
    known = {path: module for path, module in model.named_modules(remove_duplicate=False) if _is_callable(module)}
    for path in paths:
        if path not in known:
            others = ", ".join(map(repr, blocks(model)))
            raise ValueError(f"checkpoint names '{path}', which the model does not call; its blocks are {others}")
    for part in {known[path] for path in paths}:
        part.forward = functools.partial(_checkpoint, part.forward)


def blocks(model: nn.Module) -> list[str]:
    """Paths of the blocks of a model, as defined in :func:`make_train_step`."""
    children = [name for name, child in model.named_children() if _is_block(child)]
    return list(_elements(model, "")) or children or [""]


def _elements(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and _is_block(child):
            yield prefix + name
        else:
            yield from _elements(child, f"{prefix}{name}.")


def _is_block(module: nn.Module) -> bool:
    return _is_callable(module) and next(module.children(), None) is not None


def _is_callable(module: nn.Module) -> bool:
    """Whether the module has a ``forward``; a ModuleList has none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


Fixed = frozenset[tuple[int, str]]
"""Shared buffers, which no call may write, by the identity of their module and their name in it."""

_Running = tuple[nn.Module, list[bool], Fixed]
_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("running", default=None)
_Around = Callable[[Callable[..., tuple[Any, ...]], tuple[Any, ...], Callable[[], list[Any]]], Sequence[Any]]
_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@contextlib.contextmanager
def checkpoints_of(model: nn.Module, fixed: Fixed) -> Iterator[list[bool]]:
    """A block in which rematerialisation and the model's calls of :func:`torch.utils.checkpoint.checkpoint` work.

    Args:
        model: The model that is called.
        fixed: Its buffers that the second run need not copy.

    Yields:
        A list that gets an entry for each call of ``checkpoint`` by the model.
    """
    _torch.intercept_checkpoint(_checkpoint)
    calls: list[bool] = []
    token = _running.set((model, calls, fixed))
    try:
        yield calls
    finally:
        _running.reset(token)


@functools.cache
def _elsewhere() -> Callable[..., Any]:
    return torch.compiler.disable(_torch.checkpoint)


@_torch.constant_to_compiler
def trace_through_checkpoint() -> bool:
    """Make the current compilation ignore ``checkpoint``, because a compiled graph plans its memory itself."""
    before = _torch.trace_checkpoint(_traced)
    if before is not _traced:
        _torch.until_compiled(lambda: _torch.trace_checkpoint(before))
    return True


def _traced(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # A graph inside a graph would be traced without the mode that routes noise.
    return args[0].call_function(tx, args[1:], {name: kwargs[name] for name in kwargs if name not in _OPTIONS})


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The replacement of ``torch.utils.checkpoint.checkpoint``, inside and outside of models."""
    if torch.compiler.is_compiling():
        # The compiler plans the memory of a graph.
        return function(*args, **kwargs)
    running = _running.get()
    if running is None:
        return _elsewhere()(function, *args, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    owner = getattr(function, "__self__", function)
    model, calls, fixed = running
    part = owner if isinstance(owner, nn.Module) else model
    # The backward pass of torch.func.grad cannot run Python.
    if not only_vmap() or tables_with_max_norm(part):
        return function(*args, **kwargs)
    calls.append(True)
    # A reentrant checkpoint would run one backward pass for all members; the gradients are the same without.
    options.pop("use_reentrant", None)
    # Noise from keys repeats by itself; PyTorch's generator must be set back.
    options = options if _mode().key is None else {**options, "preserve_rng_state": False}
    is_making, has_run = made.is_making(), False

    def around(run: Callable[..., Any], leaves: tuple[Any, ...], before: Any) -> Sequence[Any]:
        def once(*leaves: Any) -> Any:
            nonlocal has_run
            # A backward pass may run in another thread.
            making = made.making(leaves) if is_making and has_run else contextlib.nullcontext()
            with making, unrecalled(), checkpoints_of(part, fixed):
                outputs = run(*leaves)
            has_run = True
            return outputs

        return _outside_vmap(once, leaves, options)

    return run_apart(part, function, args, kwargs, around)


def tables_with_max_norm(model: nn.Module) -> tuple[str, ...]:
    """The paths of look-up tables that shorten rows in place when they read them, once and for all members."""
    # A parametrisation may have a largest norm and no weight.
    limited = [module for module in model.modules() if getattr(module, "max_norm", None) is not None]
    tables = {id(module.weight) for module in limited if hasattr(module, "weight")}
    return tuple(path for path, parameter in model.named_parameters() if id(parameter) in tables)


def _mode() -> routed:
    return next(mode for mode in reversed(_torch.function_modes()) if isinstance(mode, routed))


def _fixed() -> Fixed:
    running = _running.get()
    return frozenset() if running is None else running[2]


def _may_write(part: nn.Module, path: str, fixed: Fixed) -> bool:
    """Whether calls write a buffer."""
    owner, _, name = path.rpartition(".")
    return name != PRESENT and (id(part.get_submodule(owner)), name) not in fixed


def run_apart(part: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], around: _Around) -> Any:
    """``forward(*args, **kwargs)``, which uses the tensors of ``part``, as a function of all tensors that it reads.

    ``around(run, leaves, before)`` calls ``run(*leaves)`` and returns its results. ``before()`` is then what was in their
    place: the leaves of the first argument, buffers, and how many call sites have drawn nothing, the part's own included.
    """
    mode, fixed, reached = _mode(), _fixed(), []
    padding, site, position = mode.padding, mode.site, getattr(mode.padding, "position", 0)
    buffers = dict(part.named_buffers())
    tensors = {**dict(part.named_parameters()), **buffers}
    # The part writes into copies, because it may run again.
    written = [path for path in buffers if _may_write(part, path, fixed) and not mode.is_number(buffers[path])]
    size = getattr(padding, "size", None)
    leaves, spec = pytree.tree_flatten((mode.key, mode.skipped, size, tensors, args, kwargs))
    numbers = [number for number, leaf in enumerate(leaves) if mode.is_number(leaf)]

    def run(*leaves: Any) -> tuple[Any, ...]:
        key, skipped, size, tensors, args, kwargs = pytree.tree_unflatten([*leaves], spec)
        tensors |= {path: tensors[path].clone() for path in written}
        used = {**tensors}
        with mode.again(key, site, [leaves[number] for number in numbers]) as inner:
            inner.skipped, inner.padding = skipped, None if padding is None else padding.again(size, position)
            with _torch.reparametrized(part, used, tie_weights=True):
                output = forward(*args, **kwargs)
        after = {path: tensor for path, tensor in used.items() if path in written or tensor is not tensors[path]}
        outputs, out_spec = pytree.tree_flatten((output, after, inner.skipped))
        reached[:] = out_spec, [*after], inner.site, getattr(inner.padding, "position", 0)
        return tuple(outputs)

    def before() -> list[Any]:
        passed = reached[2] - site if mode.key is not None else 0
        skipped = torch.tensor(passed) + (0 if mode.skipped is None else mode.skipped) if passed else mode.skipped
        return [*pytree.tree_leaves(args[0]), *(tensors[path] for path in reached[1]), skipped]

    # What the mode of the part calls reaches this mode, too, but not where the part runs again.
    mode.is_quiet = True
    try:
        outputs = around(run, tuple(leaves), before)
    finally:
        mode.is_quiet = False
    out_spec, _, mode.site, next_position = reached
    output, after, mode.skipped = pytree.tree_unflatten([*outputs], out_spec)
    if padding is not None:
        padding.position = next_position
    replaced = {id(tensors[path]): tensor for path, tensor in after.items()}
    for held, name in _torch.places_of(part).values() if replaced else ():
        held[name] = replaced.get(id(held[name]), held[name])
    return output


def _outside_vmap(run: Callable[..., Any], leaves: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """``run(*leaves)``, checkpointed outside all levels of ``vmap``."""
    if _torch.interpreters() is None:
        if any(isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves):
            # XLA compiles the whole step and would merge the two runs.
            return run(*leaves)
        return _torch.checkpoint(run, *leaves, use_reentrant=False, **options)
    interpreter = _torch.current_interpreter()
    level = interpreter.level()
    # [N, ...] of each member -> [M, N, ...] and its dim, or [N, ...] and None where members share it
    plain, dims = _torch.unwrap_leaves(leaves, level)
    mapped = _torch.restore_vmap(run, dims, interpreter.batch_size(), interpreter.randomness())
    with interpreter.lower():
        outputs, out_dims = _outside_vmap(mapped, plain, options)
    return _torch.wrap_leaves(outputs, out_dims, level)
