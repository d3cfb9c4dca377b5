"""Optimizers whose rule is of each element: by squares of gradients (Adagrad, Adadelta, RMSprop), by momentum (SGD, Lion)."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model
from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, check, restrict, vector
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

AdagradState = namedtuple("AdagradState", [*FIELDS, "sum"])
"""Sums of the squared gradients."""
restrict(AdagradState, lr_decay=Range.NONNEGATIVE)


@recorded
def adagrad(
    lr: PerModel = 1e-2,
    lr_decay: PerModel = 0.0,
    weight_decay: PerModel = 0.0,
    initial_accumulator_value: PerModel = 0.0,
    eps: PerModel = 1e-10,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adagrad, as ``torch.optim.Adagrad`` computes it.

    With gradient g at update t: ``s += g^2``; ``p -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)``.

    Args:
        lr: Learning rate.
        lr_decay: How fast the learning rate decays.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        initial_accumulator_value: Initial value of the sums. It is not part of the state.
        eps: Added to the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = adagrad(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 2011.
    """
    hyperparams = Hyperparams(AdagradState, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    check("initial_accumulator_value", initial_accumulator_value, Range.NONNEGATIVE)

    def start(path: str, param: Tensor) -> Tensor:
        values = vector("initial_accumulator_value", initial_accumulator_value, param.shape[0], param.device)
        values = torch.complex(values, values) if param.is_complex() else values
        return torch.zeros_like(param) + per_model(values, param)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["step"] = -at["lr"] / (1 + (count - 1) * at["lr_decay"])

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], total: Tensor) -> Tensor:
        total.add_(grad * grad)
        return grad / total.sqrt().add_(k["eps"])

    return leafwise(AdagradState, hyperparams, rule, prepare, start=start, maximize=maximize)


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

    return leafwise(AdadeltaState, hyperparams, rule, maximize=maximize)


RMSpropState = namedtuple("RMSpropState", [*FIELDS, "square_avg", "grad_avg", "momentum"])
"""Averages of the squared gradients and, with ``centered``, of the gradients; momentum buffers if there is momentum."""
restrict(RMSpropState, alpha=Range.DECAY)


@recorded
def rmsprop(
    lr: PerModel = 1e-2,
    alpha: PerModel = 0.99,
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    momentum: PerModel = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """RMSprop, as ``torch.optim.RMSprop`` computes it.

    With gradient g: ``v = alpha * v + (1 - alpha) * g^2``; ``b = momentum * b + g / (sqrt(v) + eps)``; ``p -= lr * b``. With
    ``centered``, the square of an average of the gradients is subtracted from v under the root.

    Args:
        lr: Learning rate.
        alpha: Decay rate of the averages.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        momentum: Momentum factor. The plain number 0 removes the term from the program.
        centered: Divide by an estimate of the standard deviation instead.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = rmsprop(lr=[0.01, 0.1]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Tieleman and Hinton, "Lecture 6.5: RMSProp", Coursera, 2012.
        Graves, "Generating sequences with recurrent neural networks", arXiv:1308.0850, 2013 (``centered``).
    """
    hyperparams = Hyperparams(RMSpropState, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    hyperparams = hyperparams.without_zeros("momentum")
    unused = (() if centered else ("grad_avg",)) + (() if "momentum" in hyperparams else ("momentum",))

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], square: Tensor, *others: Tensor) -> Tensor:
        decay_square(square, k["alpha"], grad, k["1-alpha"])
        variance = square
        if centered:
            mean = decay_mean(others[0], grad, k["1-alpha"])
            variance = torch.addcmul(square, mean, mean, value=-1)
        scaled = grad / variance.sqrt().add_(k["eps"])
        return others[-1].mul_(k["momentum"]).add_(scaled) if "momentum" in k else scaled

    return leafwise(RMSpropState, hyperparams, rule, unused=unused, maximize=maximize)


SGDState = namedtuple("SGDState", [*FIELDS, "momentum"])
"""Momentum buffers, if there is momentum."""


@recorded
def sgd(
    lr: PerModel = 1e-3,
    momentum: PerModel = 0.0,
    dampening: PerModel = 0.0,
    weight_decay: PerModel = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` computes it.

    With gradient g and momentum buffer b: ``g += weight_decay * p``; ``b = momentum * b + (1 - dampening) * g`` (``b = g``
    at the first update); ``p -= lr * b``, or ``p -= lr * (g + momentum * b)`` with ``nesterov``.

    Args:
        lr: Learning rate.
        momentum: Momentum factor. For this and the next two, the plain number 0 removes the term from the program; to
            switch it on later, give one number per member.
        dampening: Fraction of each gradient that does not enter the momentum buffer. No effect where momentum is 0.
        weight_decay: L2 penalty added to the gradient.
        nesterov: Nesterov's momentum.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = sgd(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    """
    hyperparams = Hyperparams(SGDState, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    hyperparams = hyperparams.without_zeros("momentum", "dampening")

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        if "dampening" in at and "momentum" in at:
            at["fresh"] = torch.where((count == 1) | (at["momentum"] == 0), 1.0, 1 - at["dampening"])

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], *buffers: Tensor) -> Tensor:
        if not buffers:
            return grad
        buffer = buffers[0].mul_(k["momentum"]).add_(grad * k["fresh"] if "fresh" in k else grad)
        return grad + k["momentum"] * buffer if nesterov else buffer

    unused = () if "momentum" in hyperparams else ("momentum",)
    return leafwise(SGDState, hyperparams, rule, prepare, unused=unused, maximize=maximize)


LionState = namedtuple("LionState", [*FIELDS, "exp_avg"])
"""Averages of the gradients."""


@recorded
def lion(
    lr: PerModel = 1e-4,
    betas: tuple[PerModel, PerModel] = (0.9, 0.99),
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Lion: steps of equal size in every entry, with the sign of an average.

    With gradient g: ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``;
    ``m = beta2 * m + (1 - beta2) * g``.

    Args:
        lr: Learning rate, typically three to ten times smaller than Adam's.
        betas: The average's weight in the step, and its decay rate; ``beta1`` and ``beta2`` in the state.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = lion(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """
    hyperparams = Hyperparams(LionState, lr=lr, **pair_of(betas), weight_decay=weight_decay)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor) -> Tensor:
        direction = torch.lerp(mean, grad, k["1-beta1"]).sign_()
        decay_mean(mean, grad, k["1-beta2"])
        return direction

    return leafwise(LionState, hyperparams, rule, decoupled=True, maximize=maximize)
