"""``vmap`` with this package's batching rules; training and evaluation steps use :func:`vmap_routed`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch import add_batch_dim, remove_batch_dim, vmap_level, writes
from hfta_func.calls import autodiff
from hfta_func.calls.body import Diverged, user_code_location
from hfta_func.calls.made import MadeCalls, tensors_in
from hfta_func.calls.rewrites import lowered
from hfta_func.errors import HFTAError, TraceError
from hfta_func.rules import _choice
from hfta_func.rules._advice import advice
from hfta_func.rules._install import install, install_for_compiler


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """``torch.func.vmap`` with the batching rules of this package installed.

    Args:
        func: A function of one member's tensors.
        in_dims: The model axis of each input, or ``None`` for an input that all members share.
        out_dims: The model axis of each output.
        randomness: As in ``torch.func.vmap``. Random calls inside :class:`hfta_func.calls.routed` need no flag.
        chunk_size: Number of members that run at once; ``None`` is all of them.

    Returns:
        A function of stacked tensors, which returns stacked outputs.

    Raises:
        TraceError: if ``func`` reads the value of a tensor (``.item()``, ``if tensor``), which differs between members.
        RandomnessError: if ``func`` draws random numbers outside :class:`hfta_func.calls.routed` and
            ``randomness`` is "error".

    Example:
        >>> torch.equal(vmap(torch.dot)(torch.ones(3, 2), torch.ones(3, 2)), torch.full((3,), 2.0))
        True
    """

    def member(*args: Any, **kwargs: Any) -> Any:
        with lowered():
            return func(*args, **kwargs)

    if not torch.compiler.is_compiling():
        functools.update_wrapper(member, func, updated=())
    return _vmap(member, in_dims, out_dims, randomness, chunk_size, None)


def vmap_routed(func: Callable[..., Any], in_dims: Any, made: MadeCalls) -> Callable[..., Any]:
    """``vmap`` of a function that enters :class:`hfta_func.calls.routed` itself; a single member runs without ``vmap``.

    The function must not write its arguments, because it may run a second time. Where members run alone but not as one, it
    raises :class:`Diverged`.
    """
    return _vmap(func, in_dims, 0, "error", None, made)


def _vmap(
    func: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, chunk: int | None, known: MadeCalls | None
) -> Callable[..., Any]:
    routed, made = known is not None, MadeCalls() if known is None else known
    # A vmap that is made while the compiler traces has learned nothing, and is no object that could be asked.
    member = made.within(func, in_dims) if routed or not torch.compiler.is_compiling() else func
    mapped = torch.func.vmap(member, in_dims, out_dims, randomness, chunk_size=chunk)

    def run(args: Any, kwargs: Any) -> Any:
        if kwargs or out_dims != 0 or chunk is not None:
            return mapped(*args, **kwargs)
        # A function that is sent to another process takes along what it names, but for modules.
        return _mapped(member, args, in_dims, randomness, routed and not autodiff.rehearsing.get())

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
                # An export that runs functions as they do eagerly: no end of a compilation will undo settings.
                install()
            else:
                install_for_compiler(_choice.state)
            return mapped(*args, **kwargs)
        install()
        given = [] if routed else [(x, writes(x)) for x in tensors_in((args, kwargs))]
        try:
            return made.retried(lambda: run(args, kwargs), lambda: any(writes(x) != before for x, before in given))
        except torch.OutOfMemoryError:
            raise
        # Nested tensors refuse by a ValueError.
        except (RuntimeError, ValueError) as error:
            if routed and isinstance(error, Diverged):
                raise
            failure = advice(error) or error
            if (
                routed
                and not autodiff.rehearsing.get()
                and (isinstance(failure, TraceError) or not isinstance(failure, HFTAError))
            ):
                alone = _error_of_first(func, args, in_dims)
                if alone is None:
                    is_told = isinstance(failure, TraceError)
                    raise Diverged(None) from (
                        failure if is_told else TraceError(f"{user_code_location(error)} {failure}")
                    )
                failure = advice(alone) or alone
            raise failure from failure.__cause__ or error.__cause__

    return wrapped if torch.compiler.is_compiling() else functools.update_wrapper(wrapped, func, updated=())


def _error_of_first(func: Callable[..., Any], args: Any, in_dims: Any) -> Exception | None:
    """The error of the first member alone, in PyTorch's words; None if it has none."""
    dims = optree.tree_broadcast_prefix(in_dims, args, none_is_leaf=True)
    with torch.enable_grad():
        first = optree.tree_map(lambda x, dim: x if dim is None else x.select(dim, 0), args, dims, none_is_leaf=True)
    try:
        func(*first)
    except (RuntimeError, ValueError) as error:
        return error
    return None


def _mapped(func: Callable[..., Any], args: Any, in_dims: Any, randomness: str, is_alone: bool) -> Any:
    """``torch.func.vmap`` on flat lists, because optree flattens trees much faster than torch's pytree in Python.

    With ``is_alone``, a single member runs without ``vmap``, as fast as a solo run.
    """
    leaves, spec = optree.tree_flatten(args, none_is_leaf=True)
    dims = [in_dims] * len(leaves)
    if not isinstance(in_dims, int):
        with contextlib.suppress(ValueError):
            dims = optree.broadcast_prefix(in_dims, args, none_is_leaf=True)
    count = _num_models(leaves, dims)
    if count is None:
        # PyTorch says what is wrong.
        return torch.func.vmap(func, in_dims, 0, randomness)(*args)

    def flat(leaves: list[Any]) -> tuple[list[Any], Any]:
        outputs, spec_of_outputs = optree.tree_flatten(func(*optree.tree_unflatten(spec, leaves)), none_is_leaf=True)
        for output in outputs:
            if not isinstance(output, Tensor):
                kind = type(output).__qualname__
                raise ValueError(f"a function under vmap must return tensors only, but one output is of type {kind}")
        return outputs, spec_of_outputs

    pairs = [*zip(leaves, dims, strict=True)]
    if count == 1 and is_alone:
        # With their history, in which a function may take gradients under no_grad, too.
        with torch.enable_grad():
            inputs = [leaf if dim is None else _only(leaf, dim) for leaf, dim in pairs]
        outputs, out_spec = flat(inputs)
        return optree.tree_unflatten(out_spec, [output.unsqueeze(0) for output in outputs])
    with vmap_level(count, randomness) as level:
        inputs = [leaf if dim is None else add_batch_dim(leaf, dim % leaf.dim(), level) for leaf, dim in pairs]
        outputs, out_spec = flat(inputs)
        return optree.tree_unflatten(out_spec, [remove_batch_dim(output, level, count, 0) for output in outputs])


def _only(leaf: Tensor, dim: int) -> Tensor:
    return leaf.squeeze(dim) if leaf.layout == torch.strided else leaf.select(dim, 0)


def _num_models(leaves: list[Any], dims: list[Any]) -> int | None:
    """M, or None if something is wrong."""
    mapped = [(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
    fits = all(isinstance(x, Tensor) and isinstance(dim, int) and -x.dim() <= dim < x.dim() for x, dim in mapped)
    sizes = {leaf.shape[dim] for leaf, dim in mapped} if fits else set()
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None
