"""The only writer of a step: the next state, in new tensors or in those of the old one, and the ways to update parameters.

Parameters that all members share and train start, are checked and are updated here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._tree import per_model, where, write
from hfta_func._types import Params, Shared, Tree
from hfta_func.calls.routing import routed_by_member
from hfta_func.errors import StackError, StateError
from hfta_func.models.sharing import shared_of
from hfta_func.optim import GradientTransformation
from hfta_func.optim._base import is_of_package, renew
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.judge import Verdict
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, check_optimizer, shared_params, without_memory

# Negative, as all numbers are that this package folds into the keys of a state.
NOISE = -(2**62) - 2**61


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
            raise StackError("shared_params leaves members no trained parameter of their own; name fewer")

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


def commit(
    state: TrainState,
    outputs: StepOutputs,
    verdict: Verdict,
    optimizer: GradientTransformation,
    sharing: Sharing,
    options: Options,
    in_place: bool,
) -> TrainState:
    """The state after the step; members that are not kept stay as they are."""
    keep = verdict.keep
    # An optimizer of the user's own may draw random numbers: from the members' keys.
    key = None if is_of_package(optimizer) else random.fold_in(state.keys, state.step + NOISE)
    with contextlib.nullcontext() if key is None else routed_by_member(key):
        params, opt_state = renewed(optimizer, state, outputs, keep, in_place)
    after = TrainState(
        params={path: params.get(path, param) for path, param in state.params.items()},
        buffers=outputs.buffers if keep is None else where(keep, outputs.buffers, state.buffers),
        opt_state=opt_state,
        keys=state.keys,
        step=state.step + state.active,
        hparams=state.hparams,
        active=verdict.active,
        loss_scale=verdict.loss_scale,
        shared=sharing.update(state, outputs, keep, options.donate),
        carry=state.carry,
    )
    if not options.donate:
        return after
    write(state, after)
    return state


def renewed(
    optimizer: GradientTransformation, state: TrainState, outputs: StepOutputs, keep: Tensor | None, in_place: bool
) -> tuple[Params, Tree]:
    """Parameters and the optimizer's state, new for members where ``keep`` is True, in new tensors or the state's own."""
    old = {path: state.params[path] for path in outputs.params}
    params, opt_state = renew(optimizer, outputs.grads, state.opt_state, outputs.params, keep, donate=in_place)
    # Members that are not kept keep the parameters of the state, which the model may have written in a copy.
    if keep is not None and any(old[path] is not param for path, param in outputs.params.items()):
        params = where(keep, params, old)
    return params, opt_state
