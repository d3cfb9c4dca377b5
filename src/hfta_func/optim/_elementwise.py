"""Optimizers whose rule is of each element: by squares of gradients (Adagrad, Adadelta, RMSprop), by momentum (SGD),
with an average of the parameters (ASGD), by signs of gradients (Rprop).
"""

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

    def start(path: str, param: Tensor, slot: str) -> Tensor:
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
    unused = (() if centered else ("grad_avg",)) + (() if "momentum" in hyperparams.specs else ("momentum",))

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

    unused = () if "momentum" in hyperparams.specs else ("momentum",)
    return leafwise(SGDState, hyperparams, rule, prepare, unused=unused, maximize=maximize)


ASGDState = namedtuple("ASGDState", [*FIELDS, "eta", "mu", "ax"])
"""The next step sizes and weights in the average ``[M]``, and averages of the parameters."""


@recorded
def asgd(
    lr: PerModel = 1e-2,
    lambd: PerModel = 1e-4,
    alpha: PerModel = 0.75,
    t0: PerModel = 1e6,
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Averaged stochastic gradient descent, as ``torch.optim.ASGD`` computes it.

    With gradient g at update t: ``p -= eta * (g + lambd * p)``; ``ax += mu * (p - ax)``; then, for the next update,
    ``eta = lr / (1 + lambd * lr * t)^alpha`` and ``mu = 1 / max(1, t - t0)``. At first ``eta`` is ``lr`` and ``mu`` is 1.

    Args:
        lr: Learning rate.
        lambd: Decay rate of the parameters, which also lets the step size decay.
        alpha: Power by which the step size decays.
        t0: The average ``ax`` is of the parameters from update ``t0 + 2`` on; until then it is the parameter.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = asgd(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
        >>> updates["w"].flatten(), state.ax["w"].flatten()
        (tensor([-0.1000, -1.0000]), tensor([-0.1000, -1.0000]))

    References:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim., 1992.
    """
    hyperparams = Hyperparams(ASGDState, lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor, eta: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        at["step"], at["mu"] = -torch.where(count == 1, at["lr"], eta), mu
        return at["lr"] / (1 + at["lambd"] * at["lr"] * count) ** at["alpha"], 1 / (count - at["t0"]).clamp(min=1)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], average: Tensor) -> Tensor:
        direction = grad + param * k["lambd"]
        decay_mean(average, param + direction * k["step"], k["mu"])
        return direction

    return leafwise(ASGDState, hyperparams, rule, prepare, carried=("eta", "mu"), maximize=maximize)


RpropState = namedtuple("RpropState", [*FIELDS, "prev", "step_size"])
"""The last gradients, zero where the sign had changed, and the step size of each entry."""
restrict(RpropState, etaminus=Range.FACTOR, etaplus=Range.AT_LEAST_ONE)


@recorded
def rprop(
    lr: PerModel = 1e-2,
    etas: tuple[PerModel, PerModel] = (0.5, 1.2),
    step_sizes: tuple[PerModel, PerModel] = (1e-6, 50),
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Resilient backpropagation, as ``torch.optim.Rprop`` computes it; for gradients of a whole data set.

    Each entry has a step size s. With gradient g and the last one h: ``s *= etaplus`` where ``g * h > 0``, and where
    ``g * h < 0``, ``s *= etaminus`` and ``g = 0``; s is clamped to ``step_sizes``; ``p -= s * sign(g)``.

    Args:
        lr: The first step size of every entry. It has no effect after the first update.
        etas: Factors by which step sizes shrink and grow, ``etaminus`` and ``etaplus`` in the state.
        step_sizes: The smallest and the largest step size, ``step_size_min`` and ``step_size_max`` in the state.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = rprop(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning", ICNN 1993.
    """
    hyperparams = Hyperparams(RpropState, lr=lr, **pair_of(etas, "etas"), **pair_of(step_sizes, "step_sizes"))

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        # Step sizes are zero before the first update.
        at["first"], at["step"] = torch.where(count == 1, at["lr"], 0.0), -torch.ones_like(at["lr"])

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], last: Tensor, size: Tensor) -> Tensor:
        agree = grad * last
        factor = torch.where(agree > 0, k["etaplus"], torch.where(agree < 0, k["etaminus"], 1.0))
        size.add_(k["first"]).mul_(factor).clamp_min_(k["step_size_min"]).clamp_max_(k["step_size_max"])
        grad = torch.where(agree < 0, 0.0, grad)
        # PyTorch has no batching rule for copy_; the sign of NaN is 0.
        last.sign_().mul_(0.0).add_(grad)
        return grad.sign() * size

    return leafwise(RpropState, hyperparams, rule, prepare, maximize=maximize)
