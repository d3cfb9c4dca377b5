"""Losses and gradients of all members at once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import can_look, inside_transform
from hfta_func._tree import per_model, tree_map
from hfta_func._types import Params, Tree
from hfta_func.calls.recompute import Recalls
from hfta_func.errors import LossError
from hfta_func.models.functional import bind, tables_with_max_norm
from hfta_func.models.scalar_attributes import emptied, filled
from hfta_func.models.sharing import base_of
from hfta_func.rules._advice import advice
from hfta_func.step.batch import copied, leaf_dims, of_member, plain
from hfta_func.step.chunks import Chunks
from hfta_func.step.members import Members, of_first, with_batch
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, expanded_shared
from hfta_func.verify import Case, Oracle, Trial, autocasting, same

# Negative, as all numbers are that this package folds into the keys of a state: the others are left to the users.
NOISE = -(2**62)

_REPORTED = ("loss", "finite", "failure", "loss_scale", "failed_step")


class StepOutputs(NamedTuple):
    """What a step computes of every member before anything is changed."""

    params: Params  # the trained ones that the gradients belong to, where the update starts from
    grads: Params
    losses: Tensor
    metrics: Params  # what the loss function reports
    buffers: Params  # those after the forward pass
    shared: Params  # the gradients of what members share, each member's ``[M, ...]``
    summed: bool = False  # or their sums ``[1, ...]``, if no member is to be left out


class Gradients:
    """``gradients(state, batch) -> StepOutputs``; writes nothing that the caller holds."""

    def __init__(
        self,
        model: nn.Module,
        outline: nn.Module,
        loss_fn: Callable[..., Any],
        trainable: frozenset[str],
        options: Options,
    ):
        self.takes_hparams = num_positional(loss_fn) >= 3
        # A look-up table with max_norm shortens rows in place before it reads them: in a copy, where the update starts from.
        self.rewrites_params = bool(tables_with_max_norm(model))
        self.chunks = Chunks(options.chunk_size, options.batch_dims)
        loss = with_batch(loss_fn, self.takes_hparams)
        self._loss: Any = bind(model, loss, options.checkpoint, renorms=True, share_frozen=options.share_frozen)
        self._trainable, self._options, self._made_from = trainable, options, (outline, loss_fn)
        self.oracle = Oracle(options.verify, loss_fn, model)
        self.members = Members(self._rehearse)

    def __call__(self, state: TrainState, batch: Tree) -> StepOutputs:
        """Losses, gradients, metrics and buffers of every member."""
        members = self.tensors(state)
        keys, trained, shared = members[:3]
        self.members.rehearse(members, batch)
        if shared and can_look(keys) and self._options.scaling is None and bool(state.active.all()):
            run = functools.partial(self._run, batch, together=True)
            sums, grads, losses, metrics, buffers = self.chunks(run, members, plain(batch), adds=True)
            buffers = emptied(buffers, state.hparams, state.buffers)
            if bool(torch.stack([leaf.sum() for leaf in (losses, *grads.values(), *sums.values())]).isfinite().all()):
                sums = {path: total[None] for path, total in sums.items()}
                self.members.has_run(keys)
                return StepOutputs(trained, grads, losses, metrics, buffers, sums, summed=True)
            # A sum does not tell whose part is not finite.
        grads, losses, metrics, buffers = self.chunks(functools.partial(self._run, batch), members, plain(batch))
        self.members.has_run(keys)
        buffers = emptied(buffers, state.hparams, state.buffers)
        if self._options.scaling is not None:
            inverse = state.loss_scale.scale.double().reciprocal()
            grads = {path: grad * per_model(inverse, grad) for path, grad in grads.items()}
        grads, apart = _parted(grads, shared)
        return StepOutputs(trained, grads, losses, metrics, buffers, apart)

    def compare(self, trial: Trial | None, state: TrainState, batch: Tree, outputs: StepOutputs) -> None:
        """Raise a VerifyError if members alone compute something else, in a call that is compared."""
        if trial is not None:
            # Numbers of the members' own are in the state's hyperparameters, not in its buffers.
            buffers = {path: leaf for path, leaf in outputs.buffers.items() if path not in state.hparams}
            results = {"loss": {"": outputs.losses}, "metric": outputs.metrics, "buffer": buffers}
            results["gradient"] = outputs.grads if outputs.summed else outputs.grads | outputs.shared
            results |= {"parameter": outputs.params} if self.rewrites_params else {}
            trial(self._case(self.tensors(state), batch), results)

    def verify(self, state: TrainState, batch: Tree, members: Sequence[int]) -> None:
        """Compare a step with these members alone, once more; raises a VerifyError where it differs."""
        model, loss_fn = self._made_from
        if (trial := Oracle(True, loss_fn, model)(state.keys, plain(batch))) is not None:
            case = self._case(self.tensors(state), batch)
            trial(case, case.again(same, None, False), members)

    def _rehearse(self, members: Any, batch: Tree) -> None:
        """What a compiler traces, before it does: of the first member, and compared with members alone."""
        of_first(self._run, self._options.batch_dims)(members, batch)
        if (trial := self.oracle(members[0], plain(batch))) is not None:
            case = self._case(members, batch)
            trial(case, case.again(same, None, False))

    def _case(self, tensors: Any, batch: Tree) -> Case:
        """The call of a step, for the oracle."""
        (model, loss_fn), options = self._made_from, self._options
        keys, trained, shared, frozen, buffers, hparams, scale = tensors
        base = base_of(model) if options.share_frozen else {}

        def measure(model: nn.Module, member: int, cast: Any) -> Any:
            given = model, of_member(options.batch_dims, batch, member, cast)
            numbers = {name: cast(leaf[member]) for name, leaf in hparams.items()}
            loss, metrics = check_result(loss_fn(*given, numbers) if self.takes_hparams else loss_fn(*given))
            return loss, {"loss": {"": loss.detach()}, "metric": tree_map(Tensor.detach, metrics)}

        def again(cast: Any, watch: Any, judged: bool) -> Any:
            held = {path: leaf.expand(len(keys), *leaf.shape) for path, leaf in cast(base).items()} if judged else {}
            params = {path: leaf for path, leaf in held.items() if path not in buffers}
            members = (keys, *cast((trained, shared)), cast(frozen) | params, *cast((buffers, hparams, scale)))
            run = functools.partial(self._run, batch, judged=judged)
            with contextlib.nullcontext() if watch is None else self._loss.observed(watch):
                size = len(keys) if watch is not None else None
                grads, losses, metrics, after = self.chunks(run, members, cast(plain(batch)), size=size)
            if isinstance(scale, Tensor):
                inverse = scale.double().reciprocal()
                grads = {path: grad * per_model(inverse, grad) for path, grad in grads.items()}
            results = {"loss": {"": losses}, "metric": metrics, "buffer": after, "gradient": grads}
            return results | ({"parameter": members[1]} if self.rewrites_params else {})

        once = base | {path: leaf[0] for path, leaf in shared.items()}
        trees = {**trained, **frozen}, buffers
        return Case(
            *(model, loss_fn, trees, once, keys, measure, again, self._trainable | shared.keys()),
            scale=scale if isinstance(scale, Tensor) else None,
            autocast=options.autocast,
            counts=self._loss.counts,
        )

    def tensors(self, state: TrainState) -> tuple[Tensor, Params, Params, Params, Params, Params, Any]:
        """What members run with."""
        params = state.params
        if self.rewrites_params:
            params = copied(params)
        trained = {path: param for path, param in params.items() if path in self._trainable}
        frozen = {path: param for path, param in params.items() if path not in self._trainable}
        keys = random.fold_in(state.keys, state.step + NOISE)
        scale = () if self._options.scaling is None else state.loss_scale.scale
        given = filled(state.buffers, state.hparams)
        return keys, trained, expanded_shared(state), frozen, given, state.hparams, scale

    def _run(
        self,
        batch: Tree,
        members: tuple[Tensor, Params, Params, Params, Params, Params, Any],
        tree: Tree,
        together: bool = False,
        judged: bool = False,
    ) -> Any:
        keys, trained, shared, frozen, buffers, hparams, scale = members
        member = functools.partial(self._member, batch)
        dims = dict.fromkeys(trained, 0) | dict.fromkeys(shared, None if together else 0)
        run = self.members.vmap(member, (dims, 0, 0, 0, 0, leaf_dims(self._options.batch_dims, tree)))
        # One copy, whose gradient is the sum over members, or each member's own.
        trained = trained | ({path: param[0] for path, param in shared.items()} if together else shared)

        def total(frozen: Params, trained: Params) -> tuple[Tensor, Any]:
            with autocasting(keys.device, None if judged else self._options.autocast):
                losses, metrics, new_buffers = run(trained, frozen, buffers, keys, hparams, tree)
            # Members are independent, so the gradient of the sum holds each member's own gradient.
            scaled = losses if self._options.scaling is None else losses * scale
            return scaled.sum(), (losses, metrics, new_buffers)

        # The first step finds out whether what is kept is written, which PyTorch does not notice under hooks.
        less = self._options.save == "less" and not self.members.is_first(keys)

        def differentiate(frozen: Params, trained: Params = trained) -> tuple[Params, Any]:
            return grad_and_aux(trained, functools.partial(total, frozen), less)

        guarded = (frozen,) if self.rewrites_params else (frozen, trained)
        grads, aux = self.members.guard(keys, differentiate, *guarded)
        if together:
            apart, sums = _parted(grads, shared)
            return sums, apart, *aux
        return grads, *aux

    def _member(
        self, like: Tree, trained: Params, frozen: Params, buffers: Params, key: Tensor, hparams: Params, tree: Tree
    ) -> tuple[Tensor, Params, Params]:
        result, buffers = self._loss({**trained, **frozen}, buffers, tree, hparams, lambda: like, key=key)
        return *check_result(result), buffers


def _parted(grads: Params, shared: Params) -> tuple[Params, Params]:
    """The gradients of the members' own parameters, and of those that they share."""
    apart = {path: grad for path, grad in grads.items() if path not in shared}
    return apart, {path: grads[path] for path in shared}


def grad_and_aux(
    params: Params, func: Callable[[Params], tuple[Tensor, Any]], less: bool = False
) -> tuple[Params, Any]:
    """Gradient of the first result, and the second result; ``less`` keeps less for the backward pass.

    The gradient is taken outside ``vmap``, so that the backward pass is autograd's own on the lowered operators. Eagerly
    that is plain autograd, which is faster than ``torch.func.grad``; compiler and outer transforms know only the latter.
    """
    if torch.compiler.is_compiling() or inside_transform():
        return torch.func.grad(func, has_aux=True)(params)
    leaves = {path: param.detach().requires_grad_() for path, param in params.items()}
    with torch.enable_grad(), Recalls()() if less else contextlib.nullcontext():
        value, aux = func(leaves)
    if not value.requires_grad:
        raise LossError("the loss does not depend on any parameter that requires grad; return what model(...) computed")
    try:
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise advice(error) or error from error.__cause__
    if all(grad is None and leaf.grad is None for leaf, grad in zip(leaves.values(), grads, strict=True)):
        raise LossError(
            "the loss depends on no parameter of the model that it is given; compute it from model(...), not from a model "
            "that a global or a closure holds"
        )
    grads = [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves.values(), grads, strict=True)
    ]
    # The backward pass of an autograd function may have called autograd itself, which adds to ``.grad``.
    grads = [grad if leaf.grad is None else grad + leaf.grad for leaf, grad in zip(leaves.values(), grads, strict=True)]
    return dict(zip(leaves, grads, strict=True)), tree_map(torch.Tensor.detach, aux)


def check_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of one model; raises a LossError unless they are a scalar and a dict of tensors."""
    if isinstance(result, tuple) and len(result) != 2:
        raise LossError(f"the loss function returned {len(result)} results; return (loss, dict of metrics)")
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss is a {type(loss).__qualname__}; return a scalar tensor, or (loss, dict of metrics)")
    if loss.dim() != 0:
        raise LossError(f"the loss of one model has shape {list(loss.shape)}; reduce it to a scalar, e.g. with .mean()")
    if not loss.dtype.is_floating_point:
        raise LossError(f"the loss is {loss.dtype}; it must be floating point to have a gradient")
    if not isinstance(metrics, dict):
        raise LossError(f"the loss function returned (loss, {type(metrics).__qualname__}); metrics must be a dict")
    for name in metrics:
        if name in _REPORTED:
            raise LossError(f"metric '{name}' hides what the step reports; name it none of {', '.join(_REPORTED)}")
    return loss, check_metrics(metrics)


def check_metrics(metrics: dict[str, Any]) -> dict[str, Tensor]:
    """Raise a LossError unless every metric is a tensor; give them back."""
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise LossError(f"metric '{name}' is a {type(value).__qualname__}; metrics must be tensors")
    return metrics


def num_positional(func: Callable[..., Any]) -> int:
    """How many arguments a loss or a metric takes by position; raises a LossError for what is no function of a model."""
    kind = func if inspect.isfunction(func) else type(func)
    if not callable(func) or (kind.__module__ or "").startswith("torch.nn."):
        cure = "write one, such as lambda model, batch: mse_loss(model(batch[0]), batch[1])"
        raise LossError(f"{getattr(kind, '__qualname__', kind)} is no function of a model and a batch; {cure}")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(func).parameters.values())
