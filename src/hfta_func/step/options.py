"""How a step runs: the options of training and evaluation, checked in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import optree
import torch

from hfta_func._types import PerModel, Tree
from hfta_func.optim._base import GradientTransformation
from hfta_func.step.amp import LossScale
from hfta_func.verify import Verify

_CHOICES = (
    ("autocast", (None, torch.bfloat16, torch.float16), "torch.bfloat16, torch.float16, or None"),
    ("nonfinite", ("skip", "freeze", "raise"), "'skip', 'freeze' or 'raise'"),
    ("replay", (None, True, False), "True, False, or None for replays in fit only"),
    ("save", ("all", "less"), "'all' or 'less'"),
    ("verify", ("first", True, False), "'first', True or False"),
    *((name, (True, False), "True or False") for name in ("stochastic_rounding", "donate", "share_frozen")),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """The options of a step, as :func:`make_train_step` describes them; evaluation uses the first three and the last.

    Raises:
        ValueError: if one has an invalid value.
    """

    batch_dims: Tree = 0
    chunk_size: int | Literal["auto"] | None = None
    autocast: torch.dtype | None = None
    loss_scale: LossScale | PerModel | None = None
    stochastic_rounding: bool = False
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
    network: str = ""
    """The child of the model that is trained, in a joint step; all of it by default."""

    def __post_init__(self) -> None:
        for dim in optree.tree_leaves(self.batch_dims, none_is_leaf=True):
            if dim is not None and (type(dim) is not int or dim != 0):
                raise ValueError(
                    f"batch_dims has {dim!r}; it must be 0, None, or a tree of these in the batch's structure"
                )
        size: Any = self.chunk_size
        if not (size is None or size == "auto" or (isinstance(size, int) and size >= 1 and size is not True)):
            raise ValueError(f"chunk_size is {size!r}; it must be at least 1, 'auto', or None for all members at once")
        for name, known, text in _CHOICES:
            value = getattr(self, name)
            # 1 is equal to True, and no choice.
            if not any(type(value) is type(one) and value == one for one in known):
                raise ValueError(f"{name} is {value!r}; it must be {text}")
        if isinstance(self.shared_params, str):
            raise ValueError(f"shared_params is {self.shared_params!r}; it must be a list of paths")
        if self.shared_optimizer is not None and not self.shared_params:
            raise ValueError("there is a shared_optimizer, but no shared_params; leave it out, or name them")
        if self.shared_params and self.stochastic_rounding:
            raise ValueError(
                "stochastic_rounding draws from a member's key, which shared_params do not have; leave one out"
            )
        scale = self.loss_scale
        if scale is None and self.autocast == torch.float16:
            scale = LossScale()
        elif scale is not None and not isinstance(scale, LossScale):
            scale = LossScale(scale, backoff_factor=1.0, growth_factor=1.0)
        object.__setattr__(self, "loss_scale", scale)

    @property
    def scaling(self) -> LossScale | None:
        """The loss scale, where there is one."""
        assert self.loss_scale is None or isinstance(self.loss_scale, LossScale)
        return self.loss_scale
