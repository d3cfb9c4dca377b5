"""Adam and its relatives."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, correct, decay_mean, leafwise, moments, pair_of

AdamState = namedtuple("AdamState", [*FIELDS, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
"""Averages of the gradients and of their squares and, with ``amsgrad``, the maxima of the latter."""


@recorded
def adam(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    """Adam, as ``torch.optim.Adam`` computes it.

    With gradient g at update t: ``m = beta1 * m + (1 - beta1) * g``; ``v = beta2 * v + (1 - beta2) * g^2``;
    ``p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        amsgrad: Use the largest ``v`` so far in the denominator.
        maximize: Maximize instead of minimize.
        decoupled_weight_decay: Subtract ``lr * weight_decay * p`` instead, as :func:`adamw` does.

    Example:
        >>> optimizer, params, grads = adam(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
        Reddi et al., "On the convergence of Adam and beyond", ICLR 2018 (``amsgrad``).
    """
    hyperparams = Hyperparams(AdamState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        correct(at, count)
        at["step"] = at["step"] / (1 - at["beta1"] ** count)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor, *most: Tensor) -> Tensor:
        moments(grad, k, mean, square)
        largest = most[0].clamp_min_(square) if most else square
        return mean / largest.sqrt().add_(k["eps"])

    unused, decoupled = () if amsgrad else ("max_exp_avg_sq",), decoupled_weight_decay
    return leafwise(AdamState, hyperparams, rule, prepare, unused=unused, decoupled=decoupled, maximize=maximize)


@recorded
def adamw(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay ``p -= lr * weight_decay * p``, as ``torch.optim.AdamW`` computes it.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: Decay rate, multiplied by the learning rate. The plain number 0 removes the term from the program.
        amsgrad: Use the largest ``v`` so far in the denominator.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, ones = adamw(lr=0.1, weight_decay=[0.0, 1.0]), {"w": torch.ones(2, 1)}
        >>> optimizer.update(ones, optimizer.init(ones), ones)[0]["w"].flatten()
        tensor([-0.1000, -0.2000])

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    return adam(lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True)


AdamaxState = namedtuple("AdamaxState", [*FIELDS, "exp_avg", "exp_inf"])
"""Averages of the gradients, and their decayed maximum magnitudes."""


@recorded
def adamax(
    lr: PerModel = 2e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with the infinity norm, as ``torch.optim.Adamax`` computes it.

    With gradient g at update t: ``m = beta1 * m + (1 - beta1) * g``; ``u = max(beta2 * u, |g| + eps)``;
    ``p -= lr / (1 - beta1^t) * m / u``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the magnitude of the gradient.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = adamax(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, section 7.1.
    """
    hyperparams = Hyperparams(AdamaxState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["step"] = -at["lr"] / (1 - at["beta1"] ** count)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, largest: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        largest.mul_(k["beta2"]).clamp_min_(grad.abs().add_(k["eps"]))
        return mean / largest

    return leafwise(AdamaxState, hyperparams, rule, prepare, maximize=maximize)


NAdamState = namedtuple("NAdamState", [*FIELDS, "mu_product", "exp_avg", "exp_avg_sq"])
"""Products of momenta ``[M]``, and averages of the gradients and of their squares."""
restrict(NAdamState, momentum_decay=Range.NONNEGATIVE)


@recorded
def nadam(
    lr: PerModel = 2e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    momentum_decay: PerModel = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with Nesterov's momentum, as ``torch.optim.NAdam`` computes it.

    With Adam's averages m and v at update t and ``mu(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)``:
    ``p -= lr * ((1 - mu(t)) / (1 - P(t)) * g + mu(t + 1) / (1 - P(t + 1)) * m) / (sqrt(v / (1 - beta2^t)) + eps)`` where
    P is the product of all mu so far.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        momentum_decay: How fast the momentum approaches ``beta1``.
        decoupled_weight_decay: Subtract ``lr * weight_decay * p`` instead.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = nadam(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1056, -1.0565])

    References:
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016.
    """
    numbers = {"eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
    hyperparams = Hyperparams(NAdamState, lr=lr, **pair_of(betas), **numbers)

    def prepare(at: dict[str, Tensor], count: Tensor, product: Tensor) -> tuple[Tensor]:
        mu, after = (at["beta1"] * (1 - 0.5 * 0.96 ** (t * at["momentum_decay"])) for t in (count, count + 1))
        product = product * mu
        at["of grad"], at["of mean"] = (1 - mu) / (1 - product), after / (1 - product * after)
        correct(at, count)
        return (product,)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        moments(grad, k, mean, square)
        return (grad * k["of grad"]).add_(mean * k["of mean"]).div_(square.sqrt().add_(k["eps"]))

    options: Any = {"decoupled": decoupled_weight_decay, "maximize": maximize}
    return leafwise(NAdamState, hyperparams, rule, prepare, carried=("mu_product",), **options)


RAdamState = namedtuple("RAdamState", [*FIELDS, "exp_avg", "exp_avg_sq"])
"""Averages of the gradients and of their squares."""


@recorded
def radam(
    lr: PerModel = 1e-3,
    betas: tuple[PerModel, PerModel] = (0.9, 0.999),
    eps: PerModel = 1e-8,
    weight_decay: PerModel = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam that uses its second moment once that is reliable, as ``torch.optim.RAdam`` computes it.

    With Adam's averages m and v at update t, ``R = 2 / (1 - beta2) - 1`` and ``r = R - 2 t beta2^t / (1 - beta2^t)``:
    ``p -= lr * m / (1 - beta1^t) * s``, where s is 1 while ``r <= 5``, and from then on
    ``sqrt((1 - beta2^t) (r - 4) (r - 2) R / ((R - 4) (R - 2) r)) / (sqrt(v) + eps)``.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two averages, ``beta1`` and ``beta2`` in the state.
        eps: Added to the denominator.
        weight_decay: L2 penalty added to the gradient. The plain number 0 removes the term from the program.
        decoupled_weight_decay: Subtract ``lr * weight_decay * p`` instead.
        maximize: Maximize instead of minimize.

    Example:
        >>> optimizer, params, grads = radam(lr=[0.1, 1.0]), {"w": torch.zeros(2, 1)}, {"w": torch.ones(2, 1)}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]["w"].flatten()
        tensor([-0.1000, -1.0000])

    References:
        Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020.
    """
    hyperparams = Hyperparams(RAdamState, lr=lr, **pair_of(betas), eps=eps, weight_decay=weight_decay)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        left = 1 - at["beta2"] ** count
        most = 2 / (1 - at["beta2"]) - 1
        length = most - 2 * count * at["beta2"] ** count / left
        rectified = length > 5
        # Negative where it is not rectified, so the root is taken after where().
        inside = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        at["step"] = -at["lr"] / (1 - at["beta1"] ** count) * torch.where(rectified, inside * left, 1.0).sqrt()
        # A member that is not rectified divides by 1.
        at["rectified"], at["plain"] = rectified.to(torch.float64), (~rectified).to(torch.float64)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        moments(grad, k, mean, square)
        return mean / square.sqrt().add_(k["eps"]).mul_(k["rectified"]).add_(k["plain"])

    return leafwise(RAdamState, hyperparams, rule, prepare, decoupled=decoupled_weight_decay, maximize=maximize)


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
