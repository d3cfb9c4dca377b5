"""The training step of an array: per-member losses and gradients, one optimizer update, one state in and one out.

Public: :class:`TrainState`, :func:`make_train_step`, :class:`TrainStep`, :func:`make_eval_step`, :class:`EvalStep`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._batch import check_batch, slice_batch
from hfta_func._chunks import Chunks
from hfta_func._errors import HyperparameterError, LossError, StackError, StateError
from hfta_func._gradient import all_finite, can_look, grad_and_aux
from hfta_func._tree import num_models, tree_map, where
from hfta_func._types import Params, Tree
from hfta_func.allocator import keep_memory_once
from hfta_func.functional import bind, skeleton
from hfta_func.optim._base import GradientTransformation, apply_updates, per_member
from hfta_func.stack import Stacked, check_matches, shapes
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
    """

    params: Params
    buffers: Params
    opt_state: Tree
    keys: Tensor
    step: Tensor
    hparams: Params
    active: Tensor


def make_train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    *,
    batch_dims: Tree = 0,
    chunk_size: int | Literal["auto"] | None = None,
    checkpoint: bool | Sequence[str] = False,
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
        checkpoint: Paths of submodules that keep only their inputs and run again in the backward pass: less memory for
            more time. True is the blocks: elements of ``nn.Sequential`` and ``nn.ModuleList`` that have children, else
            the model's children that have children, else the model. Compiled, on XLA, or inside a ``torch.func``
            gradient, they run once: a compiler plans memory itself.

    Returns:
        A :class:`TrainStep`; ``torch.compile(step)`` works.

    Raises:
        LossError: if no parameter of the model requires grad.
        ValueError: if ``checkpoint`` names a submodule that there is not.

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
    return TrainStep(model, loss_fn, optimizer, batch_dims, chunk_size, checkpoint)


class TrainStep:
    """``step(state, batch) -> (state, metrics)``, a pure function; made by :func:`make_train_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation,
        batch_dims: Tree = 0,
        chunk_size: int | Literal["auto"] | None = None,
        checkpoint: bool | Sequence[str] = False,
    ):
        if not (chunk_size is None or chunk_size == "auto" or (isinstance(chunk_size, int) and chunk_size >= 1)):
            raise ValueError(
                f"chunk_size is {chunk_size!r}; it must be at least 1, 'auto', or None for all members at once"
            )
        parameters = dict(model.named_parameters())
        self.optimizer = optimizer
        self.batch_dims = batch_dims
        self.chunk_size = chunk_size
        self.trainable = frozenset(path for path, parameter in parameters.items() if parameter.requires_grad)
        if not self.trainable:
            raise LossError("no parameter of the model requires grad, so there is nothing to train")
        self._shapes = shapes(model)
        self._takes_hparams = _positional(loss_fn) >= 3
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
        _check_tensors((params, buffers or {}), self._shapes)
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
            opt_state=self.optimizer.init(trainable),
            keys=keys,
            step=torch.zeros(count, dtype=torch.int64, device=keys.device),
            hparams={
                name: per_member(name, value, count, keys.device).to(first.dtype)
                for name, value in (hparams or {}).items()
            },
            active=torch.ones(count, dtype=torch.bool, device=keys.device),
        )

    def _trained(self, params: Params) -> Params:
        return {path: param for path, param in params.items() if path in self.trainable}

    @torch.no_grad()
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """One step of every active member.

        A member whose loss or gradient is not finite keeps its parameters, buffers and optimizer state;
        ``metrics["finite"]`` tells which. Inactive members keep everything.

        Returns:
            The new state, and the metrics: ``loss``, ``finite``, and what the loss function reports, each ``[M, ...]``.

        Raises:
            StateError: if the state is not of this model and optimizer.
            BatchError: if a leaf has no model axis where ``batch_dims`` says 0.
            LossError: if a loss is not a floating-point scalar.
        """
        self._check(state, batch)
        old = self._trained(state.params), state.buffers, state.opt_state
        if self._renormalises:
            state = state._replace(params={path: param.clone() for path, param in state.params.items()})
        grads, losses, metrics, buffers = self._gradients(state, batch)
        trainable = self._trained(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, trainable)
        updated = apply_updates(trainable, updates)
        finite = all_finite([losses, *grads.values()])
        new = updated, buffers, opt_state
        keep = state.active & finite
        if not (can_look(keep) and bool(keep.all())):
            new = where(keep, new, old)
        updated, buffers, opt_state = new
        state = TrainState(
            params={path: updated.get(path, param) for path, param in state.params.items()},
            buffers=buffers,
            opt_state=opt_state,
            keys=state.keys,
            step=state.step + state.active,
            hparams=state.hparams,
            active=state.active,
        )
        return state, {"loss": losses, "finite": finite, **metrics}

    def _gradients(self, state: TrainState, batch: Tree) -> tuple[Params, Tensor, Params, Params]:
        keys = random.fold_in(state.keys, state.step)
        members = (state.params, state.buffers, keys, state.hparams)
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
            return run(self._chunks.fastest(run, count, keys.device, batch))
        return run(self.chunk_size or count)

    def _run(self, members: tuple[Params, Params, Tensor, Params], batch: Tree) -> Any:
        params, buffers, keys, hparams = members
        # A model may write its input, as ReLU(inplace=True) does in a first layer; the batch is the caller's.
        batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        frozen = {path: param for path, param in params.items() if path not in self.trainable}
        run = vmap_routed(self._member, in_dims=(0, 0, 0, 0, 0, self.batch_dims))

        def total(trainable: Params) -> tuple[Tensor, Any]:
            losses, metrics, new_buffers = run(trainable, frozen, buffers, keys, hparams, batch)
            # Members do not meet, so the gradient of the sum holds each member's own gradient.
            return losses.sum(), (losses, metrics, new_buffers)

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
        _check_loss(loss, metrics)
        return loss, metrics, buffers

    def _check(self, state: TrainState, batch: Tree) -> None:
        if not isinstance(state, TrainState):
            raise StateError(f"expected a TrainState but got {type(state).__qualname__}; make one with step.init(...)")
        _check_tensors((state.params, state.buffers), self._shapes)
        if not torch.compiler.is_compiling():
            self._check_opt_state(state)
        check_batch(self.batch_dims, batch, state.keys.shape[0])

    def _check_opt_state(self, state: TrainState) -> None:
        if self._opt_spec is None:
            trainable = {path: param.to("meta") for path, param in state.params.items() if path in self.trainable}
            self._opt_spec = optree.tree_structure(self.optimizer.init(trainable))
        spec = optree.tree_structure(state.opt_state)
        if spec != self._opt_spec:
            raise StateError(
                f"the state belongs to another optimizer: its opt_state is {spec}, this step's is {self._opt_spec}; "
                f"make a state with step.init(...)"
            )


def make_eval_step(
    model: nn.Module,
    metric_fn: Callable[..., Any],
    *,
    batch_dims: Tree = None,
    chunk_size: int | None = None,
) -> EvalStep:
    """An evaluation step for arrays of ``model``, which it runs in eval mode and without gradients.

    Args:
        model: Any module of the architecture.
        metric_fn: ``metric_fn(model, batch)`` of ONE model: returns a tensor, or a dict of tensors.
        batch_dims: None if the members share one batch ``[N, ...]``, 0 if every leaf is ``[M, N, ...]``, or a tree.
        chunk_size: Members that run together; None is all of them.

    Returns:
        ``evaluate(state, batch) -> dict[str, Tensor[M, ...]]``, where ``state`` is a :class:`TrainState` or what
        :func:`stack_params` returns. A single tensor comes back under the name of ``metric_fn``. Random calls draw from
        the members' keys; without a training state all members draw those of seed 0.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> def error(model, batch):
        ...     return (model(batch[0]) - batch[1]).abs().mean()
        >>> evaluate = make_eval_step(models[0], error)
        >>> evaluate(stack_params(models), (torch.randn(8, 4), torch.randn(8, 1)))["error"].shape
        torch.Size([3])
    """
    return EvalStep(model, metric_fn, batch_dims, chunk_size)


class EvalStep:
    """``evaluate(state, batch) -> metrics``, a pure function; made by :func:`make_eval_step`."""

    def __init__(
        self, model: nn.Module, metric_fn: Callable[..., Any], batch_dims: Tree = None, chunk_size: int | None = None
    ):
        self.batch_dims = batch_dims
        self.chunk_size = chunk_size
        self._name = getattr(metric_fn, "__name__", "metric")
        self._metrics = bind(skeleton(model).eval(), metric_fn)
        self._shapes = shapes(model)

    @torch.no_grad()
    def __call__(self, state: TrainState | Stacked, batch: Tree) -> dict[str, Tensor]:
        """The metrics of every member.

        Raises:
            BatchError: if a leaf has no model axis where ``batch_dims`` says 0.
        """
        count = num_models((state.params, state.buffers))
        _check_tensors((state.params, state.buffers), self._shapes)
        check_batch(self.batch_dims, batch, count)
        run = vmap_routed(self._member, in_dims=(0, 0, 0, self.batch_dims), chunk_size=self.chunk_size)
        if isinstance(state, TrainState):
            keys = random.fold_in(state.keys, ~state.step)
        else:
            keys = torch.zeros(count, dtype=torch.int64, device=next(iter(state.params.values())).device)
        return run(state.params, state.buffers, keys, batch)

    def _member(self, params: Params, buffers: Params, key: Tensor, batch: Tree) -> dict[str, Tensor]:
        metrics, _ = self._metrics(params, buffers, batch, key=key)
        return metrics if isinstance(metrics, dict) else {self._name: metrics}


def _check_tensors(stacked: tuple[Params, Params], own: tuple[dict[str, torch.Size], dict[str, torch.Size]]) -> None:
    """Raise a StateError unless parameters and buffers are those of the step's model."""
    for held, expected in zip(stacked, own, strict=True):
        try:
            check_matches(held, expected)
        except StackError as error:
            raise StateError(str(error)) from None


def _check_loss(loss: Any, metrics: Any) -> None:
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss is a {type(loss).__qualname__}; return a scalar tensor, or (loss, dict of metrics)")
    if loss.dim() != 0:
        raise LossError(f"the loss of one model has shape {list(loss.shape)}; reduce it to a scalar, e.g. with .mean()")
    if not loss.dtype.is_floating_point:
        raise LossError(f"the loss is {loss.dtype}; it must be floating point to have a gradient")
    if not isinstance(metrics, dict):
        raise LossError(f"the loss function returned (loss, {type(metrics).__qualname__}); metrics must be a dict")
    for name, value in metrics.items():
        if name in ("loss", "finite"):
            raise LossError(
                f"metric '{name}' hides what the step reports; a metric must not be named 'loss' or 'finite'"
            )
        if not isinstance(value, Tensor):
            raise LossError(f"metric '{name}' is a {type(value).__qualname__}; metrics must be tensors")


def _positional(func: Callable[..., Any]) -> int:
    """How many arguments a function takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.kind in kinds and parameter.default is inspect.Parameter.empty
        for parameter in inspect.signature(func).parameters.values()
    )
