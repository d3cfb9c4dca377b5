"""Optimizers that keep a value for each entry of a parameter besides gradients: its average (ASGD), its step size (Rprop)."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, leafwise, pair_of

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
        after = at["lr"] / (1 + at["lambd"] * at["lr"] * count) ** at["alpha"]
        return after, 1 / (count - at["t0"]).clamp(min=1)

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
