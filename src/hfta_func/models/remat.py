"""Activation checkpointing: parts of a model keep their inputs only, and run again when the backward pass comes to them.

Public: :func:`checkpoint_segments`, :func:`blocks`.

The gradient is taken outside ``vmap``, so a part is checkpointed there as well: at its boundary the call leaves the
levels of ``vmap`` and hands plain tensors ``[M, ...]`` to :func:`torch.utils.checkpoint.checkpoint`, whose function
enters the levels again. It can then be run again after the levels it was first called in have ended.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfta_func._errors import StateError
from hfta_func._torch import (
    TransformType,
    current_interpreter,
    function_modes,
    interpreters,
    pytree,
    reparametrized,
    restore_vmap,
    unwrap_leaves,
    wrap_leaves,
    writes,
)
from hfta_func.calls.routing import routed


def checkpoint_segments(model: nn.Module, chosen: bool | Sequence[str]) -> None:
    """Have submodules of ``model`` compute their activations again in the backward pass.

    Args:
        model: A model of one's own: the submodules' ``forward`` is replaced.
        chosen: Paths of submodules; True is the blocks of the model, see :func:`make_train_step`.

    Raises:
        ValueError: if there is no such submodule, or it is a mere container that is never called.
    """
    if isinstance(chosen, bool):
        paths = blocks(model) if chosen else []
    else:
        paths = [chosen] if isinstance(chosen, str) else chosen
        known = [path for path, module in model.named_modules(remove_duplicate=False) if path and _is_callable(module)]
        for path in paths:
            if path and path not in known:
                examples = difflib.get_close_matches(path, known, cutoff=0.0) or ["the model itself, ''"]
                raise ValueError(
                    f"checkpoint names '{path}', which is no submodule that the model calls; name others, such as "
                    f"{', '.join(map(repr, examples))}, or pass True for the blocks of the model"
                )
    segments = {model.get_submodule(path): path for path in paths}
    for segment, path in segments.items():
        segment.forward = _recomputing(segment, path)


def blocks(model: nn.Module) -> list[str]:
    """Paths of the outermost elements of containers that have children; else of the parts that have; else of the model."""
    parts = [name for name, child in model.named_children() if _is_block(child)]
    return list(_elements(model, "")) or parts or [""]


def _elements(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and _is_block(child):
            yield prefix + name
        else:
            yield from _elements(child, f"{prefix}{name}.")


def _is_block(module: nn.Module) -> bool:
    return _is_callable(module) and next(module.children(), None) is not None


def _is_callable(module: nn.Module) -> bool:
    """Whether there is a ``forward``: a ModuleList has none, its elements are called."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _recomputing(segment: nn.Module, path: str) -> Callable[..., Any]:
    """The forward of a segment, checkpointed."""
    forward = segment.forward

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        # A graph's memory is the compiler's to plan, and the backward pass of torch.func.grad cannot run Python.
        if torch.compiler.is_compiling() or not _only_vmap():
            return forward(*args, **kwargs)
        mode = next(mode for mode in reversed(function_modes()) if isinstance(mode, routed))
        site, out_spec = mode.site, None
        params, buffers = dict(segment.named_parameters()), dict(segment.named_buffers())
        # The first run writes the buffers as any call does; the next ones start from what it found.
        found = {name: buffer.clone() for name, buffer in buffers.items()}
        leaves, spec = pytree.tree_flatten((mode.key, params, found, args, kwargs))

        def run(*leaves: Any) -> tuple[Any, ...]:
            nonlocal out_spec
            key, params, found, args, kwargs = pytree.tree_unflatten(leaves, spec)
            # Levels are numbered by depth, so tensors of the surrounding levels belong to those of the first run as well.
            own = buffers if out_spec is None else {name: buffer.clone() for name, buffer in found.items()}
            tensors = {**params, **own}
            with routed(key, site) as inner, reparametrized(segment, tensors, tie_weights=True):
                output = forward(*args, **kwargs)
            replaced = {name: tensors[name] for name, buffer in own.items() if tensors[name] is not buffer}
            outputs, out_spec = pytree.tree_flatten((output, replaced, inner.site))
            return tuple(outputs)

        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [writes(leaf) for leaf in inputs]
        outputs = _outside_vmap(run, tuple(leaves), keyed=mode.key is not None)
        if versions != [writes(leaf) for leaf in inputs]:
            where = f"'{path}'" if path else "the model"
            raise StateError(
                f"{where} ({type(segment).__qualname__}) writes its input in place, so it cannot run again from it; leave it "
                f"out of checkpoint, or let its first operation make a new tensor, e.g. ReLU(inplace=False)"
            )
        assert out_spec is not None
        output, replaced, mode.site = pytree.tree_unflatten(outputs, out_spec)
        for name, buffer in replaced.items():
            owner, _, attribute = name.rpartition(".")
            setattr(segment.get_submodule(owner), attribute, buffer)
        return output

    return recomputing


def _outside_vmap(run: Callable[..., tuple[Any, ...]], leaves: tuple[Any, ...], keyed: bool) -> tuple[Any, ...]:
    """``run(*leaves)``, checkpointed below every level of ``vmap``."""
    if interpreters() is None:
        if any(isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves):
            # XLA, too, compiles the step as a whole, and would merge the two runs.
            return run(*leaves)
        # Noise from keys is the same again by itself; PyTorch's generator has to be set back.
        return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=not keyed)
    interpreter = current_interpreter()
    level = interpreter.level()
    # [N, ...] of each member -> [M, N, ...] and its dim, or [N, ...] and None where members share it
    plain, dims = unwrap_leaves(leaves, level)
    mapped = restore_vmap(run, dims, interpreter.batch_size(), interpreter.randomness())
    with interpreter.lower():
        outputs, out_dims = _outside_vmap(mapped, plain, keyed)
    return wrap_leaves(outputs, out_dims, level)


def _only_vmap() -> bool:
    """Whether every transform around this call is a ``vmap``."""
    return all(interpreter.key() == TransformType.Vmap for interpreter in interpreters() or ())
