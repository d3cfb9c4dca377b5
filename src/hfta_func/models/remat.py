"""Rematerialisation: parts of a model keep only their inputs and run again in the backward pass.

The gradient is taken outside ``vmap``, so :func:`torch.utils.checkpoint.checkpoint` must be called there too: at a part's
boundary the call leaves the levels of ``vmap`` with plain tensors ``[M, ...]``, and the checkpointed function enters the
levels again. This way it can run again after the levels it was first called in have ended.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfta_func import _torch
from hfta_func._errors import StateError
from hfta_func._torch import pytree
from hfta_func.calls.routing import routed


def rematerialise(model: nn.Module, chosen: bool | Sequence[str]) -> None:
    """Replace the ``forward`` of submodules, by path or True for :func:`blocks`, to run again in the backward pass."""
    if isinstance(chosen, bool):
        paths = blocks(model) if chosen else []
    else:
        paths = [chosen] if isinstance(chosen, str) else chosen
        known = [path for path, module in model.named_modules(remove_duplicate=False) if path and _is_callable(module)]
        for path in paths:
            if path and path not in known:
                others = ", ".join(map(repr, difflib.get_close_matches(path, known, cutoff=0.0))) or "'' (the model)"
                raise ValueError(
                    f"checkpoint names '{path}', which is not a submodule that the model calls; name others, such as "
                    f"{others}, or pass True for the blocks of the model"
                )
    parts = {model.get_submodule(path): path for path in paths}
    for part, path in parts.items():
        part.forward = _rematerialised(part, path)


def blocks(model: nn.Module) -> list[str]:
    """Paths of the blocks of a model, as :func:`make_train_step` defines them."""
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


def _rematerialised(part: nn.Module, path: str) -> Callable[..., Any]:
    """The forward of a part that keeps only its inputs."""
    forward = part.forward

    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        # The compiler plans the memory of a graph, and the backward pass of torch.func.grad cannot run Python.
        if torch.compiler.is_compiling() or not _only_vmap():
            return forward(*args, **kwargs)
        mode = next(mode for mode in reversed(_torch.function_modes()) if isinstance(mode, routed))
        site, out_spec = mode.site, None
        params, buffers = dict(part.named_parameters()), dict(part.named_buffers())
        # The first run updates the buffers; later runs start from copies of what the first one found.
        found = {name: buffer.clone() for name, buffer in buffers.items()}
        leaves, spec = pytree.tree_flatten((mode.key, params, found, args, kwargs))

        def run(*leaves: Any) -> tuple[Any, ...]:
            nonlocal out_spec
            key, params, found, args, kwargs = pytree.tree_unflatten(leaves, spec)
            # Levels are numbered by depth, so tensors of the surrounding levels also fit those of the first run.
            own = buffers if out_spec is None else {name: buffer.clone() for name, buffer in found.items()}
            tensors = {**params, **own}
            with routed(key, site) as inner, _torch.reparametrized(part, tensors, tie_weights=True):
                output = forward(*args, **kwargs)
            replaced = {name: tensors[name] for name, buffer in own.items() if tensors[name] is not buffer}
            outputs, out_spec = pytree.tree_flatten((output, replaced, inner.site))
            return tuple(outputs)

        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [_torch.writes(leaf) for leaf in inputs]
        outputs = _outside_vmap(run, tuple(leaves), keyed=mode.key is not None)
        if versions != [_torch.writes(leaf) for leaf in inputs]:
            where = f"'{path}'" if path else "the model"
            raise StateError(
                f"{where} ({type(part).__qualname__}) writes its input in place, so it cannot run again from that input; "
                f"leave it out of checkpoint, or let its first operation make a new tensor, e.g. ReLU(inplace=False)"
            )
        assert out_spec is not None
        output, replaced, mode.site = pytree.tree_unflatten(outputs, out_spec)
        for name, buffer in replaced.items():
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, buffer)
        return output

    return rematerialised


def _outside_vmap(run: Callable[..., tuple[Any, ...]], leaves: tuple[Any, ...], keyed: bool) -> tuple[Any, ...]:
    """``run(*leaves)``, checkpointed outside all levels of ``vmap``."""
    if _torch.interpreters() is None:
        if any(isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves):
            # XLA compiles the whole step and would merge the two runs.
            return run(*leaves)
        # Noise from keys repeats by itself; PyTorch's generator must be set back.
        return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=not keyed)
    interpreter = _torch.current_interpreter()
    level = interpreter.level()
    # [N, ...] of each member -> [M, N, ...] and its dim, or [N, ...] and None where members share it
    plain, dims = _torch.unwrap_leaves(leaves, level)
    mapped = _torch.restore_vmap(run, dims, interpreter.batch_size(), interpreter.randomness())
    with interpreter.lower():
        outputs, out_dims = _outside_vmap(mapped, plain, keyed)
    return _torch.wrap_leaves(outputs, out_dims, level)


def _only_vmap() -> bool:
    """Whether every transform around this call is a ``vmap``."""
    return all(interpreter.key() == _torch.TransformType.Vmap for interpreter in _torch.interpreters() or ())
