"""What a step makes of gradients: who has failed, who is updated, and the next state, in new tensors or in the old ones.

Parameters that all members share and train start, are checked and are updated here, too.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._kernels import nonfinite
from hfta_func._kernels.operators import DEFINITIONS, define_operator
from hfta_func._torch import can_look, constant_to_compiler, inside_transform, num_dispatch_modes, num_recorders
from hfta_func._tree import difference, leaves, per_model, tree_map, where
from hfta_func._types import Params, Shared, Tree
from hfta_func.calls.routing import routed_by_member
from hfta_func.errors import NonFiniteError, StateError
from hfta_func.models.sharing import shared_of
from hfta_func.optim import GradientTransformation
from hfta_func.optim._base import is_of_package, renew
from hfta_func.optim._kernel import MAX_INLINE_LEAVES
from hfta_func.step.gradients import StepOutputs, are_sums
from hfta_func.step.options import Options
from hfta_func.step.state import Carried, TrainState, stored

# Negative, as all numbers are that this package folds into the keys of a state.
NOISE = -(2**62) - 2**61


class Failure(enum.IntEnum):
    """Why a member was not updated, in ``metrics["failure"]`` of a training step."""

    NONE = 0
    """It was updated."""
    LOSS = 1
    """Its loss is NaN or infinite."""
    GRADIENT = 2
    """Its loss is finite, its gradient is not."""
    OVERFLOW = 3
    """Its gradient overflowed under a loss scale, which was then lowered."""
    SEARCH = 4
    """The search of :func:`lbfgs` found no lower loss in its last direction: the member stays at its best point."""


def diagnose(losses: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """The :class:`Failure` of every member, ``int64[M]``, from losses ``[M]`` and gradients ``[M, ...]``."""
    leaves = [losses, *grads]
    # Transforms have no rule for the operator, and other runtimes do not know it.
    if torch.compiler.is_compiling():
        as_one = len(leaves) > MAX_INLINE_LEAVES and not torch.compiler.is_exporting() and not inside_transform()
    else:
        as_one = num_dispatch_modes() == num_recorders() > 0
    if as_one and losses.device.type == "cpu":
        _define()
        return torch.ops.hfta_func.diagnose(losses, leaves[1:])
    if can_look(losses) and (kernel := _kernel_for(leaves)) is not None:
        # The kernel reads each member's values in any order, so a transposed gradient needs no copy.
        return kernel([leaf if _is_dense(leaf) else leaf.contiguous() for leaf in leaves])
    # One reduction at the end, so that the compiler computes the flags once and not for every leaf that reads them.
    sums = torch.stack([_sum(leaf) for leaf in leaves]).isfinite()
    failure = torch.where(sums.all(0), int(Failure.NONE), int(Failure.GRADIENT))
    return torch.where(sums[0], failure, int(Failure.LOSS))


def _sum(leaf: Tensor) -> Tensor:
    """A number for each member that is finite exactly if all of its values are."""
    wide = torch.promote_types(leaf.dtype, torch.float64)
    # In float64, sums of narrower values do not overflow, and of values that are as wide, not if they are scaled down.
    leaf = leaf * 2.0**-64 if leaf.dtype == wide else leaf
    # Over all axes, in whatever order they are in memory: a gradient may be transposed.
    return leaf.sum([*range(1, leaf.dim())], dtype=wide) if leaf.dim() > 1 else leaf.to(wide)


def _kernel_for(leaves: Sequence[Tensor]) -> Callable[[list[Tensor]], Tensor] | None:
    """The kernel for dense leaves of these shapes."""
    models, dtype = len(leaves[0]), leaves[0].dtype
    plain = all(type(leaf) is Tensor and leaf.dtype == dtype and leaf.device.type == "cpu" for leaf in leaves)
    if not (plain and models) or (run := nonfinite.program(dtype)) is None:
        return None
    sizes = [leaf.numel() // models for leaf in leaves]

    def diagnose(leaves: list[Tensor]) -> Tensor:
        failure = torch.zeros(models, dtype=torch.int64)
        run(sizes, models, [leaves, failure])
        return failure

    return diagnose


def _prepare(losses: Tensor, grads: Sequence[Tensor]) -> Callable[..., Tensor] | None:
    kernel = _kernel_for([losses, *grads]) if all(map(_is_dense, (losses, *grads))) else None
    return kernel and (lambda losses, grads: kernel([losses, *grads]))


def _is_dense(leaf: Tensor) -> bool:
    if leaf.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(leaf.stride()[1:], leaf.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return leaf.stride(0) == expected or leaf.shape[0] == 1


def refuse(failure: Tensor, step: Tensor, network: str = "") -> Tensor:
    """Raise a NonFiniteError if a member, or its ``network``, has failed, at its step ``int64[M]``; give ``failure`` back."""
    if torch.compiler.is_compiling():
        _define()
        return torch.ops.hfta_func.refuse(failure, step, network)
    return _refuse(failure, step, network)


def _refuse(failure: Tensor, step: Tensor, network: str) -> Tensor:
    for member, (code, at) in enumerate(zip(failure.tolist(), step.tolist(), strict=True)):
        if code in (Failure.LOSS, Failure.GRADIENT):
            what = ("loss" if code == Failure.LOSS else "gradient") + (f" of its '{network}'" if network else "")
            raise NonFiniteError(
                f"model {member}: the {what} is not finite at step {at}; lower its learning rate or clip its gradients, or "
                f"go on without it: nonfinite='skip' leaves out the update, nonfinite='freeze' the member"
            )
    return failure.clone()


@constant_to_compiler
def _define() -> bool:
    """Define the same functions as operators, which graphs hold as a whole."""
    define_operator(
        "refuse(Tensor failure, Tensor step, str network) -> Tensor",
        {"CompositeExplicitAutograd": _refuse},
        fake=lambda failure, step, network: torch.empty_like(failure),
    )
    define_operator(
        "diagnose(Tensor losses, Tensor[] grads) -> Tensor",
        {"CPU": diagnose},
        fake=lambda losses, grads: torch.empty(losses.shape[0], dtype=torch.int64),
        prepare=_prepare,
    )
    return True


DEFINITIONS.append(("diagnose", _define))


class Verdict(NamedTuple):
    """What a step decides about every member."""

    keep: Tensor | None  # bool[M], the members to update; None if these are known to be all of them
    active: Tensor  # bool[M], the members that take part in the next step
    loss_scale: Tree
    report: dict[str, Tensor]  # the metrics that every step has


def judge(state: TrainState, outputs: StepOutputs, options: Options) -> Verdict:
    """Decide from losses and gradients."""
    # Codes are compared as plain numbers: compilers do not know an enum's members for such.
    shared = [] if are_sums(outputs) else outputs.shared.values()
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
    keep: Any = verdict.keep
    if options.nonfinite == "raise":
        failure = refuse(torch.where(state.active, verdict.report["failure"], 0), state.step, options.network)
        # In a graph, what depends on no result is left out.
        keep = keep & (failure == int(Failure.NONE))
    return verdict._replace(keep=None if can_look(keep) and bool(keep.all()) else keep)


class Commit:
    """``commit(state, outputs, verdict) -> state``: the state after the step; members that are not kept stay as they are.

    Args:
        model: The model that gives the first values of shared parameters.
        optimizer: What updates the others; one of the user's own may draw random numbers, from the members' keys.
        options: Of the step.
        in_place: Whether the update may be written into the parameters.
        carried: What members carry, by the names under which the loss reports it.
    """

    def __init__(
        self, model: nn.Module, optimizer: GradientTransformation, options: Options, in_place: bool, carried: Tree
    ):
        self.shared = frozenset(shared_of(model, options.shared_params))
        self._optimizer, self._shared_optimizer = optimizer, options.shared_optimizer or optimizer
        self._draws, self._shared_draws = not is_of_package(optimizer), not is_of_package(self._shared_optimizer)
        self._donate, self._in_place, self._carried = options.donate, in_place, carried

    def init_shared(self, model: nn.Module, device: torch.device) -> Shared | tuple[()]:
        """Copies of the model's shared parameters and their optimizer's state; ``()`` if nothing is shared."""
        if not self.shared:
            return ()
        params = {path: x.detach().to(device, copy=True) for path, x in model.named_parameters() if path in self.shared}
        # An array of one model: hyperparameters per member need a ``shared_optimizer`` beside them.
        return Shared(params, self._shared_optimizer.init(_as_one(params)))

    def __call__(self, state: TrainState, outputs: StepOutputs, verdict: Verdict) -> TrainState:
        """The next state, in new tensors or in the old ones."""
        keep = verdict.keep
        params, opt_state = self.renewed(state, outputs, keep)
        carry = state.carry
        if isinstance(carry, Carried) and leaves(self._carried):
            now = tree_map(outputs.metrics.__getitem__, self._carried)
            carry = carry._replace(now=now if keep is None else where(keep, now, carry.now))
        # PyTorch 2.9 compiles no step that replaces fields of the state it is given.
        after = TrainState(
            params={path: params.get(path, param) for path, param in state.params.items()},
            buffers=outputs.buffers if keep is None else where(keep, outputs.buffers, state.buffers),
            opt_state=opt_state,
            keys=state.keys,
            step=state.step + state.active,
            hparams=state.hparams,
            active=verdict.active,
            loss_scale=verdict.loss_scale,
            shared=self.renewed_shared(state, outputs, keep),
            carry=carry,
        )
        return stored(state, after, self._donate)

    def renewed(self, state: TrainState, outputs: StepOutputs, keep: Tensor | None) -> tuple[Params, Tree]:
        """Parameters and the optimizer's state, new for members where ``keep`` is True."""
        drawing = self._draws and routed_by_member(random.fold_in(state.keys, state.step + NOISE))
        with drawing or contextlib.nullcontext():
            given = self._optimizer, outputs.grads, state.opt_state, outputs.params, keep
            try:
                params, opt_state = renew(*given, donate=self._in_place)
            except (AttributeError, KeyError, TypeError) as error:
                fresh = self._optimizer.init(outputs.params)
                if different := difference(state.opt_state, fresh, "opt_state", "the state", "this step's optimizer"):
                    raise StateError(f"another optimizer's state: {different}; begin anew by step.init") from error
                raise
        old = {path: state.params[path] for path in outputs.params}
        # Members that are not kept keep the parameters of the state, which the model may have written in a copy.
        if keep is not None and any(old[path] is not param for path, param in outputs.params.items()):
            params = where(keep, params, old)
        return params, opt_state

    def renewed_shared(self, state: TrainState, outputs: StepOutputs, keep: Tensor | None) -> Shared | tuple[()]:
        """One update by the sum of the gradients of members where ``keep`` holds; none if it holds nowhere."""
        shared = state.shared
        if not isinstance(shared, Shared):
            return ()
        grads = outputs.shared
        if not are_sums(outputs):
            # Not a product, since 0 times NaN is NaN.
            every = state.active if keep is None else keep
            grads = {path: torch.where(per_model(every, x).bool(), x, 0).sum(0, True) for path, x in grads.items()}
        any_kept = None if keep is None else keep.any().reshape(1)
        # Noise of an optimizer comes from all members, in any order.
        key = random.fold_in(state.keys.sum(0, keepdim=True), state.step.sum(0, keepdim=True))
        with routed_by_member(key) if self._shared_draws else contextlib.nullcontext():
            given = self._shared_optimizer, grads, shared.opt_state, _as_one(shared.params), any_kept
            params, opt_state = renew(*given, donate=self._donate)
        return Shared({path: param[0] for path, param in params.items()}, opt_state)


def _as_one(params: Params) -> Params:
    return {path: param[None] for path, param in params.items()}
