"""What optimizers share that apply one rule to every parameter, so that each file holds only its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import can_look, inside_transform
from hfta_func._tree import per_model, write_leaf
from hfta_func._types import Params
from hfta_func.optim._base import GradientTransformation, Knobs, zero_count

FIELDS = "step", "hyperparams"
"""The fields that every state begins with: updates made by each member ``int64[M]``, and hyperparameters by name."""

_ROWS = 1 << 15
"""From this many elements per member on, a CPU is faster member by member, with hyperparameters as scalars."""

_PIECE = 1 << 20
"""A member is updated in pieces of about this many elements, which keeps a rule's temporary tensors small."""


def decay_mean(mean: Tensor, grad: Tensor, share: Any) -> Tensor:
    """``mean = (1 - share) * mean + share * grad`` in place."""
    # PyTorch has no batching rules for lerp_ and addcmul_, and a rule whose numbers are tensors may run under vmap.
    return mean.lerp_(grad, share) if isinstance(share, float) else mean.add_((grad - mean).mul_(share))


def decay_square(square: Tensor, decay: Any, grad: Tensor, share: Any) -> None:
    """``square = decay * square + share * grad^2`` in place."""
    if isinstance(share, float):
        square.mul_(decay).addcmul_(grad, grad, value=share)
    else:
        square.mul_(decay).add_((grad * share).mul_(grad))


def leafwise(
    state: Callable[..., Any],
    knobs: Knobs,
    rule: Callable[..., Tensor],
    prepare: Callable[..., tuple[Tensor, ...] | None] = lambda at, count: None,
    *,
    unused: tuple[str, ...] = (),
    carried: tuple[str, ...] = (),
    start: Callable[[str, Tensor], Tensor] = lambda path, param: torch.zeros_like(param),
    decoupled: bool = False,
    maximize: bool = False,
    elementwise: bool = True,
) -> GradientTransformation:
    """A transformation from the update rule of one parameter.

    Args:
        state: NamedTuple of ``FIELDS``, the carried numbers, and the slots: tensors beside each parameter.
        knobs: The hyperparameters. ``weight_decay``, if among them, is applied here.
        rule: ``rule(grad, param, k, *slots) -> direction`` over ``[M, ...]``, which updates its slots in place; the
            parameter's update is ``k["step"] * direction``. ``k`` holds numbers by name: tensors that broadcast, or
            floats for one member. Besides the hyperparameters these are ``"1-beta1"`` and the like for every decay rate.
        prepare: ``prepare(at, count, *carried) -> carried`` adds the other numbers that the rule needs to ``at``, vectors
            ``float64[M]`` by name; ``count`` numbers the update, from 1. ``step`` is ``-lr`` unless it is set here.
        unused: Slots that stay empty and that the rule does not get.
        carried: Vectors ``float64[M]`` that are carried from update to update. They start at one.
        start: ``start(path, param)`` is the initial value of a slot, zero by default.
        decoupled: Subtract ``lr * weight_decay`` times the parameter instead of adding weight decay to the gradient.
        maximize: Maximize instead of minimize.
        elementwise: Whether the rule treats every entry independently, so that it may get a part of a parameter.
    """
    slots = [name for name in state._fields if name not in (*FIELDS, *carried)]  # pyright: ignore
    used = [name for name in slots if name not in unused]
    decays = knobs.decays()

    def init(params: Params) -> Any:
        held = {
            name: {path: start(path, param) for path, param in params.items()} if name in used else {} for name in slots
        }
        count = zero_count(params)
        ones = {name: torch.ones_like(count, dtype=torch.float64) for name in carried}
        return state(step=count, hyperparams=knobs.init(params), **ones, **held)

    def begin(held: Any) -> tuple[_Numbers, dict[str, Tensor]]:
        """The numbers of this update, and the fields of the next state that are one number per member."""
        at, count = knobs.at(held.hyperparams, held.step), held.step + 1
        at |= {f"1-{name}": 1 - at[name] for name in decays}
        after = prepare(at, count, *(getattr(held, name) for name in carried)) or ()
        at.setdefault("step", -at["lr"])
        if "weight_decay" in at:
            at["decay"] = -at["lr"] * at["weight_decay"] if decoupled else at["weight_decay"]
        return _Numbers(at), {"step": count, **dict(zip(carried, after, strict=True))}

    def change(grad: Tensor, param: Tensor, k: Mapping[str, Any], held: list[Tensor]) -> tuple[Tensor, Any]:
        """The direction, and the factor of the parameter to add besides, or None; updates the slots."""
        if maximize:
            grad = -grad
        decay = k.get("decay")
        if decay is not None and not decoupled:
            grad = torch.add(grad, param, alpha=decay) if isinstance(decay, float) else grad + decay * param
        wide = [_wide(slot) for slot in held]
        direction = rule(_wide(grad), _wide(param), k, *wide)
        for slot, new in zip(held, wide, strict=True):
            write_leaf(slot, new)
        return direction, decay if decoupled else None

    def functional(grad: Tensor, param: Tensor, k: Mapping[str, Any], held: list[Tensor]) -> Any:
        """:func:`change` that returns the next slots; rules write in place, which a gradient around them does not allow."""

        def changed(grad: Tensor, param: Tensor, k: Any, held: list[Tensor]) -> Any:
            fresh = [slot.clone() for slot in held]
            direction, factor = change(grad, param, k, fresh)
            return direction, factor, fresh

        around = inside_transform() and not torch.compiler.is_compiling()
        return (torch.func.functionalize(changed) if around else changed)(grad, param, k, held)

    def update(grads: Params, held: Any, params: Params) -> tuple[Params, Any]:
        numbers, new = begin(held)
        updates, after = {}, {name: {} for name in slots}
        for path, grad in grads.items():
            back = torch.view_as_complex if grad.is_complex() else lambda real: real
            grad, param, *own = map(_real, (grad, params[path], *(getattr(held, name)[path] for name in used)))
            pieces = numbers.pieces(param, elementwise)
            own = [slot.clone() for slot in own] if pieces else own
            out = torch.empty_like(_wide(param)) if pieces else None
            for row, k in pieces:
                direction, factor = change(grad[row], param[row], k, [slot[row] for slot in own])
                torch.mul(direction, k["step"], out=out[row])  # pyright: ignore
                if factor is not None:
                    out[row].add_(param[row], alpha=factor)  # pyright: ignore
            if out is None:
                k = numbers.like(param)
                direction, factor, own = functional(grad, param, k, own)
                out = direction * k["step"]
                out = out if factor is None else out + factor * param
            updates[path] = back(out)
            for name, slot in zip(used, own, strict=True):
                after[name][path] = back(slot)
        return updates, held._replace(**new, **after)

    def update_(grads: Params, held: Any, params: Params, keep: Tensor | None, apply: bool) -> Params:
        numbers, new = begin(held)
        kept = None if keep is None or not can_look(keep) else keep.tolist()
        for path, grad in grads.items():
            grad, param, *own = map(_real, (grad, params[path], *(getattr(held, name)[path] for name in used)))
            pieces = numbers.pieces(param, elementwise)
            for row, k in pieces:
                if kept is None or kept[row[0].start]:
                    direction, factor = change(grad[row], param[row], k, [slot[row] for slot in own])
                    _put(grad[row], param[row], direction, k["step"], factor, apply)
            if not pieces:
                k = numbers.like(param)
                fresh = own if keep is None else [slot.clone() for slot in own]
                direction, factor = change(grad, param, k, fresh)
                moved = param if keep is None or not apply else param.clone()
                _put(grad, moved, direction, k["step"], factor, apply)
                for old, after in zip((param, *own), (moved, *fresh), strict=True):
                    write_leaf(old, after, keep)
        for name, after in new.items():
            write_leaf(getattr(held, name), after, keep)
        return grads

    return GradientTransformation(init, update, update_)


class _Numbers:
    """The numbers of one update, in the forms that rules take."""

    def __init__(self, at: Mapping[str, Tensor]):
        self._at = at
        self._columns: dict[torch.dtype, dict[str, Tensor]] = {}
        self._shaped: dict[tuple[torch.dtype, int], dict[str, Tensor]] = {}
        self._rows: list[tuple[int, dict[str, float]]] = []
        if can_look(at["step"]):
            rows = zip(*torch.stack([*at.values()]).tolist(), strict=True)
            self._rows = [(member, dict(zip(at, row, strict=True))) for member, row in enumerate(rows)]

    def like(self, leaf: Tensor) -> dict[str, Tensor]:
        """Tensors that broadcast over a leaf, made once for each dtype and number of axes."""
        leaf = _wide(leaf)
        key = (leaf.dtype, leaf.dim())
        if leaf.dtype not in self._columns:
            # In one tensor, so that the compiler computes them once and not for every element of every leaf.
            columns = torch.stack([value.to(leaf.dtype) for value in self._at.values()]).unbind()
            self._columns[leaf.dtype] = dict(zip(self._at, columns, strict=True))
        if key not in self._shaped:
            self._shaped[key] = {name: per_model(value, leaf) for name, value in self._columns[leaf.dtype].items()}
        return self._shaped[key]

    def pieces(self, leaf: Tensor, elementwise: bool) -> list[tuple[tuple[slice, ...], dict[str, float]]]:
        """Index and floats of each member or part of one; empty where all members at once are faster."""
        size = leaf[0].numel()
        if size < _ROWS:
            return []
        if not elementwise or leaf.dim() == 1 or size <= _PIECE:
            return [((slice(member, member + 1),), k) for member, k in self._rows]
        length = max(1, leaf.shape[1] * _PIECE // size)
        starts = range(0, leaf.shape[1], length)
        return [((slice(member, member + 1), slice(at, at + length)), k) for member, k in self._rows for at in starts]


def _real(leaf: Tensor) -> Tensor:
    """Complex numbers as pairs, as ``torch.optim`` updates them: ``[M, ...] -> [M, ..., 2]``."""
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def _wide(leaf: Tensor) -> Tensor:
    """In at least 32 bits: in fewer, a decay rate such as 0.999 would be 1."""
    return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def _put(grad: Tensor, param: Tensor, direction: Tensor, step: Any, factor: Any, apply: bool) -> None:
    """Add ``step * direction + factor * param`` to the parameter or, without ``apply``, write it over the gradient."""
    if not apply:
        grad.copy_(direction * step if factor is None else direction * step + factor * param)
        return
    if factor is not None:
        param.mul_(1 + factor)
    if isinstance(step, float):
        param.add_(direction, alpha=step)
    else:
        param.add_(direction * step)
