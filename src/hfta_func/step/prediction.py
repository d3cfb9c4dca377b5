"""What the members of an array predict, alone and together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hfta_func._tree import leaves, paths, tree_map
from hfta_func._types import Params, Tree
from hfta_func.errors import BatchError
from hfta_func.models.stack import Stacked
from hfta_func.step.batch import apart, check_batch, plain, together
from hfta_func.step.evaluate import EvalStep
from hfta_func.step.members import ArrayFunction, Tensors
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, shared_params
from hfta_func.verify import Verify


class Prediction:
    """The members' outputs on N samples, and what they say together.

    Args:
        outputs: ``[M, N, ...]``; for classifiers, scores (logits) ``[M, N, C]``.

    Example:
        >>> prediction = Prediction(torch.tensor([[[0.0, 9.0], [9.0, 0.0]], [[0.0, 9.0], [0.0, 9.0]]]))
        >>> prediction.probabilities.argmax(-1), prediction.disagreement
        (tensor([1, 0]), tensor([0., 1.]))
    """

    def __init__(self, outputs: Tensor):
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"Prediction(outputs={list(self.outputs.shape)})"

    @property
    def mean(self) -> Tensor:
        """The mean over members, ``[N, ...]``."""
        return self.outputs.mean(0)

    @property
    def std(self) -> Tensor:
        """The standard deviation over members, ``[N, ...]``, with M - 1 in its denominator; 0 for one member."""
        return self.outputs.std(0, correction=min(1, len(self.outputs) - 1))

    def quantiles(self, levels: float | Sequence[float]) -> Tensor:
        """Quantiles over members, interpolated linearly; NaN where any member predicts NaN, as the mean.

        Args:
            levels: One number from 0 to 1, or several.

        Returns:
            ``[N, ...]``, or ``[levels, N, ...]`` for several.
        """
        # PyTorch has quantiles in single and double precision.
        values = self.outputs.to(torch.promote_types(self.outputs.dtype, torch.float32))
        at = torch.as_tensor(levels, dtype=values.dtype, device=values.device)
        return values.quantile(at, dim=0).to(self.outputs.dtype)

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities ``[N, C]``: the mean over members of the softmax over the last axis."""
        return self.scores.softmax(-1).mean(0)

    @property
    def entropy(self) -> Tensor:
        """The entropy of :attr:`probabilities` in nats, ``[N]``: all that the members do not know together."""
        return torch.special.entr(self.probabilities).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """The part of :attr:`entropy` in nats that comes from differences between members, ``[N]``."""
        return self.entropy - torch.special.entr(self.scores.softmax(-1)).sum(-1).mean(0)

    @property
    def disagreement(self) -> Tensor:
        """The share of pairs of different members that put a sample into different classes, ``[N]``; 0 for one member."""
        scores = self.scores
        count = len(scores)
        votes = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).sum(0)
        same = (votes * (votes - 1)).sum(-1).to(scores.dtype)
        return 1 - same / (count * (count - 1)) if count > 1 else torch.zeros_like(same)

    @property
    def scores(self) -> Tensor:
        """The outputs of classifiers, ``[M, N, C]``."""
        if self.outputs.dim() < 3 or self.outputs.shape[-1] < 2:
            raise ValueError(f"outputs are {list(self.outputs.shape)}; scores are [M, N, C] of two classes or more")
        return self.outputs


class Deployed(nn.Module):
    """The mean and the deviation over members as one module, made by :meth:`Ensemble.deploy`."""

    def __init__(self, ensemble: nn.Module, outputs: str):
        super().__init__()
        self.ensemble, self.outputs = ensemble.eval().requires_grad_(False), outputs

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation over members, ``[N, ...]``."""
        prediction = Prediction(_one_tensor(self.ensemble(*args, **kwargs)))
        if self.outputs == "probabilities":
            prediction = Prediction(prediction.scores.softmax(-1))
        return prediction.mean, prediction.std

    def export(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        """A program for batches of any number of rows, which runs without this package.

        Args:
            args: An example of the arguments; the first axis of every tensor is the rows.
            kwargs: Further arguments by name.

        Returns:
            The program, for ``torch.export.save`` or ``torch.onnx.export``.
        """

        def rows(leaf: Any) -> Any:
            # PyTorch makes programs of an example of one row for one row only.
            return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf

        def dynamic(leaf: Any) -> Any:
            return {0: torch.export.Dim.DYNAMIC} if isinstance(leaf, Tensor) and leaf.dim() else None

        args, kwargs = tree_map(rows, (args, kwargs))
        # Refuses what no array can do in its words, and finds out what true sizes padded members have in it.
        self(*args, **kwargs)
        shapes = tree_map(dynamic, {"args": args, **({"kwargs": kwargs} if kwargs else {})})
        with warnings.catch_warnings():
            # PyTorch warns of what it calls itself.
            warnings.simplefilter("ignore", FutureWarning)
            # Batching rules become operators of PyTorch, which need no package.
            return torch.export.export(self, args, kwargs, dynamic_shapes=shapes).run_decompositions({})


def _one_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    why = f"the model returns a {type(output).__qualname__}, and predictions are of one tensor [N, ...]"
    cure = "wrap it in a module that returns the one to predict; an Ensemble and make_eval_step return all of them"
    raise BatchError(f"{why}; {cure}")


def gather(run: Callable[..., Any], batches: Any, inputs: Callable[[Any], Any] | None) -> Prediction:
    """Call ``run`` on each batch and join the outputs ``[M, N, ...]``; see :meth:`Ensemble.predict` for the others."""
    if not hasattr(batches, "__iter__") and isinstance(batches, Dataset):
        cure = "pass a DataLoader of it, or a tensor of its rows"
        raise BatchError(f"a {type(batches).__qualname__} has no batches; {cure}")
    batches, parts = batches if inputs is None else map(inputs, batches), []
    for batch in [batches] if isinstance(batches, Tensor | Mapping) else batches:
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        try:
            parts.append(_one_tensor(run(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)))
        except TypeError as error:
            if "argument" not in str(error):
                raise
            cure = "of a loader for training, which has targets, too, pass inputs=lambda batch: batch[0]"
            raise BatchError(f"the model does not take a batch: {error}; {cure}") from error
    return Prediction(torch.cat(parts, dim=1))


def predict(
    model: nn.Module,
    state: TrainState | Stacked,
    batches: Any,
    *,
    batch_dims: Tree = None,
    inputs: Callable[[Any], Any] | None = None,
    share_frozen: bool = False,
    verify: Verify = True,
) -> Prediction:
    """What all members of an array predict, in eval mode and without gradients.

    Args:
        model: Any module of the architecture.
        state: A :class:`TrainState`, or what :func:`stack_params` returns.
        batches: One tensor ``[N, ...]``, or an iterable of batches, see :meth:`Ensemble.predict`.
        batch_dims: None if all members share the batches, 0 if every tensor is ``[M, N, ...]``, see :meth:`Ensemble.forward`.
        inputs: What the model is called with, of each batch of a loader for training: ``inputs=lambda batch: batch[0]``.
        share_frozen: The array was stacked with ``share_frozen=True``, and all members share the base of ``model``.
        verify: Whether to compare with members alone, as for :func:`make_train_step`.

    Raises:
        StateError: if the state does not belong to the model.
        BatchError: if there is no batch, or a member returns anything but one tensor ``[N, ...]``.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> predict(models[0], stack_params(models), torch.randn(8, 4)).mean.shape
        torch.Size([8, 1])
    """
    options = {"share_frozen": share_frozen, "shared_params": [*shared_params(state)], "verify": verify}
    # A batch is the arguments by position and those by name.
    dims = (tuple(batch_dims), None) if isinstance(batch_dims, tuple | list) else batch_dims
    evaluate = EvalStep(model, _output, Options(dims, **options), type(model).forward)
    return gather(lambda *args, **kwargs: evaluate(state, (args, kwargs))["output"], batches, inputs)


def _call(model: nn.Module, batch: Any) -> Any:
    return model(*batch[0], **batch[1])


def _output(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"output": _one_tensor(_call(model, batch))}


class Predicting(ArrayFunction):
    """The outputs of all members of an array.

    Args:
        model: A module of the architecture, in the modes in which members run.
        training: Train or eval mode; None keeps those of the model.
        share_frozen: All members share the base of the model.
        verify: See :func:`make_train_step`.
    """

    keeps = True
    _rest: Any = ()

    def __init__(self, model: nn.Module, training: bool | None, share_frozen: bool, verify: Verify):
        self.training = training
        options = Options(share_frozen=share_frozen, verify=verify)
        super().__init__(model, model, _call, options, held=type(model).forward)
        # Nothing but what is common.
        self.base = {}

    def __call__(
        self, stacked: Stacked, common: tuple[Params, Params], keys: Tensor, args: Any, kwargs: Any, batch_dims: Tree
    ) -> tuple[Any, Params]:
        """The outputs and new buffers of all members, which share the parameters and the base in ``common``."""
        batch_dims = tuple(batch_dims) if isinstance(batch_dims, list) else batch_dims
        dims = {"args": batch_dims, "kwargs": None if isinstance(batch_dims, tuple) else batch_dims}
        # What is no tensor belongs to all members.
        parts = tree_map(lambda x: x if isinstance(x, Tensor) else None, plain({"args": args, "kwargs": kwargs}))
        check_batch(dims, parts, keys.shape[0], "the input")
        differs = {path for path, leaf in stacked.params.items() if leaf.requires_grad and torch.is_grad_enabled()}
        trained, frozen = ({k: x for k, x in stacked.params.items() if (k in differs) == on} for on in (True, False))
        given = Tensors(keys, trained, frozen, stacked.buffers, {})
        # A batch is the arguments by position, those by name, and which of them belong to members.
        outputs, buffers = self.called(given, (args, kwargs, batch_dims), *common)
        return together(outputs, self._rest), buffers

    def dims_of(self, batch: Any) -> Tree:
        """See :class:`ArrayFunction`."""
        dims = batch[2]
        return (dims, None, None) if isinstance(dims, tuple) else dims

    def _run(self, batch: Tree, given: Tensors, tree: Tree, common: Params, judged: bool = False) -> Any:
        def tensors(output: Any, buffers: Params) -> Any:
            output, self._rest = apart(output)
            return output, buffers

        return self._mapped(batch, given, tree, common, tensors)

    def _read(self, result: Any) -> tuple[Any, dict[str, Params]]:
        outputs = _named(result)
        return _weighted(outputs), {"output": tree_map(Tensor.detach, outputs)}

    def _results(self, outputs: Any, given: Tensors, common: Params) -> dict[str, Params]:
        results = {"output": _named(together(outputs[0], self._rest)), "buffer": outputs[1]}
        value = _weighted(results["output"], len(given.keys))
        if given.trained and value.requires_grad:
            grads = torch.autograd.grad(value, [*given.trained.values()], materialize_grads=True)
            results["gradient"] = dict(zip(given.trained, grads, strict=True))
        return tree_map(Tensor.detach, results)


def _named(outputs: Any) -> Params:
    tree = plain(outputs)
    return {path: leaf for path, leaf in zip(paths(tree, ""), leaves(tree), strict=True) if isinstance(leaf, Tensor)}


def _weighted(outputs: Params, *count: int) -> Tensor:
    """A number that depends on all entries of outputs, of one model or of several."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in outputs.values():
        if leaf.is_floating_point():
            size = leaf.shape[len(count) :]
            weights = torch.arange(size.numel(), dtype=leaf.dtype, device=leaf.device).cos().reshape(size)
            total = total.to(leaf.device) + (leaf * weights).sum()
    return total
