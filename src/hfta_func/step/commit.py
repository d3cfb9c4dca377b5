"""The only writer of a step: the next state, in new tensors or in those of the old one."""

from __future__ import annotations

from hfta_func._tree import where, write
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.judge import Verdict
from hfta_func.step.options import Options
from hfta_func.step.shared import Sharing
from hfta_func.step.state import TrainState
from hfta_func.step.update import Update


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
