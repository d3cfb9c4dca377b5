"""PyTorch's operators of functions, such as ``torch.cond`` and FlexAttention, as loops in Python.

PyTorch compiles their functions, also in eager code, which it cannot inside an array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import pytree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.errors import TraceError

Call = Callable[..., Any]
"""``call(part, func, *args)`` is ``func(*args)``, with noise of its own unless ``part`` is None."""


def _cond(call: Call, pred: Any, true_func: Any, false_func: Any, operands: Any = (), **options: Any) -> Any:
    if not isinstance(pred, Tensor) or not (torch.compiler.is_compiling() or _torch.is_wrapped(pred)):
        side = call(0, true_func if pred else false_func, *operands)
        if not isinstance(pred, Tensor) or _is_complete(side):
            return side
    sides = _sides(call, (true_func, false_func), operands)
    return pytree.tree_map(lambda a, b: torch.where(pred, a, b), *sides)


def _is_complete(side: Any) -> bool:
    """Whether the results of one side have a gradient if one is taken; alone, they have one if those of any side do."""
    leaves = (x for x in pytree.tree_leaves(side) if isinstance(x, Tensor))
    return not torch.is_grad_enabled() or any(_torch.inside_vmap(x).requires_grad for x in leaves)


def _sides(call: Call, branches: Any, operands: Any) -> list[Any]:
    """What each branch returns, which must be alike."""
    sides = [call(0, func, *operands) for func in branches]
    kinds = [pytree.tree_map(lambda x: (x.shape, x.dtype) if isinstance(x, Tensor) else x, side) for side in sides]
    for kind in kinds[1:]:
        if kind != kinds[0]:
            raise TraceError(
                f"the branches of torch.cond return {kinds[0]} and {kind}; return tensors of one structure, "
                f"with one shape and dtype".replace("torch.Size", "")
            )
    return sides


def _while_loop(call: Call, going_on: Any, body: Any, carried: Any, additional: Any = (), **options: Any) -> Any:
    """Runs while any member goes on; what the others carry stays as it is."""
    if rehearsing.get() or torch.compiler.is_compiling():
        raise TraceError(
            "the model calls torch.while_loop, and members take as many iterations as their values ask for, which one "
            "compiled program cannot; loop a fixed number of times and mask (torch.where), or leave the step uncompiled"
        )
    going, values, starts, part = call(None, going_on, *carried, *additional), [*carried], [*carried], 0
    spec: Any = None
    while (some := _torch.values_of(going)).any():
        # A member that is done computes where it last went on: elsewhere its gradient could be 0 * inf.
        starts = [
            torch.where(going, value, start.detach()) if isinstance(start, Tensor) and not some.all() else value
            for value, start in zip(values, starts, strict=True)
        ]
        # PyTorch carries trees as their leaves.
        ends, spec = pytree.tree_flatten(call(part, body, *starts, *additional))
        for start, end in zip(starts, ends, strict=True):
            if isinstance(start, Tensor) and (start.shape, start.dtype) != (end.shape, end.dtype):
                raise TraceError(
                    f"the body of torch.while_loop is given {start.dtype} {list(start.shape)} and returns {end.dtype} "
                    f"{list(end.shape)}; carry tensors that keep their shape and dtype"
                )
        if some.all():
            values = [*ends]
        else:
            values = [torch.where(going, end, value) for end, value in zip(ends, values, strict=True)]
        going, part = going & call(None, going_on, *values, *additional), part + 1
    if spec is not None:
        return pytree.tree_unflatten(values, spec)
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def _map(call: Call, func: Any, xs: Any, additional: Any = (), **options: Any) -> Any:
    return _stacked([call(None, func, *row, *additional) for row in zip(*(x.unbind() for x in xs), strict=True)])


def _scan(call: Call, combine: Any, init: Any, xs: Any, additional_inputs: Any = (), **options: Any) -> Any:
    carry, outputs = [*init], []
    last: Any = init
    for row in zip(*(x.unbind() for x in xs), strict=True):
        last, output = call(None, combine, *carry, *row, *additional_inputs)
        carry = pytree.tree_leaves(last)
        outputs.append(output)
    return last, _stacked(outputs)


def _stacked(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *x: torch.stack(x) if isinstance(x[0], Tensor) else x[0], *trees)


OPERATORS: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.flex_attention: lambda call, *args, **kwargs: call(
        None, _torch.math_attention, *args, **kwargs
    ),
}
"""For each operator, a function that is given a :data:`Call` and the arguments; PyTorch 2.14 adds options for compilers."""
