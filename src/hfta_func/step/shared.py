"""Parameters that all members share and train: where they start, whether a state has them, and their update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._tree import per_model
from hfta_func._types import Params, Shared
from hfta_func.calls.routing import routed_by_member
from hfta_func.errors import StackError, StateError
from hfta_func.models.sharing import shared_of
from hfta_func.optim._base import GradientTransformation, is_of_package, renew
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.state import TrainState, check_optimizer, shared_params, without_memory


class Sharing:
    """The shared parameters of a step.

    Args:
        model: The model that gives their first values.
        paths: What ``shared_params`` names; empty if members share nothing that is trained.
        optimizer: What updates them.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], optimizer: GradientTransformation):
        self.paths = frozenset(shared_of(model, paths))
        self._optimizer = optimizer
        if self.paths and self.paths >= {path for path, param in model.named_parameters() if param.requires_grad}:
            raise StackError(
                "shared_params leaves members no trained parameter of their own, so that they would be one model; name fewer"
            )

    def init(self, model: nn.Module, device: torch.device) -> Shared | tuple[()]:
        """Copies of the model's parameters and their optimizer's state; ``()`` if nothing is shared."""
        if not self.paths:
            return ()
        named = model.named_parameters()
        params = {path: param.detach().to(device, copy=True) for path, param in named if path in self.paths}
        # An array of one model: hyperparameters per member need a ``shared_optimizer`` beside them.
        return Shared(params, self._optimizer.init(_as_one(params)))

    def check(self, state: TrainState) -> None:
        """Raise a StateError unless the state shares what the step does."""
        shared = state.shared
        params = shared_params(state)
        if params.keys() != self.paths:
            raise StateError(f"the step shares {[*self.paths]}, and the state does not; make one with step.init(...)")
        if isinstance(shared, Shared):
            expected = without_memory(self._optimizer.init, _as_one(params))
            check_optimizer(shared.opt_state, expected, "state.shared.opt_state", "shared_optimizer")

    def update(self, state: TrainState, outputs: StepOutputs, keep: Tensor | None, donate: bool) -> Shared | tuple[()]:
        """One update by the sum of the gradients of members where ``keep`` holds; none if it holds nowhere."""
        shared = state.shared
        if not isinstance(shared, Shared):
            return ()
        grads = outputs.shared
        if keep is not None and not outputs.summed:
            # Not a product, since 0 times NaN is NaN.
            grads = {path: torch.where(per_model(keep, grad).bool(), grad, 0) for path, grad in grads.items()}
        if not outputs.summed:
            grads = {path: grad.sum(0, keepdim=True) for path, grad in grads.items()}
        any_kept = None if keep is None else keep.any().reshape(1)
        # Noise of an optimizer comes from all members, in any order.
        key = random.fold_in(state.keys.sum(0, keepdim=True), state.step.sum(0, keepdim=True))
        with contextlib.nullcontext() if is_of_package(self._optimizer) else routed_by_member(key):
            params, opt_state = renew(
                self._optimizer, grads, shared.opt_state, _as_one(shared.params), any_kept, donate=donate
            )
        return Shared({path: param[0] for path, param in params.items()}, opt_state)


def _as_one(params: Params) -> Params:
    return {path: param[None] for path, param in params.items()}
