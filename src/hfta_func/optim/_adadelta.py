"""Adadelta."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs
from hfta_func.optim._leafwise import decay_square, leafwise, zeros


class AdadeltaState(NamedTuple):
    """Updates made by each member, its hyperparameters, and its averages of squared gradients and squared updates."""

    step: Tensor
    hyperparams: dict[str, Any]
    square_avg: Params
    acc_delta: Params


def adadelta(
    lr: PerModel = 1.0,
    rho: PerModel = 0.9,
    eps: PerModel = 1e-6,
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adadelta, as ``torch.optim.Adadelta`` computes it.

    With gradient g: ``v = rho * v + (1 - rho) * g^2``; ``d = sqrt(u + eps) / sqrt(v + eps) * g``;
    ``u = rho * u + (1 - rho) * d^2``; ``p -= lr * d``.

    Args:
        lr: Factor of the update.
        rho: Decay of the two averages.
        eps: Added inside both roots.
        weight_decay: L2 penalty, added to the gradient; the plain number 0 leaves it out of the program.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = adadelta(lr=[1.0, 10.0])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.0032, -0.0316])

    References:
        Zeiler, "Adadelta: an adaptive learning rate method", arXiv:1212.5701, 2012.
    """
    knobs = Knobs(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["1-rho"], at["step"] = 1 - at["rho"], -at["lr"]

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], square: Tensor, deltas: Tensor) -> Tensor:
        decay_square(square, k["rho"], grad, k["1-rho"])
        delta = (deltas + k["eps"]).sqrt_().div_((square + k["eps"]).sqrt_()).mul_(grad)
        decay_square(deltas, k["rho"], delta, k["1-rho"])
        return delta

    return leafwise(
        AdadeltaState,
        knobs.without_zeros("weight_decay"),
        rule,
        slots={"square_avg": zeros, "acc_delta": zeros},
        prepare=prepare,
        maximize=maximize,
    )
