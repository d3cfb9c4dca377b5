"""Adam with Nesterov's momentum."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from torch import Tensor

from hfta_func._types import PerModel, recorded
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict
from hfta_func.optim._leafwise import FIELDS, decay_mean, decay_square, leafwise, pair_of

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
        # The bias correction of the root moves into numbers per member, outside the leaves.
        root = (1 - at["beta2"] ** count).sqrt()
        at["step"], at["eps"] = -at["lr"] * root, at["eps"] * root
        return (product,)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        return (grad * k["of grad"]).add_(mean * k["of mean"]).div_(square.sqrt().add_(k["eps"]))

    hyperparams, decoupled = hyperparams.without_zeros("weight_decay"), decoupled_weight_decay
    return leafwise(
        NAdamState, hyperparams, rule, prepare, carried=("mu_product",), decoupled=decoupled, maximize=maximize
    )
