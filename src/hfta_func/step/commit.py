"""The only writer of a step: the next state, in new tensors or in those of the old one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hfta_func._tree import where, write
from hfta_func._types import Params, Tree
from hfta_func.optim import GradientTransformation, apply_updates, update_
from hfta_func.step import amp
from hfta_func.step.gradients import Found
from hfta_func.step.judge import Verdict
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState

Updated = tuple[Params, Tree]
Update = Callable[[GradientTransformation, TrainState, Found, "Tensor | None"], Updated]
"""``(optimizer, state, found, keep) -> (params, opt_state)``, new where ``keep`` (``bool[M]``, None is all) is True."""


def commit(
    state: TrainState, found: Found, verdict: Verdict, optimizer: GradientTransformation, update: Update, donate: bool
) -> TrainState:
    """The state after the step; members that are not kept stay as they are."""
    keep = verdict.keep
    params, opt_state = update(optimizer, state, found, keep)
    after = TrainState(
        params={path: params.get(path, param) for path, param in state.params.items()},
        buffers=found.buffers if keep is None else where(keep, found.buffers, state.buffers),
        opt_state=opt_state,
        keys=state.keys,
        step=state.step + state.active,
        hparams=state.hparams,
        active=verdict.active,
        loss_scale=verdict.loss_scale,
    )
    if not donate:
        return after
    write(state, after)
    return state


def choose(options: Options, rewrites_params: bool) -> Update:
    """The way to update; a model that ``rewrites_params`` has its gradients computed in a copy of them."""
    if options.stochastic_rounding:
        return rounded
    return in_place if options.donate and not rewrites_params else plain


def plain(optimizer: GradientTransformation, state: TrainState, found: Found, keep: Tensor | None) -> Updated:
    """Update into new tensors."""
    updates, opt_state = optimizer.update(found.grads, state.opt_state, found.params)
    return _kept(keep, state, apply_updates(found.params, updates), opt_state)


def in_place(optimizer: GradientTransformation, state: TrainState, found: Found, keep: Tensor | None) -> Updated:
    """Update into the state's own tensors, which saves memory and, for large models, time."""
    update_(optimizer, found.grads, state.opt_state, found.params, keep)
    return found.params, state.opt_state


def rounded(optimizer: GradientTransformation, state: TrainState, found: Found, keep: Tensor | None) -> Updated:
    """Update in float32 and round at random to the parameters' own bfloat16."""
    wide = amp.widen(found.params)
    updates, opt_state = optimizer.update(amp.widen(found.grads), state.opt_state, wide)
    params = amp.round_stochastically(state.keys, state.step, apply_updates(wide, updates), found.params)
    return _kept(keep, state, params, opt_state)


def _kept(keep: Tensor | None, state: TrainState, params: Params, opt_state: Tree) -> Updated:
    old = {path: state.params[path] for path in params}, state.opt_state
    return (params, opt_state) if keep is None else where(keep, (params, opt_state), old)
