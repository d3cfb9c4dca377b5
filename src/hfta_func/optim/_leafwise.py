"""Makes an optimizer from a rule for one parameter, so that each optimizer's file holds only its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import inside_transform, num_dispatch_modes, num_recorders
from hfta_func._tree import where, write
from hfta_func._types import Params, PerModel
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, by_renew, range_of, zero_count
from hfta_func.optim._kernel import Kernel

FIELDS = "step", "hyperparams"
"""The first fields of every state: the number of updates of each member, ``int64[M]``, and hyperparameters by name."""


PAIRS = {"betas": ("beta1", "beta2"), "etas": ("etaminus", "etaplus"), "eps": ("eps1", "eps2")}
PAIRS["step_sizes"] = ("step_size_min", "step_size_max")
"""The hyperparameters in an argument that is a pair."""


def pair_of(pair: Any, name: str = "betas") -> dict[str, PerModel]:
    """The numbers of a pair by name; tuples in a list are those of members, which would be taken for rates of one kind."""
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or (isinstance(pair, list) and any(isinstance(each, tuple) for each in pair)):
        raise HyperparameterError(f"{name} is {pair!r}; give a pair, each of one number or one per model")
    return dict(zip(PAIRS[name], pair, strict=True))


def decay_mean(mean: Tensor, grad: Tensor, share: Any) -> Tensor:
    """``mean = (1 - share) * mean + share * grad`` in place."""
    # PyTorch has no batching rules for lerp_ and addcmul_, and a rule may run under vmap.
    return mean.add_((grad - mean).mul_(share))


def decay_square(square: Tensor, decay: Any, grad: Tensor, share: Any) -> None:
    """``square = decay * square + share * grad^2`` in place."""
    square.mul_(decay).add_((grad * share).mul_(grad))


def moments(grad: Tensor, k: Mapping[str, Any], mean: Tensor, square: Tensor) -> None:
    """Adam's averages of gradients and of their squares, in place."""
    decay_mean(mean, grad, k["1-beta1"])
    decay_square(square, k["beta2"], grad, k["1-beta2"])


def correct(at: dict[str, Tensor], count: Tensor) -> None:
    """Adam's bias corrections in numbers per member, outside the leaves: of the root in the step and in ``eps``."""
    root = (1 - at["beta2"] ** count).sqrt()
    at["step"], at["eps"] = -at["lr"] * root, at["eps"] * root


def leafwise(
    state: Callable[..., Any],
    knobs: Hyperparams,
    rule: Callable[..., Tensor],
    prepare: Callable[..., tuple[Tensor, ...] | None] = lambda at, count: None,
    *,
    unused: tuple[str, ...] = (),
    carried: tuple[str, ...] = (),
    start: Callable[[str, Tensor, str], Tensor] = lambda path, param, slot: torch.zeros_like(param),
    decoupled: bool = False,
    maximize: bool = False,
    elementwise: bool = True,
) -> GradientTransformation:
    """A transformation from the update rule of one parameter.

    Args:
        state: NamedTuple of ``FIELDS``, the carried numbers, and the slots, which hold one tensor per parameter.
        knobs: The hyperparameters. ``leafwise`` itself applies ``weight_decay``, if there is one.
        rule: ``rule(grad, param, k, *slots) -> direction`` over ``[M, ...]``, which updates its slots in place; the
            parameter's update is ``k["step"] * direction``. ``k`` holds numbers by name: tensors that broadcast.
            Besides the hyperparameters these are ``"1-beta1"`` and the like for every decay rate.
        prepare: ``prepare(at, count, *carried) -> carried`` adds the other numbers that the rule needs to ``at``, vectors
            ``float64[M]`` by name; ``count`` numbers the update, from 1. ``step`` is ``-lr`` unless it is set here.
        unused: Slots that stay empty and are not passed to the rule.
        carried: Vectors ``float64[M]`` that are carried from update to update. They start at one.
        start: ``start(path, param, slot)`` is the initial value of a slot, zero by default.
        decoupled: Subtract ``lr * weight_decay`` times the parameter instead of adding weight decay to the gradient.
        maximize: Maximize instead of minimize.
        elementwise: Whether the rule treats every element independently, so that one kernel may run it for all.
    """
    knobs = knobs.without_zeros("weight_decay")
    slots = [name for name in state._fields if name not in (*FIELDS, *carried)]  # pyright: ignore
    used = [name for name in slots if name not in unused]
    decays = [name for name in knobs.specs if range_of(knobs.owner, name) is Range.DECAY]

    def init(params: Params) -> Any:
        filled = {name: {path: start(path, param, name) for path, param in params.items()} for name in used}
        count = zero_count(params)
        ones = {name: torch.ones_like(count, dtype=torch.float64) for name in carried}
        return state(step=count, hyperparams=knobs.init(params), **ones, **{name: {} for name in unused}, **filled)

    def begin(opt_state: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of this update, and the fields of the next state that hold one number per member."""
        at, count = knobs.at(opt_state.hyperparams, opt_state.step), opt_state.step + 1
        at |= {f"1-{name}": 1 - at[name] for name in decays}
        after = prepare(at, count, *(getattr(opt_state, name) for name in carried)) or ()
        at.setdefault("step", -at["lr"])
        if "weight_decay" in at:
            at["decay"] = -at["lr"] * at["weight_decay"] if decoupled else at["weight_decay"]
        return at, {"step": count, **dict(zip(carried, after, strict=True))}

    def change(grad: Any, param: Any, k: Mapping[str, Any], *slot_leaves: Any) -> Any:
        """The change of the parameter; writes the slots."""
        grad = -grad if maximize else grad
        if "decay" in k and not decoupled:
            grad = grad + k["decay"] * param
        moved = rule(grad, param, k, *slot_leaves) * k["step"]
        return moved + param * k["decay"] if "decay" in k and decoupled else moved

    def changed(grad: Tensor, param: Tensor, k: Mapping[str, Any], slot_leaves: list[Tensor]) -> Any:
        """The change and new slots."""
        wide = [_wide(slot).clone() for slot in slot_leaves]
        out = change(_wide(grad), _wide(param), k, *wide)
        return out, [new.to(slot.dtype) for new, slot in zip(wide, slot_leaves, strict=True)]

    kernel = Kernel(change, len(used))

    def at_once(at: dict[str, Tensor], trees: tuple[Params, ...], outs: list[Params], **how: Any) -> None:
        """The results of the kernel, for leaves of the dtypes that it supports."""
        observed = inside_transform() or (not torch.compiler.is_compiling() and num_dispatch_modes() > num_recorders())
        if not elementwise or observed or any(value.requires_grad for value in at.values()):
            return
        grads, params, *_ = trees
        for dtype in {params[path].dtype for path in grads}:
            paths = [path for path in grads if params[path].dtype == dtype]
            columns = kernel([[_real(tree[path]) for path in paths] for tree in trees], at, **how)
            if columns is not None:
                for tree, column in zip(outs, columns, strict=True):
                    tree.update(zip(paths, map(_as(dtype), column), strict=True))

    def one_by_one(at: Any, made: Any, leaves: Iterable[Tensor], keep: Any, donate: bool, apply: bool) -> list[Tensor]:
        """The same for one leaf, by operators."""
        grad, param, *slot_leaves = map(_real, leaves)
        # Rules write in place, which an outer gradient does not allow.
        around = inside_transform() and not torch.compiler.is_compiling()
        k, func = _like(param, at, made), torch.func.functionalize(changed) if around else changed
        out, fresh = func(grad, param, k, slot_leaves)
        olds = [param, *slot_leaves] if apply else slot_leaves
        news = [(param + out).to(param.dtype), *fresh] if apply else fresh
        if keep is not None:
            news = [where(keep, new, old) for new, old in zip(news, olds, strict=True)]
        if donate:
            write(olds, news)
            news = olds
        return news if apply else [out, *news]

    def run(grads: Params, opt_state: Any, params: Params, keep: Any, donate: bool, apply: bool) -> tuple[Params, Any]:
        at, new = begin(opt_state)
        trees = grads, params, *(getattr(opt_state, name) for name in used)
        results, after, made = {}, {name: {} for name in slots}, {}
        outs = [results, *(after[name] for name in used)]
        at_once(at, trees, outs, keep=keep, donate=donate, apply=apply)
        for path in [path for path in grads if path not in results]:
            leaves = one_by_one(at, made, (tree[path] for tree in trees), keep, donate, apply)
            for tree, leaf in zip(outs, map(_as(params[path].dtype), leaves), strict=True):
                tree[path] = leaf
        if keep is not None:
            new = where(keep, new, {name: getattr(opt_state, name) for name in new})
        # Not _replace: the compiler of PyTorch 2.9 cannot return what that makes.
        return results, state(**{name: getattr(opt_state, name) for name in opt_state._fields} | new | after)

    return by_renew(init, run)


def _like(leaf: Tensor, at: dict[str, Tensor], made: dict[Any, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The numbers as tensors that broadcast over a leaf, ``made`` once for each dtype and number of axes."""
    dtype = torch.float32 if leaf.dtype in (torch.bfloat16, torch.float16) else leaf.dtype
    key = dtype, leaf.dim()
    if key not in made:
        # Stacked, so that the compiler computes them once and not for every element of every leaf.
        columns = torch.stack([value.to(dtype) for value in at.values()], 0)
        columns = columns.reshape(*columns.shape, *(1,) * (leaf.dim() - 1)).unbind()
        made[key] = dict(zip(at, columns, strict=True))
    return made[key]


def _real(leaf: Tensor) -> Tensor:
    """Complex numbers as pairs, as ``torch.optim`` updates them: ``[M, ...] -> [M, ..., 2]``."""
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The inverse of :func:`_real` for leaves of a dtype."""
    return torch.view_as_complex if dtype.is_complex else lambda real: real


def _wide(leaf: Tensor) -> Tensor:
    """The leaf with at least 32 bits: with fewer, a decay rate such as 0.999 would round to 1."""
    return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
