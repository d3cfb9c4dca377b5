"""Functions that do not work under vmap, rewritten with the same mathematics, and branches on values, ``if tensor``.

PyTorch's versions read the values of their tensors, or properties that tensors do not have under vmap. Those that refuse bad
values, such as a matrix that is not positive definite, raise for a whole batch, or end the process, so one bad member would
end all others: here the whole result of the member becomes NaN, even if only one of its matrices is bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# As they are now, whatever has their names later.
from torch.nn.functional import cross_entropy, normalize, one_hot

from hfta_func import _torch
from hfta_func.calls.autodiff import AUTODIFF, requires_grad_
from hfta_func.calls.body import Diverged, Mode

linalg: Any = torch.linalg
higher: Any = torch.ops.higher_order


class lowered(Mode):
    """Replaces the functions in :data:`LOWERED` inside the ``with`` block, as :class:`hfta_func.calls.routed` does too."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function."""
        return LOWERED.get(func, func)(*args, **kwargs)


_DERIVATIVES = _torch.TransformType.Grad, _torch.TransformType.Jvp


def _below_derivatives(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """``read(x)`` below the derivatives inside a ``vmap``, in which members still have values of their own."""

    def below(x: Tensor) -> Any:
        interpreter = _torch.peek_interpreter()
        if torch.compiler.is_compiling() or interpreter is None or interpreter.key() not in _DERIVATIVES:
            return read(x)
        with _torch.current_interpreter().lower():
            return below(_torch.unwrap_for_grad(x, interpreter.level()))

    return below


@_below_derivatives
def _item(x: Tensor) -> Any:
    """``x.item()``: the value that all members agree on, such as that of a counter; of a bool it is a branch."""
    if x.dtype == torch.bool or not _is_mapped() or x.numel() != 1:
        return _truth(x) if x.dtype == torch.bool and _is_mapped() else x.item()
    interpreter = _torch.current_interpreter()
    values, dim = _torch.unwrap_batched(x, interpreter.level())
    with interpreter.lower():
        if dim is None or bool((values == values.select(dim, 0).unsqueeze(dim)).all()):
            return _item(values if dim is None else values.select(dim, 0))
    # Raises PyTorch's error.
    return x.item()


def _is_mapped() -> bool:
    interpreter = _torch.peek_interpreter()
    is_mapped = interpreter is not None and interpreter.key() == _torch.TransformType.Vmap
    return is_mapped and not torch.compiler.is_compiling()


@_below_derivatives
def _truth(x: Tensor) -> bool:
    """``bool(x)``: the value that all members agree on, else an error that makes them run in groups."""
    if not _is_mapped():
        return bool(x)
    interpreter = _torch.current_interpreter()
    values, dim = _torch.unwrap_batched(x, interpreter.level())
    if dim is None:
        return bool(x)
    with interpreter.lower():
        if values.numel() != values.shape[dim]:
            # Raises PyTorch's error.
            return bool(values.select(dim, 0))
        flags = values.flatten().bool()
        # Only one number is read, because each read waits until the device has finished its work.
        count = int(flags.sum())
        if 0 < count < len(flags):
            raise Diverged([bool(flag) for flag in flags.unbind()])
    return count > 0


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: Any = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Clamps negative variances to ``eps``, as it does all below ``eps``; refusing them would read their values."""
    var = torch.as_tensor(var, dtype=input.dtype, device=input.device)
    if var.dim() and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # The gradient ignores the clamp.
    var = torch.where(var < eps, eps + (var - var.detach()), var)
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + 0.5 * math.log(2 * math.pi) * full
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _cross_entropy(*args: Any, label_smoothing: Any = 0.0, **kwargs: Any) -> Tensor:
    """Takes smoothing that is a tensor, in which the loss is linear."""
    if len(args) > 7:
        args, label_smoothing = args[:7], args[7]
    if not isinstance(label_smoothing, Tensor):
        return cross_entropy(*args, label_smoothing=label_smoothing, **kwargs)
    sharp, smooth = (cross_entropy(*args, label_smoothing=value, **kwargs) for value in (0.0, 1.0))
    # A class that is impossible has an infinite smooth loss, which does not count without smoothing.
    return (1 - label_smoothing) * sharp + torch.where(label_smoothing == 0, 0, label_smoothing * smooth)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Reads no values; PyTorch reads them under vmap if a gradient is taken inside."""
    if num_classes <= 0:
        return one_hot(tensor, num_classes)
    return tensor.new_zeros(*tensor.shape, num_classes).scatter(-1, tensor.unsqueeze(-1), 1)


def _without_layout(func: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves out a memory format for four or five axes: an array has one more, and the format changes no values."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
            del kwargs["memory_format"]
        return func(*args, **kwargs)

    return plain


def _is_contiguous(tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return memory_format not in (torch.channels_last, torch.channels_last_3d) and tensor.is_contiguous()


def _made_like(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Asks for the gradient of the new tensor inside ``vmap``, not of its wrapper, which has no history."""
    plain = _without_layout(func)

    def made(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        result = plain(*args, **kwargs)
        return requires_grad_(result) if requires_grad else result

    return made


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """Writes ``out``, which spectral normalisation passes, by an operator with a batching rule."""
    normalized = normalize(input, p, dim, eps)
    return normalized if out is None else out.copy_(normalized)


def _dense(func: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Leaves out ``sparse``: the gradient of all members' tables is one scatter."""

    def dense(*args: Any, sparse: bool = False, **kwargs: Any) -> Any:
        return func(*[False if i == position else x for i, x in enumerate(args)], **kwargs)

    return dense


def _cond(pred: Any, true_func: Any, false_func: Any, operands: Any = (), **options: Any) -> Any:
    """Computes both sides where members differ; PyTorch would compile them."""
    if not isinstance(pred, Tensor) or not (torch.compiler.is_compiling() or _torch.is_wrapped(pred)):
        return (true_func if pred else false_func)(*operands)
    sides = [func(*operands) for func in (true_func, false_func)]
    return _torch.pytree.tree_map(lambda a, b: torch.where(pred, a, b), *sides)


def _spoiled(outputs: Any, bad: Tensor) -> Any:
    """The outputs, NaN if ``bad``, except integers: pivots and ranks."""
    if isinstance(outputs, Tensor):
        return outputs.masked_fill(bad, math.nan) if outputs.is_floating_point() or outputs.is_complex() else outputs
    return type(outputs)([_spoiled(output, bad) for output in outputs])


def _masked(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` with a matrix that it refuses replaced by the identity, so that the backward pass never sees it."""

    def masked(*args: Any, **kwargs: Any) -> Any:
        x, *rest = args or (kwargs.pop("A"),)
        if not isinstance(x, Tensor) or x.dim() < 2 or kwargs.get("out") is not None:
            return func(x, *rest, **kwargs)
        bad = ~x.detach().isfinite().all()
        if func is linalg.solve:
            # Not by solve_ex, whose derivative under a transform solves with the matrix again.
            wide = torch.promote_types(x.dtype, torch.float32)
            bad = bad | (linalg.lu_factor_ex(x.detach().to(wide)).info != 0).any()
        identity = torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)
        return _spoiled(func(torch.where(bad, identity, x), *rest, **kwargs), bad)

    return masked


def _by_info(func: Callable[..., Any]) -> Callable[..., Tensor]:
    """The result of a function that reports failures in ``info``, its other output; NaN if there is one."""

    def checked(A: Tensor, **options: Any) -> Tensor:
        result, info = func(A, **options)
        return _spoiled(result, (info != 0).any())

    return checked


def _binary_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """NaN where input or target are no probabilities."""
    bad = ~((input >= 0) & (input <= 1)).all() | ~((target >= 0) & (target <= 1)).all()
    given = torch.where(bad, 0.5, input), torch.where(bad, 0.5, target)
    return _spoiled(F.binary_cross_entropy(*given, *args, **kwargs), bad)


def _grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """NaN where the grid is: PyTorch may read outside of its memory there."""
    bad = grid.isnan().any(-1)
    sampled = F.grid_sample(input, grid.masked_fill(bad.unsqueeze(-1), 0), *args, **kwargs)
    return sampled.masked_fill(bad.unsqueeze(1), math.nan)


_MASKED = "cond eig eigh eigvals eigvalsh matrix_rank pinv solve svd svdvals".split()
_PLAIN = "bfloat16 bool byte cdouble cfloat chalf char clone contiguous double float half int long short to".split()

OPERATORS: dict[Any, Callable[..., Any]] = {higher.cond: _cond, higher.flex_attention: _torch.math_attention}
"""Replacements for operators of functions, which PyTorch compiles, also those of a model alone in a mode."""

LOWERED: dict[Any, Callable[..., Any]] = {
    **{getattr(linalg, name): _masked(getattr(linalg, name)) for name in _MASKED},
    linalg.cholesky: _by_info(linalg.cholesky_ex),
    **dict.fromkeys((linalg.inv, torch.inverse, Tensor.inverse), _by_info(linalg.inv_ex)),
    **{F.binary_cross_entropy: _binary_cross_entropy, F.gaussian_nll_loss: _gaussian_nll_loss},
    **{F.cross_entropy: _cross_entropy, F.normalize: _normalize, F.one_hot: _one_hot, F.grid_sample: _grid_sample},
    **{F.embedding: _dense(F.embedding, 6), F.embedding_bag: _dense(F.embedding_bag, 7)},
    **{Tensor.__bool__: _truth, Tensor.item: _item},
    **{Tensor.__float__: lambda x: float(_item(x)), Tensor.__int__: lambda x: int(_item(x))},
    **{func: _without_layout(func) for func in (torch.clone, *(getattr(Tensor, name) for name in _PLAIN))},
    **{func: _made_like(func) for func in (torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like)},
    Tensor.is_contiguous: _is_contiguous,
    **AUTODIFF,
    **OPERATORS,
    # Whether a transformer may take nested tensors, which are made of values; without them it computes padding, too.
    _torch.is_nestable: lambda *args, **kwargs: False,
}
"""Replacement by function."""

if hasattr(F, "linear_cross_entropy"):
    # Never in chunks: that function reads ``requires_grad`` of its arguments, which is unknown under vmap.
    LOWERED[F.linear_cross_entropy] = lambda *args, options=None, **kwargs: F.linear_cross_entropy(*args, **kwargs)
