"""Adafactor."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import Params, PerModel, recorded
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, is_padded, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, pair_of

AdafactorState = namedtuple("AdafactorState", [*FIELDS, "row_var", "col_var", "variance"])
"""Averages of the squared gradients: by rows and by columns for matrices, of every entry for vectors; else ``[M, 0]``."""
restrict(AdafactorState, beta2_decay=Range.NONPOSITIVE, d=Range.AT_LEAST_ONE)
restrict(AdafactorState, eps1=Range.NONNEGATIVE, eps2=Range.NONNEGATIVE)


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

    def start(path: str, param: Tensor) -> Tensor:
        if param.is_complex() or is_padded.get():
            why = "is padded for smaller members, which changes its mean squares" if is_padded.get() else "is complex"
            raise HyperparameterError(f"adafactor does not take '{path}', which {why}; use another optimizer for it")
        return param.new_zeros(param.shape[0], 0)

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

    made = leafwise(
        AdafactorState, hyperparams, rule, prepare, start=start, decoupled=True, maximize=maximize, elementwise=False
    )

    def init(params: Params) -> Any:
        state = made.init(params)
        for path, param in params.items():
            if param.dim() > 2:
                state.row_var[path] = torch.zeros_like(param[..., :1])
                state.col_var[path] = torch.zeros_like(param[..., :1, :])
            else:
                state.variance[path] = torch.zeros_like(param)
        return state

    return made._replace(init=init)


def _rms(leaf: Tensor) -> Tensor:
    """The root mean square of each member's part, in a shape that broadcasts."""
    norms = torch.linalg.vector_norm(leaf.reshape(leaf.shape[0], -1), dim=1)
    return per_model(norms / (leaf.numel() / leaf.shape[0]) ** 0.5, leaf)
