"""The only writer of a step: the next state, in new tensors or in those of the old one, and the ways to update parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hfta_func import random
from hfta_func._tree import where, write
from hfta_func._types import Params, Tree
from hfta_func.calls.routing import routed_by_member
from hfta_func.optim import GradientTransformation, apply_updates
from hfta_func.optim._base import is_of_package, renew
from hfta_func.step import amp
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.judge import Verdict
from hfta_func.step.options import Options
from hfta_func.step.shared import Sharing
from hfta_func.step.state import TrainState

Update = Callable[["Tensor | None"], tuple[Params, Tree]]
"""``update(keep) -> (params, opt_state)``, new for members where ``keep`` (``bool[M]``, None is all) is True."""

Way = Callable[[GradientTransformation, TrainState, StepOutputs], Update]

# Negative, as all numbers are that this package folds into the keys of a state.
NOISE = -(2**62) - 2**61


def commit(
    state: TrainState, outputs: StepOutputs, verdict: Verdict, update: Update, sharing: Sharing, options: Options
) -> TrainState:
    """The state after the step; members that are not kept stay as they are."""
    keep = verdict.keep
    params, opt_state = update(keep)
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


def select_update_mode(options: Options, optimizer: GradientTransformation, rewrites_params: bool) -> Way:
    """The way to update that the options ask for; of a model that ``rewrites_params`` gradients are computed in a copy."""
    way = rounded if options.stochastic_rounding else in_place if options.donate and not rewrites_params else plain
    if is_of_package(optimizer):
        return way

    def drawing(optimizer: GradientTransformation, state: TrainState, outputs: StepOutputs) -> Update:
        """The same for an optimizer that may draw random numbers: from the members' keys."""
        renewed = way(optimizer, state, outputs)

        def update(keep: Tensor | None) -> tuple[Params, Tree]:
            with routed_by_member(random.fold_in(state.keys, state.step + NOISE)):
                return renewed(keep)

        return update

    return drawing


def plain(optimizer: GradientTransformation, state: TrainState, outputs: StepOutputs) -> Update:
    """Update into new tensors."""

    def update(keep: Tensor | None) -> tuple[Params, Tree]:
        # Members that are not kept keep the parameters of the state, which the model may have written in a copy.
        params = {path: state.params[path] for path in outputs.params}
        renewed, opt_state = renew(optimizer, outputs.grads, state.opt_state, outputs.params, keep)
        if keep is not None and any(params[path] is not param for path, param in outputs.params.items()):
            renewed = where(keep, renewed, params)
        return renewed, opt_state

    return update


def in_place(optimizer: GradientTransformation, state: TrainState, outputs: StepOutputs) -> Update:
    """Update into the state's own tensors, which saves memory and, for large models, time."""
    return lambda keep: renew(optimizer, outputs.grads, state.opt_state, outputs.params, keep, donate=True)


def rounded(optimizer: GradientTransformation, state: TrainState, outputs: StepOutputs) -> Update:
    """Update in float32 and round at random to the parameters' own bfloat16."""

    def update(keep: Tensor | None) -> tuple[Params, Tree]:
        wide = amp.widen(outputs.params)
        updates, opt_state = optimizer.update(amp.widen(outputs.grads), state.opt_state, wide)
        params = amp.round_stochastically(state.keys, state.step, apply_updates(wide, updates), outputs.params)
        old = {path: state.params[path] for path in params}, state.opt_state
        return (params, opt_state) if keep is None else where(keep, (params, opt_state), old)

    return update
