"""Rules against a loop over members, on releases of PyTorch that the tests have not run on.

Every rule runs in a small case of :mod:`hfta_func.rules._check_cases`; outputs and gradients are compared in float64. That
takes a second or two, once per release: an empty file beside the compiled kernels records that all agreed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._torch import cure, gradient
from hfta_func._types import LoopWarning
from hfta_func.rules import _choice
from hfta_func.rules._check_cases import CASES, Case, Integers
from hfta_func.rules._lowering import TABLE, Row, always, known_lowerings
from hfta_func.rules._measured import fingerprint

_M = 2
_TOLERANCE = 1e-8
_TOLERANCE_SINGLE = 1e-4


_is_settled = False


def settle(register_again: Callable[[], None]) -> None:
    """Check the installed rules, unless they are known to agree, and replace those that differ by the loop."""
    global _is_settled
    if _is_settled or _is_remembered():
        return
    wrong, ops = _apart(_compare)
    for op in ops:
        TABLE[op] = (Row(always, "loop", f"its rule is wrong on PyTorch {torch.__version__}"),)
    if ops:
        register_again()
        wrong = _apart(lambda: [case for case in wrong if not _agrees(case)])
    if wrong:
        names = ", ".join(sorted({case.name for case in wrong}))
        raise RuntimeError(f"on PyTorch {torch.__version__}, hfta_func is wrong in {names}; {cure()}")
    if ops:
        warnings.warn(
            f"on PyTorch {torch.__version__}, the batching rules of {', '.join(ops)} differ from a loop over members, which "
            f"runs in their place; to be faster, {cure()}",
            LoopWarning,
            stacklevel=5,
        )
    else:
        _remember()
    _is_settled = True


def _compare() -> tuple[list[Case], list[str]]:
    """The cases that differ from a loop, and the operators whose loop may cure them."""
    wrong, ops = [case for case in CASES if not _agrees(case)], set[str]()
    for case in wrong:
        looped = {choice.op for choice in _choice.explain(_agrees, case) if "loop" in known_lowerings(choice.op)}
        # One if its loop cures the case, else all that have a loop.
        ops |= next(({op} for op in sorted(looped) if _agrees(case, {op: "loop"})), looped)
    return wrong, sorted(ops)


def _is_remembered() -> bool:
    with contextlib.suppress(OSError, RuntimeError):  # no home
        return _file().exists()
    return False


def _remember() -> None:
    with contextlib.suppress(OSError, RuntimeError):
        _file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Empty, so it is never half written.
        _file().touch()


def _file() -> Path:
    return native.folder() / f"rules-{fingerprint()[:32]}-torch-{torch.__version__}"


def _apart(work: Callable[[], Any]) -> Any:
    """``work()`` in a new thread, which has none of this thread's modes, transforms and settings."""
    with _choice.by_table(), warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
        warnings.simplefilter("ignore")
        return thread.submit(work).result()


def _agrees(case: Case, lowerings: dict[str, str] | None = None) -> bool:
    lowerings, others = {**case.lowerings, **(lowerings or {})}, len(case.inputs) - 1
    # Which inputs are per member: all, the first alone, and all others.
    masks = [(True,) * (others + 1)]
    if others > 0 and case.shares:
        masks += [(True, *(False,) * others), (False, *(True,) * others)]
    try:
        with _choice.override(**lowerings) if lowerings else contextlib.nullcontext():
            return all(_is_loop(case, mask) for mask in masks)
    # A call that PyTorch itself no longer knows says nothing about the rule.
    except _UnknownError:
        return True
    # On a release that it was not made for, a rule may raise anything.
    except Exception:
        return False


class _UnknownError(Exception):
    """A call that fails for a member alone."""


def _is_loop(case: Case, mask: tuple[bool, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    inputs = [_draw(one, per_member, generator) for one, per_member in zip(case.inputs, mask, strict=True)]
    members = [[x[m] if per_member else x for x, per_member in zip(inputs, mask, strict=True)] for m in range(_M)]
    differentiable = tuple(position for position, x in enumerate(inputs) if x.requires_grad)
    # A gradient inside vmap decomposes operators, and the parts have other rules.
    inside = gradient(lambda *args: objective(as_tuple(case.func(*args))), differentiable)
    funcs = [case.func, inside] if all(mask) and case.inside else [case.func]
    try:
        for member in members:
            case.func(*member)
    except Exception as error:
        raise _UnknownError from error
    expected = [
        [torch.stack(column) for column in zip(*(as_tuple(func(*m)) for m in members), strict=True)] for func in funcs
    ]
    in_dims = tuple(0 if per_member else None for per_member in mask)
    batched = [list(as_tuple(torch.func.vmap(func, in_dims)(*inputs))) for func in funcs]

    floating = [inputs[position] for position in differentiable]
    for results in (expected, batched):
        outside = torch.autograd.grad(objective(results[0]), floating, allow_unused=True, materialize_grads=True)
        results.append(list(outside))
    tolerance = _TOLERANCE_SINGLE if case.single else _TOLERANCE
    return all(
        one.shape == other.shape and torch.allclose(one, other, tolerance, tolerance, equal_nan=True)
        for outputs, references in zip(batched, expected, strict=True)
        for one, other in zip(outputs, references, strict=True)
    )


def _draw(one: tuple[int, ...] | Integers, per_member: bool, generator: torch.Generator) -> Tensor:
    if isinstance(one, Integers):
        shape = (_M, *one.shape) if per_member else one.shape
        return torch.randint(one.low, one.high, shape, generator=generator)
    shape = (_M, *one) if per_member else one
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """The outputs of a call, of which one may stand alone."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def objective(outputs: Iterable[Tensor]) -> Tensor:
    """A number whose gradient reaches every entry of every output with another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.is_floating_point():
            weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device)
            total = total.to(output.device) + (output * output * weights.reshape(output.shape)).sum()
    return total
