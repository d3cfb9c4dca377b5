"""Adam with Nesterov's momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hfta_func._types import Params, PerModel
from hfta_func.optim._base import GradientTransformation, Knobs
from hfta_func.optim._leafwise import decay_mean, decay_square, leafwise, zeros


class NAdamState(NamedTuple):
    """Updates made by each member, its hyperparameters, its product of momenta, its averages of gradients and squares."""

    step: Tensor
    hyperparams: dict[str, Any]
    mu_product: Tensor
    exp_avg: Params
    exp_avg_sq: Params


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
        betas: Decay of the two averages; in the state they are ``beta1`` and ``beta2``.
        eps: Added to the denominator.
        weight_decay: L2 penalty, added to the gradient; the plain number 0 leaves it out of the program.
        momentum_decay: How fast the momentum reaches ``beta1``.
        decoupled_weight_decay: Shrink the parameters by ``lr * weight_decay`` instead.
        maximize: Ascend instead of descend.

    Example:
        >>> optimizer = nadam(lr=[0.1, 1.0])
        >>> params = {"w": torch.zeros(2, 1)}
        >>> updates, _ = optimizer.update({"w": torch.ones(2, 1)}, optimizer.init(params), params)
        >>> updates["w"].flatten()
        tensor([-0.1056, -1.0565])

    References:
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016.
    """
    knobs = Knobs(
        lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay
    )

    def prepare(at: dict[str, Tensor], count: Tensor, product: Tensor) -> tuple[Tensor]:
        mu, after = (at["beta1"] * (1 - 0.5 * 0.96 ** (t * at["momentum_decay"])) for t in (count, count + 1))
        product = product * mu
        at["1-beta1"], at["1-beta2"] = 1 - at["beta1"], 1 - at["beta2"]
        at["of grad"], at["of mean"] = (1 - mu) / (1 - product), after / (1 - product * after)
        # The bias correction of the root goes into what is one number per member.
        root = (1 - at["beta2"] ** count).sqrt()
        at["step"], at["eps"] = -at["lr"] * root, at["eps"] * root
        return (product,)

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], mean: Tensor, square: Tensor) -> Tensor:
        decay_mean(mean, grad, k["1-beta1"])
        decay_square(square, k["beta2"], grad, k["1-beta2"])
        return (grad * k["of grad"]).add_(mean * k["of mean"]).div_(square.sqrt().add_(k["eps"]))

    return leafwise(
        NAdamState,
        knobs.without_zeros("weight_decay"),
        rule,
        slots={"exp_avg": zeros, "exp_avg_sq": zeros},
        carried=("mu_product",),
        prepare=prepare,
        decay="decoupled" if decoupled_weight_decay else "coupled",
        maximize=maximize,
    )
