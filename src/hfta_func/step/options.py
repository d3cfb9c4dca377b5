"""How a step runs: mixed precision, and the options of training and evaluation, checked in one place."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from hfta_func._types import PerModel, Tree
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, restrict, zero_count
from hfta_func.verify import Verify

LossScaleState = namedtuple("LossScaleState", ["scale", "growth_tracker", "hyperparams"])
"""Each member's loss scale, updates since it last changed, and its hyperparameters."""
restrict(LossScaleState, init_scale=Range.POSITIVE, growth_factor=Range.AT_LEAST_ONE)
restrict(LossScaleState, backoff_factor=Range.FACTOR, growth_interval=Range.AT_LEAST_ONE)


class LossScale:
    """A factor for each member's loss that keeps small float16 gradients from vanishing, adapted as in ``GradScaler``.

    When a member's gradient overflows, the member is not updated and its scale is multiplied by ``backoff_factor``; after
    ``growth_interval`` updates in a row it is multiplied by ``growth_factor``. Unlike in ``torch.amp.GradScaler`` every
    member has its own scale, and a member whose gradient is not finite at a scale of 1 counts as failed.

    Args:
        init_scale: Initial scale.
        growth_factor: At least 1.
        backoff_factor: At most 1; 1 never lowers the scale.
        growth_interval: Number of updates, at least 1.

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
        self._start = Hyperparams(LossScaleState, init_scale=init_scale)
        factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        self._hyperparams = Hyperparams(LossScaleState, **factors, growth_interval=growth_interval)

    def init(self, count: int, device: torch.device) -> LossScaleState:
        """The state of ``count`` members."""
        like = {"": torch.empty(count, 0, device=device)}
        scale = self._start.init(like)["init_scale"].float()
        return LossScaleState(scale, zero_count(like), self._hyperparams.init(like))

    def overflowed(self, state: LossScaleState, gradient_failed: Tensor) -> Tensor:
        """Members whose gradient failed because of the scale: it is above 1 and may be lowered."""
        return gradient_failed & (state.scale > 1) & (state.hyperparams["backoff_factor"] < 1)

    def update(self, state: LossScaleState, overflow: Tensor, active: Tensor) -> LossScaleState:
        """The next scales; ``overflow`` and ``active`` are ``bool[M]``, and inactive members keep theirs."""
        hyperparams, streak = state.hyperparams, torch.where(overflow, 0, state.growth_tracker + 1)
        grow = streak >= hyperparams["growth_interval"]
        growth = torch.where(grow, hyperparams["growth_factor"], 1.0)
        factor = torch.where(overflow, hyperparams["backoff_factor"], growth)
        scale = (state.scale * factor).float()
        # A scale that would grow beyond the largest float32 stays.
        scale = torch.where(scale.isfinite(), scale, state.scale)
        tracker = torch.where(active, torch.where(grow, 0, streak), state.growth_tracker)
        return LossScaleState(torch.where(active, scale, state.scale), tracker, hyperparams)


_CHOICES = {
    "autocast": (None, torch.bfloat16, torch.float16),
    "nonfinite": ("skip", "freeze", "raise"),
    "replay": (None, True, False),
    "save": ("all", "less"),
    "verify": ("first", True, False),
}


@dataclasses.dataclass(eq=False)
class Options:
    """The options of a step, as :func:`make_train_step` describes them; evaluation uses the first three and the last.

    Raises:
        ValueError: if one has an invalid value.
    """

    batch_dims: Tree = 0
    chunk_size: int | Literal["auto"] | None = None
    autocast: torch.dtype | None = None
    loss_scale: LossScale | PerModel | None = None
    nonfinite: Literal["skip", "freeze", "raise"] = "skip"
    checkpoint: bool | Sequence[str] = False
    save: Literal["all", "less"] = "all"
    donate: bool = False
    share_frozen: bool = False
    shared_params: Sequence[str] = ()
    shared_optimizer: GradientTransformation | None = None
    replay: bool | None = None
    collect: Callable[..., Any] | None = None
    verify: Verify = True
    carry: Tree = ()
    network: str = ""
    """The child of the model that is trained, in a joint step; all of it by default."""

    def __post_init__(self) -> None:
        for dim in optree.tree_leaves(self.batch_dims, none_is_leaf=True):
            if dim is not None and (type(dim) is not int or dim != 0):
                raise ValueError(f"batch_dims has {dim!r}; it must be 0, None, or a tree of these like the batch")
        size: Any = self.chunk_size
        if not (size is None or size == "auto" or (isinstance(size, int) and size >= 1 and size is not True)):
            raise ValueError(f"chunk_size is {size!r}; it must be at least 1, 'auto', or None for all members at once")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                *others, last = map(repr, choices)
                raise ValueError(f"{name} is {value!r}; it must be {', '.join(others)} or {last}")
        scale = self.loss_scale
        if scale is not None and not isinstance(scale, LossScale):
            scale = LossScale(scale, backoff_factor=1.0, growth_factor=1.0)
        self.scaling = LossScale() if scale is None and self.autocast == torch.float16 else scale
