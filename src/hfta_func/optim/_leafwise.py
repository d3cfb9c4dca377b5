"""Optimizers that treat every parameter alike: what they share, so that each file holds one update rule.

Public: :func:`leafwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._torch import can_look
from hfta_func._tree import num_models
from hfta_func._types import Params
from hfta_func.optim._base import GradientTransformation, Knobs, Shaped, write, zero_count

Start = Callable[[str, Tensor], Tensor]
"""What a slot holds before the first update, from a parameter's path and value ``[M, ...]``."""

_ROWS = 1 << 15
"""From so many elements of one member on, a CPU is faster member by member, each with its numbers as scalars."""

_PIECE = 1 << 20
"""A member is updated in pieces of about so many elements, so that what a rule holds in between stays small."""


def zeros(path: str, param: Tensor) -> Tensor:
    """A slot that starts at zero."""
    return torch.zeros_like(param)


def decay_mean(mean: Tensor, grad: Tensor, share: Any) -> Tensor:
    """``mean = (1 - share) * mean + share * grad`` in place."""
    # With tensors it may run under vmap, where PyTorch has no rules for lerp_ and addcmul_.
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
    *,
    slots: Mapping[str, Start | None],
    prepare: Callable[..., tuple[Tensor, ...] | None],
    carried: tuple[str, ...] = (),
    decay: Literal["coupled", "decoupled"] = "coupled",
    maximize: bool = False,
    elementwise: bool = True,
) -> GradientTransformation:
    """A transformation from the update rule of one parameter.

    Args:
        state: NamedTuple of ``step``, ``hyperparams``, the carried numbers, and the slots.
        knobs: The hyperparameters. Where ``weight_decay`` is among them it is applied here.
        rule: ``rule(grad, param, k, *slots) -> direction`` over ``[M, ...]``, which writes its slots in place. The update is
            ``k["step"] * direction``. ``k`` holds numbers by name: tensors that broadcast, or floats for one member. It
            gets the slots that are in use.
        slots: Tensors beside each parameter, by name, with what they start from; None where one is not in use.
        prepare: ``prepare(at, count, *carried) -> carried`` adds to ``at``, vectors ``float64[M]`` by name, what the rule
            needs of them, and ``step``; ``count`` numbers the update, from 1.
        carried: Vectors ``float64[M]`` that are carried from update to update, from one.
        decay: Whether weight decay is a part of the gradient, or apart from it and multiplied by the learning rate.
        maximize: Ascend instead of descend.
        elementwise: Whether the rule treats every entry by itself, so that it may be given a part of a parameter.
    """
    used = [name for name, start in slots.items() if start is not None]

    def init(params: Params) -> Any:
        held = {
            name: {} if start is None else {path: start(path, param) for path, param in params.items()}
            for name, start in slots.items()
        }
        device = next(iter(params.values())).device
        ones = {name: torch.ones(num_models(params), dtype=torch.float64, device=device) for name in carried}
        return state(step=zero_count(params), hyperparams=knobs.init(params), **ones, **held)

    def begin(held: Any) -> tuple[_Numbers, dict[str, Tensor]]:
        """The numbers of this update, and what is one per member of the next state."""
        at, count = knobs.at(held.hyperparams, held.step), held.step + 1
        after = prepare(at, count, *(getattr(held, name) for name in carried)) or ()
        if "weight_decay" in at:
            at["decay"] = -at["lr"] * at["weight_decay"] if decay == "decoupled" else at["weight_decay"]
        return _Numbers(at), {"step": count, **dict(zip(carried, after, strict=True))}

    def change(grad: Tensor, param: Tensor, k: Mapping[str, Any], held: list[Tensor]) -> tuple[Tensor, Any]:
        """The direction, and what to multiply the parameter by besides; writes the slots."""
        if maximize:
            grad = -grad
        if "decay" in k and decay == "coupled":
            grad = _add(grad, param, k["decay"])
        direction = _in_float32(rule, grad, param, k, held)
        return direction, k["decay"] if "decay" in k and decay == "decoupled" else None

    def update(grads: Params, held: Any, params: Params) -> tuple[Params, Any]:
        numbers, new = begin(held)
        updates, after = {}, {name: {} for name in slots}
        for path, grad in grads.items():
            param, own = params[path], [getattr(held, name)[path].clone() for name in used]
            pieces = numbers.pieces(param, elementwise)
            out = torch.empty_like(_wide(param)) if pieces else None
            for row, k in pieces:
                direction, factor = change(grad[row], param[row], k, [slot[row] for slot in own])
                torch.mul(direction, k["step"], out=out[row])  # pyright: ignore
                if factor is not None:
                    out[row].add_(param[row], alpha=factor)  # pyright: ignore
            if out is None:
                k = numbers.like(param)
                direction, factor = change(grad, param, k, own)
                out = direction * k["step"]
                out = out if factor is None else out + factor * param
            updates[path] = out
            for name, slot in zip(used, own, strict=True):
                after[name][path] = slot
        return updates, held._replace(**new, **after)

    def update_(grads: Params, held: Any, params: Params, keep: Tensor | None, apply: bool, /) -> Params:
        numbers, new = begin(held)
        kept = None if keep is None or not can_look(keep) else keep.tolist()
        for path, grad in grads.items():
            param, own = params[path], [getattr(held, name)[path] for name in used]
            pieces = numbers.pieces(param, elementwise)
            for row, k in pieces:
                if kept is None or kept[row[0].start]:
                    direction, factor = change(grad[row], param[row], k, [slot[row] for slot in own])
                    _put(grad[row], param[row], direction, k["step"], factor, apply)
            if not pieces:
                k = numbers.like(param)
                fresh = own if keep is None else [slot.clone() for slot in own]
                direction, factor = change(grad, param, k, fresh)
                if keep is None or not apply:
                    _put(grad, param, direction, k["step"], factor, apply)
                else:
                    moved = param.clone()
                    _put(grad, moved, direction, k["step"], factor, apply)
                    write(param, moved, keep)
                write(own, fresh, keep)
        write({name: getattr(held, name) for name in new}, new, keep)
        return grads

    return GradientTransformation(init, update, update_)


class _Numbers:
    """The numbers of one update, in the forms that rules take them in."""

    def __init__(self, at: Mapping[str, Tensor]):
        self._shaped = Shaped(at)
        self._rows: list[tuple[int, dict[str, float]]] = []
        if can_look(at["step"]):
            columns = zip(*torch.stack([*at.values()]).tolist(), strict=True)
            self._rows = [(member, dict(zip(at, column, strict=True))) for member, column in enumerate(columns)]

    def like(self, leaf: Tensor) -> dict[str, Tensor]:
        """Tensors that broadcast over a leaf."""
        return self._shaped.like(_wide(leaf))

    def pieces(self, leaf: Tensor, elementwise: bool) -> list[tuple[tuple[slice, ...], dict[str, float]]]:
        """What to index for each member or part of one, with its floats, where that is better than all at once; else none."""
        size = leaf[0].numel()
        if size < _ROWS:
            return []
        if not elementwise or leaf.dim() == 1 or size <= _PIECE:
            return [((slice(member, member + 1),), k) for member, k in self._rows]
        length = max(1, leaf.shape[1] * _PIECE // size)
        starts = range(0, leaf.shape[1], length)
        return [((slice(member, member + 1), slice(at, at + length)), k) for member, k in self._rows for at in starts]


def _wide(leaf: Tensor) -> Tensor:
    """In at least 32 bits: in fewer, a decay such as 0.999 would be 1."""
    return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def _in_float32(
    rule: Callable[..., Tensor], grad: Tensor, param: Tensor, k: Mapping[str, Any], slots: list[Tensor]
) -> Tensor:
    wide = [_wide(slot) for slot in slots]
    direction = rule(_wide(grad), _wide(param), k, *wide)
    write(slots, wide, None)
    return direction


def _add(a: Tensor, b: Tensor, factor: Any) -> Tensor:
    return torch.add(a, b, alpha=factor) if isinstance(factor, float) else a + factor * b


def _put(grad: Tensor, param: Tensor, direction: Tensor, step: Any, factor: Any, apply: bool) -> None:
    """Add ``step * direction + factor * param`` to the parameter, or leave it in the gradient's place."""
    if not apply:
        grad.copy_(direction * step if factor is None else direction * step + factor * param)
        return
    if factor is not None:
        param.mul_(1 + factor)
    if isinstance(step, float):
        param.add_(direction, alpha=step)
    else:
        param.add_(direction * step)
