"""The laws of a batching rule."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func.errors import LoopWarning
from hfta_func.rules.vmap import vmap
from hfta_func.testing._laws import assert_close, law


def assert_rule(op: Callable[..., Any], inputs: Sequence[Any], *, rtol: float = 1e-10) -> None:
    """Check that an operator under ``vmap`` computes what a Python loop over the members computes.

    The laws: outputs and gradients equal the loop's in float64 for every mix of batched and shared inputs and every position
    of the model axis; so do those of an array of arrays, gradients inside ``vmap``, autocast, and
    ``torch.compile(fullgraph=True, backend="aot_eager")``; and no operator runs member by member because it lacks a rule.
    Gradients that the operator itself does not support are not tested.

    Args:
        op: The operator, or any function of one member's tensors that returns a tensor or a tuple of tensors.
        inputs: Its arguments: tensors ``[M, ...]`` that differ between members, and other values.
        rtol: Largest difference allowed, relative to the largest magnitude in each tensor.

    Raises:
        AssertionError: if a law is broken; it names the law, which inputs were batched, the tensor and both values.

    Example:
        >>> from hfta_func.testing import assert_rule
        >>> assert_rule(torch.nn.functional.linear, [torch.randn(3, 4, 2), torch.randn(3, 5, 2)])
    """
    args = [x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    positions = [position for position, x in enumerate(args) if isinstance(x, Tensor)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoopWarning)
        for mask in itertools.product((True, False), repeat=len(positions)):
            if batched := {*itertools.compress(positions, mask)}:
                about = f"inputs {sorted(batched)} batched of {positions}"
                with law("outputs are the loop's", about):
                    got, expected = _array(op, args, batched), _loop(op, args, batched)
                    assert_close(got, expected, "output", rtol)
                if (alone := _alone(_grads, _loop, op, args, batched)) is not None:
                    with law("gradients are the loop's", about):
                        assert_close(_grads(_array, op, args, batched), alone, "gradient", rtol)
        _check_compositions(op, args, set(positions), rtol)


def _check_compositions(op: Callable[..., Any], args: list[Any], batched: set[int], rtol: float) -> None:
    expected = _loop(op, args, batched)
    dims = tuple(0 if position in batched else None for position in range(len(args)))
    mapped = vmap(lambda *values: as_tuple(op(*values)), dims)
    with law("the model axis may be anywhere"):
        last = [x.movedim(0, -1) if isinstance(x, Tensor) else x for x in args]
        anywhere = vmap(lambda *values: as_tuple(op(*values)), tuple(None if dim is None else -1 for dim in dims))
        assert_close(anywhere(*last), expected, "output", rtol)
    with law("an array of arrays is the loop"):
        pair = [torch.stack([x, x.flip(0)]) if isinstance(x, Tensor) else x for x in args]
        flipped = _loop(op, [x.flip(0) if isinstance(x, Tensor) else x for x in args], batched)
        both = tuple(torch.stack(column) for column in zip(expected, flipped, strict=True))
        assert_close(vmap(mapped, dims)(*pair), both, "output", rtol)
    wanted = tuple(position for position in sorted(batched) if args[position].is_floating_point())
    inner = torch.func.grad(lambda *values: objective(as_tuple(op(*values))), wanted)
    if wanted and (alone := _alone(_loop, inner, args, batched)) is not None:
        with law("gradients inside vmap are the loop's"):
            assert_close(vmap(inner, dims)(*args), alone, "gradient", rtol)
    with law("autocast is the loop's"):
        single = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        with torch.autocast(args[min(batched)].device.type, dtype=torch.bfloat16):
            assert_close(mapped(*single), _loop(op, single, batched), "output", 2e-2)
    with law("compiled it is the loop"):
        torch.compiler.reset()
        assert_close(torch.compile(mapped, fullgraph=True, backend="aot_eager")(*args), expected, "output", rtol)
        torch.compiler.reset()


def _given(args: Sequence[Any], batched: set[int]) -> list[Any]:
    """The arguments of all members: of a tensor that they share, the first member's."""
    return [x[0] if isinstance(x, Tensor) and position not in batched else x for position, x in enumerate(args)]


def _array(op: Callable[..., Any], args: Sequence[Any], batched: set[int]) -> tuple[Tensor, ...]:
    dims = tuple(0 if position in batched else None for position in range(len(args)))
    return as_tuple(vmap(lambda *values: as_tuple(op(*values)), dims)(*_given(args, batched)))


def _loop(op: Callable[..., Any], args: Sequence[Any], batched: set[int]) -> tuple[Tensor, ...]:
    rows = []
    for i in range(len(args[min(batched)])):
        one = (x[i] if position in batched else x for position, x in enumerate(_given(args, batched)))
        rows.append(as_tuple(op(*one)))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _alone(function: Callable[..., Any], *args: Any) -> Any:
    """Gradients of the loop; None if the operator has none alone, or none by transforms (``register_autograd``)."""
    try:
        return function(*args)
    except RuntimeError:
        return None


def _grads(run: Callable[..., Any], op: Any, args: Sequence[Any], batched: set[int]) -> list[Tensor]:
    """By every input of floating point, as ``run`` computes the outputs."""
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    total = objective(run(op, leaves, batched))
    if not total.requires_grad:
        return []
    return list(torch.autograd.grad(total, wanted, materialize_grads=True, allow_unused=True))


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
