"""Metrics of an array in eval mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import Compiled
from hfta_func._tree import leaves, num_models, tree_map
from hfta_func._types import Params, Tree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.models.scalar_attributes import filled
from hfta_func.models.skeleton import outline
from hfta_func.models.stack import Stacked, check_state, shapes
from hfta_func.step.batch import as_metrics, check_batch, plain
from hfta_func.step.members import ArrayFunction, Tensors
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, shared_params
from hfta_func.verify import Verify


def make_eval_step(
    model: nn.Module,
    metric_fn: Callable[..., Any],
    *,
    batch_dims: Tree = None,
    chunk_size: int | Literal["auto"] | None = None,
    autocast: torch.dtype | None = None,
    share_frozen: bool = False,
    shared_params: Sequence[str] = (),
    verify: Verify = True,
) -> EvalStep:
    """An evaluation step for arrays of ``model``, which it runs in eval mode and without gradients.

    Args:
        model: Any module of the architecture.
        metric_fn: ``metric_fn(model, batch)`` or ``metric_fn(model, batch, hparams)`` of ONE model: returns a tensor or a
            number, or a dict of these. ``hparams`` are those of a training state.
        batch_dims: None if all members share one batch ``[N, ...]``, 0 if every leaf is ``[M, N, ...]``, or a tree of these.
            The default is not that of :func:`make_train_step`.
        chunk_size: Members that run together, as for :func:`make_train_step`.
        autocast: Run in ``torch.bfloat16`` or ``torch.float16`` where ``torch.autocast`` does.
        share_frozen: The array was stacked with ``share_frozen=True``, and all members share the base of ``model``.
        shared_params: Those of the training step, whose state this one is then given.
        verify: Whether to compare with members alone, as for :func:`make_train_step`.

    Returns:
        ``evaluate(state, batch) -> dict[str, Tensor[M, ...]]``, where ``state`` is a :class:`TrainState` or what
        :func:`stack_params` returns. A single tensor is reported under the name of ``metric_fn``. Random calls draw from
        the members' keys, independently of training; without a training state all members draw the noise of seed 0.

    Raises:
        StackError: if ``model`` is not a module.
        ValueError: if an argument has an invalid value.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> def error(model, batch):
        ...     return (model(batch[0]) - batch[1]).abs().mean()
        >>> evaluate = make_eval_step(models[0], error)
        >>> evaluate(stack_params(models), (torch.randn(8, 4), torch.randn(8, 1)))["error"].shape
        torch.Size([3])
    """
    kept = {"share_frozen": share_frozen, "shared_params": shared_params, "verify": verify}
    return EvalStep(model, metric_fn, Options(batch_dims, chunk_size, autocast, **kept))


class EvalStep(ArrayFunction, Compiled):
    """``evaluate(state, batch) -> metrics``, a pure function; made by :func:`make_eval_step`."""

    training = False
    keeps = False

    def __init__(self, model: nn.Module, metric_fn: Callable[..., Any], options: Options, held: Any = None):
        self._made_from = outline(model, options.share_frozen, options.shared_params), metric_fn, options
        super().__init__(model, self._made_from[0], metric_fn, options, held)
        self._name = getattr(metric_fn, "__name__", "metric")
        self._shapes = shapes(model, options.share_frozen, options.shared_params)

    def __reduce__(self) -> Any:
        return EvalStep, self._made_from

    def __repr__(self) -> str:
        return f"EvalStep({self._name})"

    def that_keeps(self, batch_dims: Tree, trained: Any = None) -> EvalStep:
        """The same for batches with these ``batch_dims``, of which buffers are kept, and counters of a step that trains."""
        model, metric_fn, options = self._made_from
        step = EvalStep(model, metric_fn, dataclasses.replace(options, batch_dims=batch_dims))
        step.keeps = True
        if trained is not None:
            step.count_with(trained._gradients)
        return step

    def __call__(self, state: TrainState | Stacked, batch: Tree) -> dict[str, Tensor]:
        """The metrics of every member.

        Raises:
            StateError: if the state does not belong to this model, has no ``hparams`` where the metrics take them, or members
                write a buffer in eval mode from which a second call would compute something else.
            BatchError: if a leaf has no model axis where ``batch_dims`` is 0.
            LossError: if a metric is neither a tensor nor a number.
            VerifyError: if a member alone computes something else.
        """
        return self.with_buffers(state, batch)[0]

    @torch.no_grad()
    def with_buffers(self, state: TrainState | Stacked, batch: Tree) -> tuple[dict[str, Tensor], Params]:
        """The metrics of every member, and the buffers that the members have written; not those of another shape."""
        # A graph is compiled for the sizes of its inputs.
        if not torch.compiler.is_compiling():
            num_models((state.params, state.buffers))
        buffers = filled(state.buffers, state.hparams) if isinstance(state, TrainState) else state.buffers
        check_state((state.params, buffers), self._shapes)
        first, shared = leaves((state.params, state.buffers))[0], shared_params(state)
        check_batch(self.options.batch_dims, plain(batch), first.shape[0])
        if isinstance(state, TrainState):
            keys, hparams = random.fold_in(state.keys, ~state.step), state.hparams
        else:
            keys, hparams = torch.zeros(first.shape[0], dtype=torch.int64, device=first.device), {}
        metrics, new = self.called(Tensors(keys, {}, state.params, buffers, hparams), batch, shared, {})
        return metrics, {path: new[path] for path in self.written if new[path].shape == buffers[path].shape}

    def compute(self, given: Tensors, batch: Tree, common: Params, **how: Any) -> tuple[dict[str, Tensor], Params]:
        """See :class:`ArrayFunction`."""
        try:
            with torch.set_grad_enabled(self.takes_gradients):
                return tree_map(Tensor.detach, super().compute(given, batch, common, **how))
        except RuntimeError as error:
            if self.takes_gradients or "does not require grad" not in str(error):
                raise
            # Such as the residual of a differential equation; what others compute needs no graph.
            self.takes_gradients = True
            return self.compute(given, batch, common, **how)

    def _run(self, batch: Tree, given: Tensors, tree: Tree, common: Params, judged: bool = False) -> Any:
        if not (torch.compiler.is_compiling() or rehearsing.get() or given.keys.is_inference()):
            # As alone: metrics may take gradients, and autograd functions ask which of their inputs need one.
            trained, params = self._bound.trained, given.frozen
            params = {path: x.detach().requires_grad_() if path in trained else x for path, x in params.items()}
            given = given._replace(frozen=params)
        return self._mapped(batch, given, tree, common, lambda made, new: (self._read(made)[1]["metric"], new), judged)

    def _read(self, result: Any) -> tuple[Any, dict[str, Params]]:
        return None, {"metric": as_metrics(result if isinstance(result, dict) else {self._name: result})}

    def _results(self, outputs: Any, given: Tensors, common: Params) -> dict[str, Params]:
        return {"metric": outputs[0], "buffer": outputs[1]}
