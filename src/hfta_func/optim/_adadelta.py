"""Adadelta."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_square, leafwise

AdadeltaState = namedtuple("AdadeltaState", [*FIELDS, "square_avg", "acc_delta"])
"""Averages of the squared gradients and of the squared updates."""
restrict(AdadeltaState, rho=Range.DECAY)


@recorded
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
        lr: Learning rate.
        rho: Decay rate of the two averages.
        eps: Added under both roots.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = adadelta(lr=[1.0, 10.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.0032, -0.0316])

    References:
        Zeiler, "Adadelta: an adaptive learning rate method", arXiv:1212.5701, 2012.
    """
    hyperparams = Hyperparams(AdadeltaState, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], square: Tensor, deltas: Tensor) -> Tensor:
        decay_square(square, k["rho"], grad, k["1-rho"])
        delta = (deltas + k["eps"]).sqrt_().div_((square + k["eps"]).sqrt_()).mul_(grad)
        decay_square(deltas, k["rho"], delta, k["1-rho"])
        return delta

    return leafwise(AdadeltaState, hyperparams.without_zeros("weight_decay"), rule, maximize=maximize)
