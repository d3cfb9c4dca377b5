"""Losses and gradients of all members at once."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import can_look, inside_transform
from hfta_func._tree import difference, leaves, paths, per_model, tree_map
from hfta_func._types import Params, Tree
from hfta_func.calls.recompute import Recalls
from hfta_func.calls.scan import alike
from hfta_func.errors import LossError
from hfta_func.models.functional import tables_with_max_norm
from hfta_func.models.scalar_attributes import emptied, filled
from hfta_func.models.sizes import joined
from hfta_func.rules._advice import advice
from hfta_func.step.batch import as_metrics, copied
from hfta_func.step.members import ArrayFunction, Tensors, num_positional
from hfta_func.step.options import Options
from hfta_func.step.state import Carried, TrainState, expanded_shared, shared_params
from hfta_func.verify import Trial

# Negative, as all numbers are that this package folds into the keys of a state: the others are left to the users.
NOISE = -(2**62)

_handed: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The numbers of optimizers when :func:`from_torch` was given them, without schedulers."""

_REPORTED = ("loss", "finite", "failure", "loss_scale", "failed_step")


class StepOutputs(NamedTuple):
    """What a step computes of every member before anything is changed."""

    params: Params  # the trained ones that the gradients belong to, where the update starts from
    grads: Params
    losses: Tensor
    metrics: Params  # what the loss function reports
    buffers: Params  # those after the forward pass
    shared: Params  # the gradients of what members share, each member's ``[M, ...]``


def are_sums(outputs: StepOutputs) -> bool:
    """Whether the gradients of what members share are their sums ``[1, ...]`` instead, as no member is to be left out."""
    return any([len(leaf) < len(outputs.losses) for leaf in outputs.shared.values()])


class Gradients(ArrayFunction):
    """``gradients(state, batch) -> StepOutputs``; writes nothing that the caller holds."""

    def __init__(self, model: nn.Module, outline: nn.Module, loss_fn: Any, trainable: frozenset[str], options: Options):
        self.carried = optree.tree_unflatten(optree.tree_structure(options.carry), paths(options.carry, "carry"))  # pyright: ignore
        """What members carry, by the names under which the loss reports it."""
        if leaves(options.carry):
            loss_fn, options = carrying(loss_fn, self.carried), replace(options, batch_dims=(options.batch_dims, 0))
        super().__init__(model, outline, loss_fn, options, checkpoint=options.checkpoint, renorms=True)
        # A look-up table with max_norm shortens rows in place before it reads them: in a copy, where the update starts from.
        self.rewrites_params = bool(tables_with_max_norm(model))
        self._trainable = trainable
        self._template, self._settings = weakref.ref(model), _settings(model)

    def warn_if_changed(self) -> None:
        """Warn if the model, or an optimizer that was handed over, has been changed since, which no step sees."""
        for optimizer, before in [*_handed.items()]:
            _handed[optimizer] = now = _numbers(optimizer)
            for name in _changed(before, now)[:1]:
                change = f"from {before.get(name)} to {now.get(name)}"
                why = f"the {name} of an optimizer that from_torch was given has changed {change}"
                cure = "which has no effect on the array; use with_hyperparams, or pass from_torch a scheduler"
                warnings.warn(f"{why}, {cure}", stacklevel=3)
        before, model = self._settings, self._template()
        self._settings = before if model is None else _settings(model)
        # Counters go on in the model.
        counted = {f"'{path}'" for path in self._bound.assigned_paths}
        for name in [name for name in _changed(before, self._settings) if name in before and name not in counted][:1]:
            why = f"the model was changed after make_train_step ({name}), which has no effect on the step"
            cure = "make another step of the model and go on with its step.init(state.params, state.buffers, seeds=...)"
            if type(self._settings.get(name)) in (int, float):
                cure = f"begin with step.init(..., hparams={{{name}: ...}}) and change it by with_hyperparams"
            warnings.warn(f"{why}; {cure}", stacklevel=3)

    def __call__(self, state: TrainState, batch: Tree) -> StepOutputs:
        """Losses, gradients, metrics and buffers of every member."""
        batch = self.with_carry(state, batch)
        given, shared, summed = self.tensors(state), shared_params(state), False
        grads, apart, others = cast("tuple[Params, Params, Any]", ({}, {}, ()))
        if shared and can_look(given.keys) and self.options.scaling is None and bool(state.active.all()):
            without_shared = given._replace(trained=_without(given.trained, shared))
            sums, grads, *others = self.compute(without_shared, batch, shared, adds=True)
            apart = {path: total[None] for path, total in sums.items()}
            # A sum does not tell whose part is not finite.
            every = torch.stack([leaf.sum() for leaf in (others[0], *grads.values(), *sums.values())])
            summed = bool(every.isfinite().all())
        if not summed:
            grads, *others = self.compute(given, batch, {})
            grads = _unscaled(grads, given.scale)
            apart = {path: grads.pop(path) for path in shared}
        (losses, metrics, buffers), trained = others, _without(given.trained, shared)
        buffers = emptied(buffers, state.hparams, state.buffers)
        return StepOutputs(trained, grads, losses, metrics, buffers, apart)

    def check(self, trial: Trial | None, state: TrainState, batch: Tree, outputs: StepOutputs) -> None:
        """Raise a VerifyError if members alone compute something else, in a call that is compared."""
        if trial is not None:
            self.warn_if_changed()
            given, batch = self.tensors(state), self.with_carry(state, batch)
            # Numbers of the members' own are in the state's hyperparameters, not in its buffers.
            buffers = {path: leaf for path, leaf in outputs.buffers.items() if path not in state.hparams}
            grads = outputs.grads if are_sums(outputs) else outputs.grads | outputs.shared
            after = given._replace(scale=(), trained=outputs.params)
            results = self._results((grads, outputs.losses, outputs.metrics, buffers), after, {})
            self.compare(trial, given, batch, {}, results)

    def with_carry(self, state: TrainState, batch: Tree) -> Tree:
        """What the loss is called with: a batch, and what members carry, if they do."""
        return (batch, state.carry.now) if isinstance(state.carry, Carried) and leaves(self.carried) else batch

    def tensors(self, state: TrainState) -> Tensors:
        """What members run with, each with the parameters that all share as its own."""
        params = copied(state.params) if self.rewrites_params else state.params
        trained = {path: param for path, param in params.items() if path in self._trainable}
        keys = random.fold_in(state.keys, state.step + NOISE)
        scale = () if self.options.scaling is None else state.loss_scale.scale
        frozen, buffers = _without(params, trained), filled(state.buffers, state.hparams)
        return Tensors(keys, trained | expanded_shared(state), frozen, buffers, state.hparams, scale)

    def _run(self, batch: Tree, given: Tensors, tree: Tree, common: Params, judged: bool = False) -> Any:
        # One copy, whose gradient is the sum over members.
        together = {path: leaf for path, leaf in common.items() if path not in self.base}

        def total(trained: Params) -> tuple[Tensor, Any]:
            once = common | {path: trained[path] for path in together}
            without_shared = given._replace(trained=_without(trained, together))
            losses, metrics, buffers = self._mapped(batch, without_shared, tree, once, _with_buffers, judged)
            # Members are independent, so the gradient of the sum holds each member's own gradient.
            scaled = losses * given.scale if isinstance(given.scale, Tensor) else losses
            return scaled.sum(), (losses, metrics, buffers)

        grads, aux = grad_and_aux(given.trained | together, total, self.options.save == "less")
        if together:
            return {path: grads[path] for path in together}, _without(grads, together), *aux
        return grads, *aux

    def _read(self, result: Any) -> tuple[Any, dict[str, Params]]:
        loss, metrics = check_result(result)
        return loss, {"loss": {"": loss.detach()}, "metric": tree_map(Tensor.detach, metrics)}

    def _results(self, outputs: Any, given: Tensors, common: Params) -> dict[str, Params]:
        grads, losses, metrics, after = outputs
        results = {"loss": {"": losses}, "metric": metrics, "buffer": after, "gradient": _unscaled(grads, given.scale)}
        return results | ({"parameter": given.trained} if self.rewrites_params else {})


def carrying(loss_fn: Callable[..., Any], names: Tree) -> Callable[..., Any]:
    """A loss of pairs of a batch and a carry, which reports the next carry by ``names`` beside its metrics."""

    def call(model: nn.Module, pair: Any, *hparams: Any) -> Any:
        result, carry = loss_fn(model, pair[0], *hparams, pair[1]), pair[1]
        loss, after, *metrics = result
        owners = "the state", "what the loss returns"
        if torch.compiler.is_compiling() or difference(after, carry, "carry", *owners) is None:
            # In mixed precision, what is computed has fewer bits than what is kept.
            after = tree_map(lambda new, old: new.detach().to(old.dtype), after, carry)
        alike(carry, "carry", owners, LossError)(after)
        reported = dict(*metrics)
        tree_map(reported.__setitem__, names, after)
        return loss, reported

    return call if num_positional(loss_fn) < 4 else lambda model, pair, hparams: call(model, pair, hparams)


def handed(optimizers: Iterable[Any], schedulers: Any) -> list[Any]:
    """Optimizers that an array is made from; if their numbers change later, steps say that this comes too late."""
    optimizers = list(optimizers)
    _handed.update({each: _numbers(each) for each in optimizers} if schedulers is None else {})
    return optimizers


def _numbers(optimizer: Any) -> dict[str, Any]:
    groups = getattr(optimizer, "param_groups", ())
    names = groups[0].keys() - {"params", "initial_lr"} if groups else ()
    rows = {name: [group.get(name) for group in groups] for name in sorted(names)}
    return {name: [x.tolist() if isinstance(x, Tensor) else x for x in row] for name, row in rows.items()}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in before | now if before.get(name) != now.get(name)]


def _settings(model: nn.Module) -> dict[str, Any]:
    """What a step takes from a model when it is made."""
    settings: dict[str, Any] = {f"requires_grad of '{path}'": x.requires_grad for path, x in model.named_parameters()}
    for path, module in model.named_modules():
        name = f"train or eval mode, or hooks, of '{path or type(module).__name__}'"
        settings[name] = module.training, *module._forward_hooks, *module._forward_pre_hooks
        # Such as the rate of a dropout, or a temperature that a script lowers.
        values = {name: x for name, x in vars(module).items() if name != "training" and name[0] != "_"}
        settings |= {f"'{joined(path, name)}'": x for name, x in values.items() if isinstance(x, float | int | str)}
    return settings


def _with_buffers(result: Any, buffers: Params) -> tuple[Tensor, Params, Params]:
    return *check_result(result), buffers


def _unscaled(grads: Params, scale: Any) -> Params:
    if not isinstance(scale, Tensor):
        return grads
    inverse = scale.double().reciprocal()
    return {path: grad * per_model(inverse, grad) for path, grad in grads.items()}


def _without(params: Params, others: Params) -> Params:
    return {path: param for path, param in params.items() if path not in others}


def grad_and_aux(params: Params, run: Callable[[Params], tuple[Tensor, Any]], less: bool = False) -> tuple[Params, Any]:
    """Gradient of the first result, and the second result; ``less`` keeps less for the backward pass.

    The gradient is taken outside ``vmap``, so that the backward pass is autograd's own on the lowered operators. Eagerly
    that is plain autograd, which is faster than ``torch.func.grad``; compiler and outer transforms know only the latter.
    """
    if torch.compiler.is_compiling() or inside_transform():
        return torch.func.grad(run, has_aux=True)(params)
    leaves = {path: param.detach().requires_grad_() for path, param in params.items()}
    with torch.enable_grad(), Recalls()() if less else contextlib.nullcontext():
        value, aux = run(leaves)
    try:
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise advice(error) or error from error.__cause__
    # The backward pass of an autograd function may have called autograd itself, which adds to ``.grad``.
    pairs = zip(leaves.items(), grads, strict=True)
    parts = {path: [x for x in (grad, leaf.grad) if x is not None] for (path, leaf), grad in pairs}
    if not any(parts.values()):
        raise LossError("the loss depends on no parameter of the model that it is given; compute it from model(...)")
    result = {path: sum(both[1:], both[0]) if both else torch.zeros_like(leaves[path]) for path, both in parts.items()}
    return result, tree_map(torch.Tensor.detach, aux)


def check_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of one model; raises a LossError unless they are a scalar and a dict of tensors and numbers."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not (isinstance(loss, Tensor) and isinstance(metrics, Mapping)):
        kinds = ", ".join(type(part).__qualname__ for part in (result if isinstance(result, tuple) else [result]))
        raise LossError(f"the loss function returned {kinds}; return the loss, or the loss and a dict of metrics")
    if loss.dim() != 0:
        raise LossError(f"the loss of one model has shape {list(loss.shape)}; reduce it to a scalar, e.g. with .mean()")
    if hidden := [name for name in _REPORTED if name in metrics]:
        raise LossError(f"metric '{hidden[0]}' hides what the step reports; name it none of {', '.join(_REPORTED)}")
    return loss, as_metrics(metrics)
