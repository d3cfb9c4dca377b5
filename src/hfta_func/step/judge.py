"""Which members to update, their next loss scales, and what the step reports."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfta_func._torch import can_look
from hfta_func._types import Tree
from hfta_func.step.failures import Failure, diagnose, refuse
from hfta_func.step.gradients import StepOutputs
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState


class Verdict(NamedTuple):
    """What a step decides about every member."""

    keep: Tensor | None  # bool[M], the members to update; None if these are known to be all of them
    active: Tensor  # bool[M], the members that take part in the next step
    loss_scale: Tree
    report: dict[str, Tensor]  # the metrics that every step has


def judge(state: TrainState, outputs: StepOutputs, options: Options) -> Verdict:
    """Decide from losses and gradients."""
    # Codes are compared as plain numbers: compilers do not know an enum's members for such.
    shared = [] if outputs.summed else outputs.shared.values()
    failure = diagnose(outputs.losses, [*outputs.grads.values(), *shared])
    succeeded = failure == int(Failure.NONE)
    report = {"loss": outputs.losses, "finite": succeeded, "failure": failure}
    scaling, loss_scale, active = options.scaling, state.loss_scale, state.active
    keep = active & succeeded
    if scaling is not None:
        report["loss_scale"] = loss_scale.scale.clone()
        overflow = scaling.overflowed(loss_scale, failure == int(Failure.GRADIENT))
        report["failure"] = failure = torch.where(overflow, int(Failure.OVERFLOW), failure)
        loss_scale = scaling.update(loss_scale, overflow, active)
    if options.nonfinite == "freeze":
        active = active & ((failure == int(Failure.NONE)) | (failure == int(Failure.OVERFLOW)))
    return Verdict(keep, active, loss_scale, report)


def looked_at(verdict: Verdict, state: TrainState, options: Options) -> Verdict:
    """The verdict, after a look at its values; raises a NonFiniteError with ``nonfinite="raise"`` if a member has failed."""
    keep = verdict.keep
    assert keep is not None
    if options.nonfinite == "raise":
        failure = refuse(torch.where(state.active, verdict.report["failure"], 0), state.step, options.network)
        # In a graph, what depends on no result is left out.
        keep = keep & (failure == int(Failure.NONE))
    return verdict._replace(keep=None if can_look(keep) and bool(keep.all()) else keep)
