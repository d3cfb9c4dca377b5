"""Optimizers that look at a parameter as a whole: LAMB, Muon, Adafactor."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import PerModel, recorded
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, check_choice, is_padded, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, moments, pair_of

LambState = namedtuple("LambState", [*FIELDS, "exp_avg", "exp_avg_sq"])
"""Averages of the gradients and of their squares."""


@recorded
def lamb(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-6,
    weight_decay: PerModel = 1e-2,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """LAMB: Adam with each parameter's step scaled to the norm of the parameter.

    With Adam's averages m and v at update t: ``u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p``;
    ``p -= lr * |p| / |u| * u``, with L2 norms over each member's parameter. Where a norm is 0, their ratio counts as 1.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: Decay rate, part of the step that is scaled.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = lamb(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, algorithm 2.
    """
    hyperparams = Hyperparams(LambState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["left1"], at["left2"] = 1 - at["beta1"] ** count, 1 - at["beta2"] ** count
        # Renamed, because it counts towards the norm, so leafwise must not apply it.
        at["inner decay"] = at.pop("weight_decay", torch.zeros_like(at["lr"]))

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        moments(grad, k, mean, square)
        root = (square / k["left2"]).sqrt_().add_(k["eps"])
        direction = (mean / k["left1"]).div_(root).add_(param * k["inner decay"])
        length, step = (torch.linalg.vector_norm(x.reshape(x.shape[0], -1), dim=1) for x in (param, direction))
        ratio = torch.where((length > 0) & (step > 0), length / step, 1.0)
        return direction.mul_(per_model(ratio, param))

    return leafwise(LambState, hyperparams, rule, prepare, maximize=maximize, elementwise=False)


MuonState = namedtuple("MuonState", [*FIELDS, "momentum"])
"""Momentum buffers."""


@recorded
def muon(
    lr: PerModel = 1e-3,
    weight_decay: PerModel = 0.1,
    momentum: PerModel = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
    *,
    ns_dtype: torch.dtype = torch.bfloat16,
    maximize: bool = False,
) -> GradientTransformation:
    """Momentum with nearly orthogonal updates of matrices, as ``torch.optim.Muon`` computes it.

    With gradient g and momentum buffer b: ``b = momentum * b + (1 - momentum) * g``; the update is b, or with ``nesterov``
    ``momentum * b + (1 - momentum) * g``, divided by its norm, followed by ``ns_steps`` Newton-Schulz
    iterations ``x = a x + (b x x^T + c (x x^T)^2) x``; ``p -= lr * (scale * x + weight_decay * p)``.

    Args:
        lr: Learning rate.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        momentum: Momentum factor.
        nesterov: Use Nesterov momentum.
        ns_coefficients: a, b and c.
        eps: Lower bound of the norm in the division.
        ns_steps: Number of iterations.
        adjust_lr_fn: Scale of the update of a matrix [A, B]: ``sqrt(max(1, A / B))``, or ``0.2 * sqrt(max(A, B))``, which
            suits learning rates tuned for AdamW.
        ns_dtype: The dtype of the iterations.
        maximize: Maximize instead of minimize.

    Raises:
        HyperparameterError: if a parameter is not a matrix (use another optimizer for it, with :func:`partition`), or
            ``adjust_lr_fn`` is unknown.

    Example:
        >>> optimizer = muon(lr=[0.1, 1.0], ns_dtype=torch.float32)
        >>> params, grads = {"w": torch.zeros(2, 1, 1)}, {"w": torch.ones(2, 1, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.0696, -0.6964])

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
        Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982, 2025 (``match_rms_adamw``).
    """
    check_choice("adjust_lr_fn", adjust_lr_fn, ("original", "match_rms_adamw"))
    knobs = Hyperparams(MuonState, lr=lr, weight_decay=weight_decay, momentum=momentum)

    def start(path: str, param: Tensor, slot: str) -> Tensor:
        if param.dim() != 3 or param.is_complex():
            kind = "complex " if param.is_complex() else ""
            why = f"muon takes only real matrices, but '{path}' of one model is {kind}{list(param.shape[1:])}"
            raise HyperparameterError(f"{why}; use partition(...) to give it another optimizer")
        if is_padded.get():
            why = f"muon scales the update of '{path}' by its shape, which padding changes for smaller members"
            raise HyperparameterError(f"{why}; use another optimizer, or make an array of the models of each size")
        return torch.zeros_like(param)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["1-momentum"] = 1 - at["momentum"]

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], buffer: Tensor) -> Tensor:
        decay_mean(buffer, grad, k["1-momentum"])
        update = torch.lerp(grad, buffer, k["momentum"]) if nesterov else buffer
        direction = _orthogonal(update.to(ns_dtype), ns_coefficients, ns_steps, eps).to(param.dtype)
        rows, columns = param.shape[1:]
        scale = max(1, rows / columns) ** 0.5 if adjust_lr_fn == "original" else 0.2 * max(rows, columns) ** 0.5
        return direction * scale

    return leafwise(MuonState, knobs, rule, prepare, start=start, decoupled=True, maximize=maximize, elementwise=False)


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``[M, A, B]`` with the same singular vectors and singular values near one."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


AdafactorState = namedtuple("AdafactorState", [*FIELDS, "row_var", "col_var", "variance"])
"""Averages of the squared gradients: by rows and by columns for matrices, of every entry for vectors; else ``[M, 0]``."""
restrict(AdafactorState, beta2_decay=Range.NONPOSITIVE, d=Range.AT_LEAST_ONE)


@recorded
def adafactor(
    lr: PerModel = 1e-2,
    beta2_decay: PerModel = -0.8,
    eps: tuple[PerModel | None, PerModel] = (None, 1e-3),
    d: PerModel = 1.0,
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adafactor, as ``torch.optim.Adafactor`` computes it: the state of a matrix is a column and a row.

    With gradient g at update t and ``b = t^beta2_decay``, over the last two axes of each member's parameter:
    ``r += b * (mean_columns(g^2) - r)``; ``c += b * (mean_rows(g^2) - c)``; ``v = r c / max(mean(r), eps1)``, and for
    vectors and numbers ``v += b * (g^2 - v)``; ``u = g / sqrt(max(v, eps1^2))``;
    ``p -= min(lr, 1 / sqrt(t)) * max(eps2, rms(p)) / max(1, rms(u) / d) * u + lr * weight_decay * p``.

    Args:
        lr: Upper bound of the step relative to the size of the parameter.
        beta2_decay: Power by which the weight of a new gradient decays, at most 0.
        eps: Lower bounds, ``eps1`` of the averages and ``eps2`` of the size of the parameter. None as the first is the
            resolution of the parameter's dtype, and of float32 for a narrower one; then the state has no ``eps1``.
        d: Root mean square above which an update is scaled down.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Raises:
        HyperparameterError: if a parameter is complex, or padded because models differ in size.

    Example:
        >>> optimizer, params, grads = adafactor(lr=[0.1, 1.0]), {"w": torch.ones(2, 3)}, {"w": torch.ones(2, 3)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"][:, 0]
        tensor([-0.1000, -1.0000])

    References:
        Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018.
    """
    pair = {name: each for name, each in pair_of(eps, "eps").items() if each is not None}
    hyperparams = Hyperparams(AdafactorState, lr=lr, beta2_decay=beta2_decay, d=d, **pair, weight_decay=weight_decay)

    def start(path: str, param: Tensor, slot: str) -> Tensor:
        if param.is_complex() or is_padded.get():
            raise HyperparameterError(f"adafactor needs real, unpadded parameters, not '{path}'; use another optimizer")
        slots = {"row_var": param[..., :1], "col_var": param[..., :1, :]} if param.dim() > 2 else {"variance": param}
        return torch.zeros_like(slots[slot]) if slot in slots else param.new_zeros(len(param), 0)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["share"] = count ** at["beta2_decay"]
        at["step"] = -torch.minimum(at["lr"], count.to(at["lr"]) ** -0.5)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], row: Tensor, col: Tensor, variance: Tensor) -> Tensor:
        least, square = k.get("eps1", torch.finfo(param.dtype).eps), grad * grad
        if param.dim() > 2:
            decay_mean(row, square.mean(-1, keepdim=True), k["share"])
            decay_mean(col, square.mean(-2, keepdim=True), k["share"])
            estimate = row * col / row.mean(-2, keepdim=True).clamp_min(least)
        else:
            estimate = decay_mean(variance, square, k["share"])
        direction = estimate.clamp_min(least * least).rsqrt() * grad
        return direction * _rms(param).maximum(k["eps2"]) / (_rms(direction) / k["d"]).clamp_min(1.0)

    how: Any = {"decoupled": True, "maximize": maximize, "elementwise": False}
    return leafwise(AdafactorState, hyperparams, rule, prepare, start=start, **how)


def _rms(leaf: Tensor) -> Tensor:
    """The root mean square of each member's part, in a shape that broadcasts."""
    return per_model(torch.linalg.vector_norm(leaf.reshape(leaf.shape[0], -1), dim=1) / leaf[0].numel() ** 0.5, leaf)
