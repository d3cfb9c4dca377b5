"""``vmap`` with this package's batching rules; training and evaluation steps use :func:`vmap_routed`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch import add_batch_dim, default_generators, remove_batch_dim, vmap_level, writes
from hfta_func.calls.as_alone import as_alone
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.control_flow import Diverged
from hfta_func.calls.made import REFUSAL, targets
from hfta_func.calls.modes import Mode
from hfta_func.calls.rewrites import layouts, lowered
from hfta_func.errors import HFTAError, RandomnessError, TraceError
from hfta_func.rules import _choice
from hfta_func.rules._advice import UNROUTED, advice
from hfta_func.rules._aliasing import COPIED, AliasFacts, watched
from hfta_func.rules._install import install, install_for_compiler, no_fallback, settle_layout


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
        functools.update_wrapper(member, func)
    return _vmap(member, in_dims, out_dims, randomness, chunk_size, AliasFacts(), routed=False)


_MODELS_FIRST = AliasFacts()
_MODELS_FIRST.models_first = True


def vmap_routed(func: Callable[..., Any], in_dims: Any, known: AliasFacts) -> Callable[..., Any]:
    """``vmap`` of a function that enters :class:`hfta_func.calls.routed` itself; a single member runs without ``vmap``.

    The function must not write its arguments, because it may run a second time, see :mod:`hfta_func.rules._aliasing`.
    """
    return _vmap(func, in_dims, 0, "error", None, known, routed=True)


def _vmap(
    func: Callable[..., Any],
    in_dims: Any,
    out_dims: Any,
    randomness: str,
    chunk_size: int | None,
    known: AliasFacts,
    routed: bool,
) -> Callable[..., Any]:
    # A vmap that is made while the compiler traces has learned nothing, and is no object that could be asked.
    member = known.made.within(func, in_dims) if routed or not torch.compiler.is_compiling() else func
    mapped = torch.func.vmap(member, in_dims, out_dims, randomness, chunk_size=chunk_size)

    def run(args: Any, kwargs: Any) -> Any:
        with no_fallback():
            with watched(known) as copies:
                if kwargs or out_dims != 0:
                    outputs = mapped(*args, **kwargs)
                else:
                    outputs = _mapped_flat(member, args, in_dims, randomness, chunk_size, known if routed else None)
            return outputs, not known.models_first and copies.is_written()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(mapped, args, kwargs, routed and known.asks)
        install()
        tree: Any = () if routed else (args, kwargs)
        given = [(x, writes(x)) for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]

        def is_written() -> bool:
            return any(writes(x) != before for x, before in given)

        def attempt() -> Any:
            outputs, is_split = run(args, kwargs)
            if is_split:
                if is_written():
                    raise TraceError(
                        "a function under vmap writes its input, and into a view that is a copy here, because members' "
                        "tensors lie apart; copy the input first: x = x.clone()"
                    )
                known.models_first = True
                outputs, _ = run(args, kwargs)
            return outputs

        call = attempt
        if not known.laid_out:
            call = functools.partial(_watched, known, attempt, routed)
            call = functools.partial(_laid_out, known, call, member, args, in_dims) if routed else call
        try:
            try:
                return call()
            except RuntimeError as error:
                if is_written() and "broadcast shape" in str(error):
                    raise TraceError(f"a function under vmap {REFUSAL}") from error
                if isinstance(error, (Diverged, torch.OutOfMemoryError)) or is_written():
                    raise
            return known.made.find(call)
        except RuntimeError as error:
            if routed and isinstance(error, Diverged):
                raise
            alone = routed and not isinstance(error, HFTAError)
            raise advice(error) or (alone and _of_first(member, args, in_dims)) or error from error.__cause__

    return wrapped if torch.compiler.is_compiling() else functools.update_wrapper(wrapped, func)


def _of_first(func: Callable[..., Any], args: Any, in_dims: Any) -> Exception | None:
    """The error of the first member alone, which tells the shapes of one model; None if it has none."""
    try:
        func(*_first(args, in_dims))
    except RuntimeError as error:
        return error
    return None


def _first(args: Any, in_dims: Any) -> Any:
    """The arguments of the first member."""
    dims = optree.tree_leaves(optree.tree_broadcast_prefix(in_dims, args, none_is_leaf=True), none_is_leaf=True)
    leaves, spec = optree.tree_flatten(args, none_is_leaf=True)
    return optree.tree_unflatten(
        spec, [leaf if dim is None else leaf.select(dim, 0) for leaf, dim in zip(leaves, dims, strict=True)]
    )


class _Errors(Mode):
    """Keeps the errors of views that a tensor does not have and of writes, also where a model goes on behind them."""

    of_view: RuntimeError | None = None
    of_write: RuntimeError | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        try:
            return as_alone(func, args, kwargs)
        except RuntimeError as error:
            self.of_view = error if func in (Tensor.view, Tensor.view_as) else self.of_view
            self.of_write = error if any(True for _ in targets(func, args, kwargs)) else self.of_write
            raise


def _watched(known: AliasFacts, attempt: Callable[[], Any], routed: bool) -> Any:
    """``attempt()``, which is not right if a model has gone on behind a write into a tensor for all members."""
    with _Errors() as errors:
        outputs = attempt()
    if errors.of_write is not None and not known.made.is_seeking():
        raise errors.of_write
    known.laid_out = not routed
    return outputs


def _laid_out(
    known: AliasFacts, attempt: Callable[[], Any], member: Callable[..., Any], args: Any, in_dims: Any
) -> Any:
    """``attempt()``, in which members are told of the memory of tensors as one alone is."""
    if known.refused is not None:
        error, known.refused = known.refused, None
        raise error
    token = layouts.set(told := [])
    try:
        outputs = attempt()
        known.asks = known.asks or any(answer is not COPIED for answer in told)
        if told and _lay_out(known, told, member, args, in_dims):
            layouts.set(told := [])
            outputs = attempt()
            _lay_out(known, told, member, args, in_dims)
        known.laid_out = True
        return outputs
    finally:
        layouts.reset(token)


def _lay_out(known: AliasFacts, told: list[Any], member: Callable[..., Any], args: Any, in_dims: Any) -> bool:
    """Whether members must run again, with tensors laid out member by member, to be told of them as a member alone is.

    Raises the error of a view that one member alone does not have.
    """
    layouts.set(alone := [])
    with _Errors() as errors:
        member(*_first(args, in_dims))
    if errors.of_view is not None:
        # Also when it is tried again, where a single member does not run under ``vmap``.
        known.refused = errors.of_view
        raise errors.of_view
    told = [answer for answer in told if answer is not COPIED]
    # Functions that run member by member, and both sides of a branch, ask more often.
    if told == alone or len(told) != len(alone):
        return False
    if known.models_first:
        raise TraceError(
            "the model asks how a tensor lies in memory (is_contiguous, stride, storage_offset, as_strided), which for "
            "members that run as one is not as for one alone; ask for the shape, or make the tensor contiguous() before"
        )
    known.models_first = True
    return True


def _traced(mapped: Callable[..., Any], args: Any, kwargs: Any, asks: bool) -> Any:
    """``mapped(*args, **kwargs)`` for a compiler, or for an export that runs functions as they do eagerly."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        # No end of a compilation will undo settings.
        install()
        # PyTorch cannot export moving the model axis of results to the front.
        with no_fallback(), watched(_MODELS_FIRST):
            return mapped(*args, **kwargs)
    install_for_compiler(_choice.state)
    if asks:
        settle_layout(True)
    outputs = mapped(*args, **kwargs)
    settle_layout()
    return outputs


def _mapped_flat(
    func: Callable[..., Any], args: Any, in_dims: Any, randomness: str, chunk_size: int | None, known: AliasFacts | None
) -> Any:
    """``torch.func.vmap`` on flat lists, because optree flattens trees much faster than torch's pytree in Python."""
    leaves, spec = optree.tree_flatten(args, none_is_leaf=True)
    if not isinstance(in_dims, int):
        try:
            in_dims = tuple(optree.broadcast_prefix(in_dims, args, none_is_leaf=True))
        except ValueError:
            raise ValueError(
                f"in_dims is {in_dims!r}, which does not fit the {len(args)} arguments; give an int, None, or a tree of "
                f"these in the structure of the arguments"
            ) from None
    out_spec: Any = None

    def flat(*leaves: Any) -> Any:
        nonlocal out_spec
        outputs, out_spec = optree.tree_flatten(func(*optree.tree_unflatten(spec, leaves)), none_is_leaf=True)
        return tuple(outputs)

    dims = (in_dims,) * len(leaves) if isinstance(in_dims, int) else in_dims
    count = _num_models(leaves, dims) if chunk_size is None else None
    if count is None:
        outputs = torch.func.vmap(flat, in_dims, 0, randomness, chunk_size=chunk_size)(*leaves)
    elif count == 1 and known is not None:
        # A compiled step never reads values.
        if not known.mapped and (rehearsing.get() or not known.reads):
            # An array of one refuses what an array of many models refuses.
            _mapped_level(flat, leaves, dims, 1, randomness)
            known.mapped = True
        # What this member is told of memory needs no comparison.
        token = layouts.set(None)
        try:
            outputs = (_alone if known.tried or not known.reads else _alone_without_draws)(flat, leaves, dims)
        finally:
            layouts.reset(token)
    else:
        outputs = _mapped_level(flat, leaves, dims, count, randomness)
    if known is not None:
        known.tried, known.mapped = True, known.mapped or count != 1
    return optree.tree_unflatten(out_spec, outputs)


def _num_models(leaves: list[Any], dims: tuple[Any, ...]) -> int | None:
    """M, or None if something is wrong, which PyTorch then reports."""
    sizes = set()
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is not None:
            if not isinstance(leaf, Tensor) or not isinstance(dim, int) or not -leaf.dim() <= dim < leaf.dim():
                return None
            sizes.add(leaf.shape[dim])
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None


def _mapped_level(
    func: Callable[..., tuple[Any, ...]], leaves: list[Any], dims: tuple[Any, ...], count: int, randomness: str
) -> tuple[Tensor, ...]:
    """As ``torch.func.vmap`` of flat tensors, without traversing trees in Python."""
    with vmap_level(count, randomness) as level:
        inputs = [
            leaf if dim is None else add_batch_dim(leaf, dim if dim >= 0 else leaf.dim() + dim, level)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        outputs = func(*inputs)
        _check_outputs(outputs)
        return tuple(remove_batch_dim(output, level, count, 0) for output in outputs)


def _alone_without_draws(
    func: Callable[..., tuple[Any, ...]], leaves: list[Any], dims: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """As :func:`_alone`, but it refuses draws from PyTorch's global generator."""
    generators = default_generators(leaves[0].device)
    before = [generator.get_state() for generator in generators]
    outputs = _alone(func, leaves, dims)
    for generator, state in zip(generators, before, strict=True):
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)
            raise RandomnessError(f"the model or the loss {UNROUTED}")
    return outputs


def _alone(func: Callable[..., tuple[Any, ...]], leaves: list[Any], dims: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """One member without ``vmap``, as fast as a solo run."""
    # With their history, in which a function may take gradients under no_grad, too.
    with torch.enable_grad():
        alone = [
            leaf if dim is None else leaf.squeeze(dim) if leaf.layout == torch.strided else leaf.select(dim, 0)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
    outputs = func(*alone)
    _check_outputs(outputs)
    return tuple(output.unsqueeze(0) for output in outputs)


def _check_outputs(outputs: tuple[Any, ...]) -> None:
    for output in outputs:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"a function under vmap must return tensors only, but one output is of type {type(output).__qualname__}"
            )
