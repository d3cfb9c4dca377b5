"""Mixed precision: a loss scale for every member, and parameters in bfloat16.

Public: :class:`LossScale`. Autocast itself is an argument of the training step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._tree import per_model
from hfta_func._types import Params, PerModel
from hfta_func.optim._base import Knobs, Range, restrict

restrict(init_scale=Range.POSITIVE, growth_factor=Range.AT_LEAST_ONE)
restrict(backoff_factor=Range.FACTOR, growth_interval=Range.AT_LEAST_ONE)

# Keeps the noise of rounding apart from that of the model.
_ROUNDING = -(2**61) - 2


class LossScaleState(NamedTuple):
    """Each member's loss scale, updates since it last changed, and its hyperparameters."""

    scale: Tensor
    growth_tracker: Tensor
    hyperparams: dict[str, Any]


class LossScale:
    """What each member's loss is multiplied by before the backward pass, as ``torch.amp.GradScaler`` adapts it.

    Small gradients would vanish in float16. A member whose gradient overflows is not updated and its scale is multiplied
    by ``backoff_factor``; after ``growth_interval`` updates in a row it is multiplied by ``growth_factor``. Unlike
    GradScaler, members do not share a scale, and one whose gradient is not finite at a scale of 1 has failed.

    Args:
        init_scale: Where it starts.
        growth_factor: At least 1.
        backoff_factor: Below 1, or 1 for a scale that stays.
        growth_interval: Updates, at least 1.

    Example:
        >>> scale = LossScale(init_scale=[4.0, 8.0])
        >>> state = scale.init(2, torch.device("cpu"))
        >>> scale.update(state, overflow=torch.tensor([False, True]), active=torch.tensor([True, True])).scale
        tensor([4., 4.])

    References:
        Micikevicius et al., "Mixed precision training", ICLR 2018.
    """

    def __init__(
        self,
        init_scale: PerModel = 2.0**16,
        growth_factor: PerModel = 2.0,
        backoff_factor: PerModel = 0.5,
        growth_interval: PerModel = 2000,
    ):
        self._start = Knobs(init_scale=init_scale)
        self._knobs = Knobs(growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval)

    def init(self, count: int, device: torch.device) -> LossScaleState:
        """The state of ``count`` members."""
        like = {"": torch.empty(count, 0, device=device)}
        return LossScaleState(
            scale=self._start.init(like)["init_scale"].float(),
            growth_tracker=torch.zeros(count, dtype=torch.int64, device=device),
            hyperparams=self._knobs.init(like),
        )

    def overflowed(self, state: LossScaleState, gradient_failed: Tensor) -> Tensor:
        """Members whose scale is to blame: those that have one above 1, and that may be lowered."""
        return gradient_failed & (state.scale > 1) & (state.hyperparams["backoff_factor"] < 1)

    def update(self, state: LossScaleState, overflow: Tensor, active: Tensor) -> LossScaleState:
        """The next scales; ``active`` are members that took part, all ``bool[M]``."""
        knobs, streak = state.hyperparams, torch.where(overflow, 0, state.growth_tracker + 1)
        grow = streak >= knobs["growth_interval"]
        factor = torch.where(overflow, knobs["backoff_factor"], torch.where(grow, knobs["growth_factor"], 1.0))
        scale = (state.scale * factor).float()
        # Beyond the largest number a scale stays.
        scale = torch.where(scale.isfinite(), scale, state.scale)
        streak = torch.where(grow, 0, streak)
        return LossScaleState(
            torch.where(active, scale, state.scale), torch.where(active, streak, state.growth_tracker), knobs
        )


def widen(params: Params) -> Params:
    """Those in bfloat16 as float32."""
    return {path: param.float() if param.dtype == torch.bfloat16 else param for path, param in params.items()}


def round_stochastically(keys: Tensor, step: Tensor, wide: Params, params: Params) -> Params:
    """Float32 leaves as bfloat16 where ``params`` are, up or down so that the expected value is the value itself.

    Args:
        keys: The members' seeds.
        step: The members' steps.
        wide: Leaves ``[M, ...]``.
        params: Their types.

    References:
        Gupta et al., "Deep learning with limited numerical precision", ICML 2015.
        Zamirai et al., "Revisiting bfloat16 training", arXiv:2010.06192, 2020.
    """
    keys = random.fold_in(random.fold_in(keys, step), _ROUNDING)
    rounded: Params = {}
    for site, (path, leaf) in enumerate(wide.items()):
        if params[path].dtype != torch.bfloat16:
            rounded[path] = leaf
            continue
        # A bfloat16 is the upper half of a float32; a carry out of the lower half rounds up.
        noise = (random.bits(random.fold_in(keys, site), leaf.shape[1:]) & 0xFFFF).to(torch.int32)
        moved = ((leaf.view(torch.int32) + noise) & -0x10000).view(torch.float32)
        rounded[path] = torch.where(leaf.isfinite(), moved, leaf).to(torch.bfloat16)
    return rounded


def unscaled(grads: Params, scale: Tensor) -> Params:
    """Gradients of scaled losses as those of the losses."""
    inverse = scale.double().reciprocal()
    return {path: grad * per_model(inverse, grad) for path, grad in grads.items()}
