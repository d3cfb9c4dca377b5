"""The training step of an array: per-member losses and gradients, one optimizer update, one state in and one out.

Public: :class:`TrainState`, :func:`make_train_step`, :class:`TrainStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from hfta_func import amp, random
from hfta_func._batch import check_batch, slice_batch
from hfta_func._chunks import Chunks
from hfta_func._errors import HyperparameterError, LossError, StateError
from hfta_func._gradient import autocasting, can_look, grad_and_aux
from hfta_func._loss import check_loss, num_positional
from hfta_func._tree import num_models, tree_map, where
from hfta_func._types import Params, PerModel, Tree
from hfta_func.allocator import keep_memory_once
from hfta_func.amp import LossScale
from hfta_func.failures import Failure, diagnose, refuse
from hfta_func.functional import bind
from hfta_func.optim._base import GradientTransformation, apply_updates, per_member, update_, write
from hfta_func.stack import check_state, shapes
from hfta_func.transforms import vmap_routed


class TrainState(NamedTuple):
    """Everything that training changes, for M members; every leaf is ``[M, ...]``.

    Args:
        params: Parameters by path, frozen ones included.
        buffers: Buffers by path.
        opt_state: The optimizer's state, its hyperparameters included.
        keys: ``int64[M]``, the members' seeds.
        step: ``int64[M]``, batches each member has seen; with the key it determines the noise of a step.
        hparams: The members' own numbers for the loss function, ``[M]`` each.
        active: ``bool[M]``; members that are not active stay exactly as they are.
        loss_scale: The members' loss scales, or ``()`` without.
    """

    params: Params
    buffers: Params
    opt_state: Tree
    keys: Tensor
    step: Tensor
    hparams: Params
    active: Tensor
    loss_scale: Tree = ()


def make_train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    *,
    batch_dims: Tree = 0,
    chunk_size: int | Literal["auto"] | None = None,
    autocast: torch.dtype | None = None,
    loss_scale: LossScale | PerModel | None = None,
    stochastic_rounding: bool = False,
    nonfinite: Literal["skip", "freeze", "raise"] = "skip",
    checkpoint: bool | Sequence[str] = False,
    donate: bool = False,
) -> TrainStep:
    """A training step for arrays of ``model``.

    Args:
        model: Any module of the architecture. Its code, settings, train mode and ``requires_grad`` are copied: parameters
            that do not require grad travel with the array and are not updated.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, hparams)``, the ordinary loss of ONE model: returns
            a scalar, or a scalar and a dict of tensors to report. ``model`` is a module holding one member's tensors,
            ``batch`` is that member's batch, ``hparams`` its own numbers. Random calls draw from the member's key.
        optimizer: For example ``adam(lr=[1e-3, 1e-2])``.
        batch_dims: 0 if every leaf of a batch is ``[M, N, ...]``, None if the members share one batch ``[N, ...]``,
            or a tree of both in the batch's own structure.
        chunk_size: Members that run together; None is all of them; 1 is one after another, plainly: they may look at values.
            ``"auto"`` times 1, 2, 4, ... and all at the first step of a shape, and keeps the fastest; compiled, it is all.
        autocast: Run the forward pass in ``torch.bfloat16`` or ``torch.float16`` where ``torch.autocast`` does. Parameters
            and updates keep their own precision.
        loss_scale: A :class:`LossScale`, or a number or one number per member for scales that stay. Without one, float16
            gets ``LossScale()``; 1.0 is none.
        stochastic_rounding: Update parameters that are bfloat16 in float32, the optimizer's state included, and round them
            up or down at random by the member's key, so that updates too small for bfloat16 count on average.
        nonfinite: What becomes of a member whose loss or gradient is not finite: ``"skip"`` leaves out this update,
            ``"freeze"`` makes the member inactive, ``"raise"`` raises, which waits for the device at every step. A member
            whose gradient overflows under its loss scale is skipped in all cases.
        checkpoint: Paths of submodules that keep only their inputs and run again in the backward pass: less memory for
            more time. True is the blocks: elements of ``nn.Sequential`` and ``nn.ModuleList`` that have children, else
            the model's children that have children, else the model. Compiled, on XLA, or inside a ``torch.func``
            gradient, they run once: a compiler plans memory itself.
        donate: Write the new state into the tensors of the old one, which the caller gives up: no second copy of
            parameters and optimizer state, and addresses that stay, as CUDA graphs want them.

    Returns:
        A :class:`TrainStep`; ``torch.compile(step)`` works.

    Raises:
        LossError: if no parameter of the model requires grad.
        ValueError: if ``checkpoint`` names a submodule that there is not, or another argument is none of its choices.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> def loss_fn(model, batch):
        ...     inputs, targets = batch
        ...     return torch.nn.functional.mse_loss(model(inputs), targets)
        >>> step = make_train_step(models[0], loss_fn, sgd(lr=[0.1, 0.01, 0.001]), batch_dims=None)
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state, metrics = step(state, (torch.randn(8, 4), torch.randn(8, 1)))
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    return TrainStep(
        model,
        loss_fn,
        optimizer,
        batch_dims=batch_dims,
        chunk_size=chunk_size,
        autocast=autocast,
        loss_scale=loss_scale,
        stochastic_rounding=stochastic_rounding,
        nonfinite=nonfinite,
        checkpoint=checkpoint,
        donate=donate,
    )


class TrainStep:
    """``step(state, batch) -> (state, metrics)``, a pure function; made by :func:`make_train_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        *,
        batch_dims: Tree,
        chunk_size: int | Literal["auto"] | None,
        autocast: torch.dtype | None,
        loss_scale: LossScale | PerModel | None,
        stochastic_rounding: bool,
        nonfinite: Literal["skip", "freeze", "raise"],
        checkpoint: bool | Sequence[str],
        donate: bool,
    ):
        if not (chunk_size is None or chunk_size == "auto" or (isinstance(chunk_size, int) and chunk_size >= 1)):
            raise ValueError(
                f"chunk_size is {chunk_size!r}; it must be at least 1, 'auto', or None for all members at once"
            )
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast is {autocast!r}; it must be torch.bfloat16, torch.float16, or None")
        if nonfinite not in ("skip", "freeze", "raise"):
            raise ValueError(f"nonfinite is {nonfinite!r}; it must be 'skip', 'freeze' or 'raise'")
        parameters = dict(model.named_parameters())
        if stochastic_rounding and all(parameter.dtype != torch.bfloat16 for parameter in parameters.values()):
            raise ValueError("stochastic_rounding is for parameters in bfloat16, of which the model has none")
        self.optimizer = optimizer
        self.batch_dims = batch_dims
        self.chunk_size = chunk_size
        self.autocast = autocast
        self.stochastic_rounding = stochastic_rounding
        self.nonfinite = nonfinite
        self.donate = donate
        if loss_scale is None and autocast == torch.float16:
            loss_scale = LossScale()
        elif loss_scale is not None and not isinstance(loss_scale, LossScale):
            loss_scale = LossScale(loss_scale, backoff_factor=1.0, growth_factor=1.0)
        self.loss_scale = loss_scale
        self.trainable = frozenset(path for path, parameter in parameters.items() if parameter.requires_grad)
        if not self.trainable:
            raise LossError("no parameter of the model requires grad, so there is nothing to train")
        self._shapes = shapes(model)
        self._takes_hparams = num_positional(loss_fn) >= 3
        # A look-up table with max_norm rescales rows in place before it reads them: in a copy, where the update starts from.
        self._renormalises = any(getattr(module, "max_norm", None) is not None for module in model.modules())
        self._loss = bind(model, loss_fn, checkpoint)
        self._opt_spec: Any = None
        self._tried = False
        self._chunks = Chunks()

    def init(
        self,
        params: Params,
        buffers: Params | None = None,
        *,
        seeds: Sequence[int] | Tensor,
        hparams: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """The state before the first step.

        Args:
            params: Stacked parameters ``[M, ...]``, as :func:`stack_params` makes them; used as they are, never written.
            buffers: Stacked buffers.
            seeds: One integer per member; all of a member's noise comes from its seed.
            hparams: What ``loss_fn`` gets as its third argument: by name, a number or one number per member.

        Raises:
            StateError: if params or buffers are not those of the model.
            HyperparameterError: if seeds, ``hparams`` or the optimizer's hyperparameters have another length than M.
        """
        count = num_models((params, buffers or {}))
        check_state((params, buffers or {}), self._shapes)
        keys = random.keys(seeds, device=next(iter(params.values())).device)
        if keys.shape != (count,):
            raise HyperparameterError(
                f"got {keys.numel()} seeds but the array has {count} models; give one integer per model"
            )
        if hparams and not self._takes_hparams:
            raise HyperparameterError(
                f"hparams {sorted(hparams)} have no use: the loss function takes only (model, batch); give it a third "
                f"argument"
            )
        trainable = self._trained(params)
        first = next(iter(trainable.values()))
        if keys.device.type == "cpu":
            keep_memory_once()
        return TrainState(
            params=dict(params),
            buffers=dict(buffers or {}),
            opt_state=self.optimizer.init(amp.widen(trainable) if self.stochastic_rounding else trainable),
            keys=keys,
            step=torch.zeros(count, dtype=torch.int64, device=keys.device),
            hparams={
                name: per_member(name, value, count, keys.device).to(first.dtype)
                for name, value in (hparams or {}).items()
            },
            active=torch.ones(count, dtype=torch.bool, device=keys.device),
            loss_scale=() if self.loss_scale is None else self.loss_scale.init(count, keys.device),
        )

    def _trained(self, params: Params) -> Params:
        return {path: param for path, param in params.items() if path in self.trainable}

    @torch.no_grad()
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """One step of every active member.

        A member whose loss or gradient is not finite keeps its parameters, buffers and optimizer state, and
        ``metrics["failure"]`` tells why. Inactive members keep everything.

        Returns:
            The new state, and the metrics: ``loss``; ``finite``, whether loss and gradient are; ``failure``, a
            :class:`Failure`; ``loss_scale`` where there is one; and what the loss function reports. Each is ``[M, ...]``.

        Raises:
            StateError: if the state is not of this model and optimizer.
            BatchError: if a leaf has no model axis where ``batch_dims`` says 0.
            LossError: if a loss is not a floating-point scalar.
            NonFiniteError: with ``nonfinite="raise"``, if a member fails.
        """
        self._check(state, batch)
        before = state
        if self._renormalises:
            state = state._replace(params={path: param.clone() for path, param in state.params.items()})
        grads, losses, metrics, buffers = self._gradients(state, batch)
        # Codes are compared as plain numbers: compilers do not know an enum's members for such.
        failure = diagnose(losses, grads.values())
        report = {"loss": losses, "finite": failure == int(Failure.NONE), "failure": failure}
        loss_scale = state.loss_scale
        if self.loss_scale is not None:
            report["loss_scale"] = loss_scale.scale.clone()
            overflow = self.loss_scale.overflowed(loss_scale, failure == int(Failure.GRADIENT))
            report["failure"] = failure = torch.where(overflow, int(Failure.OVERFLOW), failure)
            loss_scale = self.loss_scale.update(loss_scale, overflow, state.active)
        if self.nonfinite == "raise":
            failure = refuse(torch.where(state.active, failure, 0), state.step)
        keep, active = state.active & (failure == int(Failure.NONE)), state.active
        if self.nonfinite == "freeze":
            active = active & ((failure == int(Failure.NONE)) | (failure == int(Failure.OVERFLOW)))
        kept = None if can_look(keep) and bool(keep.all()) else keep
        old = self._trained(before.params), before.buffers, before.opt_state
        updated, opt_state = self._update(state, grads, kept)
        new = updated, buffers, opt_state
        if self.donate:
            write(old, new, kept)
            new = old
        elif kept is not None:
            new = where(kept, new, old)
        updated, buffers, opt_state = new
        after = TrainState(
            params={path: updated.get(path, param) for path, param in state.params.items()},
            buffers=buffers,
            opt_state=opt_state,
            keys=state.keys,
            step=state.step + state.active,
            hparams=state.hparams,
            active=active,
            loss_scale=loss_scale,
        )
        if self.donate:
            write(before, after, None)
        return before if self.donate else after, {**report, **metrics}

    def _update(self, state: TrainState, grads: Params, kept: Tensor | None) -> tuple[Params, Tree]:
        """Trained parameters and the optimizer's state after the update; in place where that helps, if asked for."""
        trainable = self._trained(state.params)
        if self.stochastic_rounding:
            wide = amp.widen(trainable)
            updates, opt_state = self.optimizer.update(amp.widen(grads), state.opt_state, wide)
            keys = random.fold_in(state.keys, state.step)
            return amp.round_stochastically(keys, apply_updates(wide, updates), trainable), opt_state
        if self.donate and not self._renormalises:
            update_(self.optimizer, grads, state.opt_state, trainable, kept)
            return trainable, state.opt_state
        updates, opt_state = self.optimizer.update(grads, state.opt_state, trainable)
        return apply_updates(trainable, updates), opt_state

    def _gradients(self, state: TrainState, batch: Tree) -> tuple[Params, Tensor, Params, Params]:
        keys = random.fold_in(state.keys, state.step)
        scale = state.loss_scale.scale if self.loss_scale is not None else ()
        members = (state.params, state.buffers, keys, state.hparams, scale)
        count = keys.shape[0]

        def run(size: int) -> tuple[Params, Tensor, Params, Params]:
            if size >= count:
                return self._run(members, batch)
            pieces = []
            for start in range(0, count, size):
                stop = start + size
                part = tree_map(lambda leaf, start=start, stop=stop: leaf[start:stop], members)
                pieces.append(self._run(part, slice_batch(self.batch_dims, batch, start, stop)))
            return tree_map(lambda *leaves: torch.cat(leaves), *pieces)

        if isinstance(self.chunk_size, str):
            size = self._chunks.fastest(run, count, keys.device, batch)
        else:
            size = self.chunk_size or count
        grads, losses, metrics, buffers = run(size)
        if self.loss_scale is not None:
            grads = amp.unscaled(grads, state.loss_scale.scale)
        return grads, losses, metrics, buffers

    def _run(self, members: tuple[Params, Params, Tensor, Params, Any], batch: Tree) -> Any:
        params, buffers, keys, hparams, scale = members
        # A model may write its input, as ReLU(inplace=True) does in a first layer; the batch is the caller's.
        batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        frozen = {path: param for path, param in params.items() if path not in self.trainable}
        run = vmap_routed(self._member, in_dims=(0, 0, 0, 0, 0, self.batch_dims))

        def total(trainable: Params) -> tuple[Tensor, Any]:
            with autocasting(keys.device, self.autocast):
                losses, metrics, new_buffers = run(trainable, frozen, buffers, keys, hparams, batch)
            # Members do not meet, so the gradient of the sum holds each member's own gradient.
            scaled = losses if self.loss_scale is None else losses * scale
            return scaled.sum(), (losses, metrics, new_buffers)

        # The compiler must not see the flag, or it would compile again when an eager call has set it.
        if not torch.compiler.is_compiling() and not self._tried:
            # Once, so that a model that writes them is found out before it has changed the caller's.
            frozen = {path: param.clone() for path, param in frozen.items()}
        versions = {path: param._version for path, param in frozen.items()} if can_look(keys) else {}
        grads, aux = grad_and_aux(self._trained(params), total)
        for path, version in versions.items():
            if frozen[path]._version != version:
                raise StateError(
                    f"the model writes '{path}' in place, a parameter that does not require grad; make it a buffer, which "
                    f"a step returns anew"
                )
        if not torch.compiler.is_compiling():
            self._tried = True
        return grads, *aux

    def _member(
        self, trainable: Params, frozen: Params, buffers: Params, key: Tensor, hparams: Params, batch: Tree
    ) -> tuple[Tensor, Params, Params]:
        args = (batch, hparams) if self._takes_hparams else (batch,)
        result, buffers = self._loss({**trainable, **frozen}, buffers, *args, key=key)
        if isinstance(result, tuple) and len(result) != 2:
            raise LossError(f"the loss function returned {len(result)} results; return (loss, dict of metrics)")
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        check_loss(loss, metrics)
        return loss, metrics, buffers

    def _check(self, state: TrainState, batch: Tree) -> None:
        if not isinstance(state, TrainState):
            raise StateError(f"expected a TrainState but got {type(state).__qualname__}; make one with step.init(...)")
        check_state((state.params, state.buffers), self._shapes)
        if not torch.compiler.is_compiling():
            self._check_opt_state(state)
        check_batch(self.batch_dims, batch, state.keys.shape[0])

    def _check_opt_state(self, state: TrainState) -> None:
        if self._opt_spec is None:
            trainable = {path: param.to("meta") for path, param in state.params.items() if path in self.trainable}
            self._opt_spec = optree.tree_structure(self.optimizer.init(trainable))
        if bool(state.loss_scale) != (self.loss_scale is not None):
            has, makes = ("a", "none") if state.loss_scale else ("no", "one")
            raise StateError(
                f"the state has {has} loss scale but this step uses {makes}; make a state with step.init(...)"
            )
        spec = optree.tree_structure(state.opt_state)
        if spec != self._opt_spec:
            raise StateError(
                f"the state belongs to another optimizer: its opt_state is {spec}, this step's is {self._opt_spec}; "
                f"make a state with step.init(...)"
            )
