"""A classifier and a regressor of scikit-learn whose models train as one array."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func._types import require
from hfta_func.errors import HyperparameterError

_MODULES = "base", "metrics", "utils.multiclass", "utils.validation"
numpy = require("numpy", "sklearn")
base, metrics, multiclass, validation = (require(f"sklearn.{name}", "sklearn") for name in _MODULES)

# Negative, to differ from what a loader draws by the same keys.
_HOLD_OUT = -(2**61) - 4
_ROWS = 4096


Fitted = tuple[nn.Module, hfta.models.Stacked, hfta.run.History]
"""Any module of an array, its trained members, and their history."""


def perceptron(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The default model: one hidden layer of 64."""
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 64), nn.ReLU(), nn.Linear(64, outputs))


@dataclasses.dataclass(eq=False, repr=False)
class ArrayEstimator(base.BaseEstimator):
    """What classifier and regressor share; scikit-learn reads parameters from the signature that the fields make."""

    make_model: Callable[..., nn.Module] | None = None
    _: dataclasses.KW_ONLY
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    optimizer: Callable[..., Any] = hfta.adam
    lr: float = 1e-2
    weight_decay: float = 0.0
    epochs: int = 30
    batches_per_epoch: int = 10
    batch_size: int = 32
    patience: int | None = None
    hold_out: float = 0.2
    model_params: Mapping[str, Any] | None = None
    random_state: Any = 0
    device: torch.device | str = "cpu"

    _default_loss: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    _metric: ClassVar[Callable[..., float]]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Any:
        """Train one model, or one per group.

        Args:
            X: Samples ``[n, ...]``, such as a table or windows of signals.
            y: A label or number for each; for the regressor also several, ``[n, outputs]``.
            groups: The group of each, such as a person; None makes one model.
            sample_weight: The weight of each in the loss, ``[n]``: the loss of a batch, also of rows held out, is
                ``sum(weight * loss) / sum(weight)`` over its rows, as of ``MLPClassifier``.

        Returns:
            The estimator.

        Raises:
            ValueError: if a shape or value does not fit, as everywhere in scikit-learn.
        """
        inputs, targets = self._learn_classes(X, y)
        names = numpy.zeros(len(inputs)) if groups is None else _column(groups, inputs)
        self.groups_, which = numpy.unique(names, return_inverse=True)
        rows = [torch.tensor(which == group).nonzero().flatten() for group in range(len(self.groups_))]
        ((_, fitted),) = train([self] * len(rows), (inputs, targets, *weights_of(sample_weight, inputs)), rows)
        self._is_grouped = groups is not None
        self.model_, self.params_, self.history_ = fitted
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """The share of labels predicted, or the coefficient of determination."""
        return self._metric(y, self.predict(X, groups), sample_weight=sample_weight)

    def models(self) -> list[nn.Module]:
        """The models in the order of ``groups_``, as ordinary modules."""
        validation.check_is_fitted(self, "params_")
        return hfta.unstack_params(self.model_, *self.params_)

    predict: ClassVar[Callable[..., Any]]
    _learn_classes: ClassVar[Callable[[Any, Any], tuple[Tensor, Tensor]]]
    """Checked samples and targets as tensors; sets the classes and the number of outputs."""

    def _scores(self, X: Any, groups: Any, finish: Callable[[Tensor], Tensor]) -> Any:
        """What the model of each sample's group makes of it, or the mean over all models, as an array."""
        validation.check_is_fitted(self, "params_")
        X = validation.validate_data(self, X, reset=False, allow_nd=True)
        inputs = torch.tensor(numpy.ascontiguousarray(X)).to(self.device, next(self.model_.parameters()).dtype)
        if groups is None or not self._is_grouped:
            outputs = hfta.predict(self.model_, self.params_, inputs.split(_ROWS)).outputs
            return finish(outputs).mean(0).cpu().numpy()
        names = _column(groups, inputs)
        unknown = sorted({*names.tolist()} - {*self.groups_.tolist()})
        if unknown:
            cure = "fit with its rows, or predict without groups, which takes the mean of all models"
            raise HyperparameterError(f"group {unknown[0]!r} has no model, {self.groups_.tolist()} have; {cure}")
        # All groups at once: shorter ones repeat their first row.
        present, which = numpy.unique(names, return_inverse=True)
        order, counts = torch.tensor(which.argsort(kind="stable")), torch.tensor(numpy.bincount(which))
        at = torch.arange(int(counts.max())).expand(len(counts), -1)
        rows = order[torch.where(at < counts[:, None], at, 0) + (counts.cumsum(0) - counts)[:, None]].to(inputs.device)
        members = hfta.take(self.params_, numpy.searchsorted(self.groups_, present).tolist())
        parts = (inputs[part] for part in rows.split(max(1, _ROWS // len(counts)), 1))
        outputs = finish(hfta.predict(self.model_, members, parts, batch_dims=0).outputs)
        known = (at < counts[:, None]).to(inputs.device)
        result = torch.empty_like(outputs[known])
        result[rows[known]] = outputs[known]
        return result.cpu().numpy()


class ArrayClassifier(base.ClassifierMixin, ArrayEstimator):
    """A classifier, or one per group, whose models train as one array.

    The model of a group is the one that a fit on the group's rows alone would give.

    Args:
        make_model: ``make_model(shape, outputs, **model_params)`` makes a module, for samples of a shape and a number of
            classes; by default one hidden layer of 64 units.
        loss: ``loss(outputs, targets)``; by default the cross entropy. With sample weights it also takes
            ``reduction="none"``, as those of ``torch.nn.functional`` do.
        optimizer: A function such as :func:`hfta_func.adam` that takes ``lr``, and ``weight_decay`` unless that is 0.
        lr: Learning rate.
        weight_decay: Weight decay.
        epochs: Number of epochs.
        batches_per_epoch: Batches in an epoch, whatever the number of rows.
        batch_size: Rows of a batch.
        patience: Epochs without improvement of the held-out loss after which a model stops, as of its best epoch; None
            trains all epochs on all rows.
        hold_out: With ``patience``, the share of each model's rows that are held out.
        model_params: Further arguments of ``make_model`` by name.
        random_state: Seed of all models.
        device: Where to train and predict.

    Attributes:
        classes_: The labels; all models know all of them.
        groups_: The groups, in the order of the members.
        model_: A module of the architecture.
        params_: What :func:`hfta_func.stack_params` makes of the members.
        history_: The :class:`hfta_func.run.History`.

    Example:
        >>> x = torch.randn(90, 4)
        >>> y = (x[:, 0] > 0).long()
        >>> persons = torch.arange(90) % 3
        >>> classifier = ArrayClassifier(epochs=3).fit(x, y, groups=persons)
        >>> classifier.predict_proba(x[:5], groups=persons[:5]).shape, len(classifier.models())
        ((5, 2), 3)
    """

    _default_loss = staticmethod(nn.functional.cross_entropy)
    _metric = staticmethod(metrics.accuracy_score)
    score = ArrayEstimator.score

    def _learn_classes(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y = validation.validate_data(self, X, y, allow_nd=True)
        multiclass.check_classification_targets(y)
        self.classes_, targets = numpy.unique(y, return_inverse=True)
        self._outputs = len(self.classes_)
        return torch.tensor(numpy.ascontiguousarray(X)), torch.tensor(targets)

    def predict_proba(self, X: Any, groups: Any = None) -> Any:
        """The probabilities ``[n, classes]`` by the models of groups; without groups, their mean over all models."""
        return self._scores(X, groups, lambda outputs: outputs.double().softmax(-1))

    def predict(self, X: Any, groups: Any = None) -> Any:
        """The most probable labels ``[n]``, see :meth:`predict_proba`."""
        best = self.predict_proba(X, groups).argmax(1)
        return self.classes_[best]


class ArrayRegressor(base.RegressorMixin, ArrayEstimator):
    """A regressor, or one per group, whose models train as one array; arguments and attributes are those of the classifier.

    ``outputs`` of ``make_model`` is the number of targets, and the loss the mean squared error.

    Example:
        >>> x = torch.randn(60, 4)
        >>> ArrayRegressor(epochs=3).fit(x, x.sum(1)).predict(x).shape
        (60,)
    """

    _default_loss = staticmethod(nn.functional.mse_loss)
    _metric = staticmethod(metrics.r2_score)
    score = ArrayEstimator.score

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _learn_classes(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y = validation.validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)
        self._outputs, self._is_single = 1 if y.ndim == 1 else y.shape[1], y.ndim == 1
        # Of text, a ValueError names what is no number.
        y = y if y.dtype.kind in "biuf" else y.astype(float)
        return torch.tensor(numpy.ascontiguousarray(X)), torch.tensor(y.reshape(len(y), -1))

    def predict(self, X: Any, groups: Any = None) -> Any:
        """The numbers ``[n]`` or ``[n, outputs]`` by the models of groups; without groups, their mean over all models."""
        values = self._scores(X, groups, Tensor.double)
        return values[:, 0] if self._is_single else values


def _column(values: Any, samples: Any) -> Any:
    """A name per sample; a ValueError for another shape, or a name that is missing."""
    column = validation.column_or_1d(validation.check_array(values, ensure_2d=False, dtype=None))
    validation.check_consistent_length(samples, column)
    return column


def weights_of(sample_weight: Any, samples: Any) -> list[Tensor]:
    """The checked weights as a tensor, none for None."""
    if sample_weight is None:
        return []
    weights = torch.tensor(_column(sample_weight, samples).astype(float))
    if weights.min() < 0:
        place = int(weights.argmin())
        raise HyperparameterError(f"sample_weight[{place}] is {weights[place]:g}; give weights that are not negative")
    return [weights]


def train(
    estimators: Sequence[Any], data: tuple[Tensor, ...], rows: Sequence[Tensor]
) -> list[tuple[list[int], Fitted]]:
    """Train a member for each estimator on its rows, in as few arrays as their settings allow.

    Args:
        estimators: One for each member.
        data: Samples, targets and, if there are any, weights.
        rows: Row numbers of each member.

    Returns:
        For each array the places of its members, and the array.
    """
    arrays: dict[str, list[int]] = {}
    for place, estimator in enumerate(estimators):
        settings = estimator.get_params(deep=False) | dict.fromkeys(("lr", "weight_decay", "random_state"))
        params = (estimator.model_params or {}).items()
        settings["model_params"] = {name: "a float" if isinstance(value, float) else value for name, value in params}
        arrays.setdefault(repr(settings), []).append(place)
    return [(places, _train_array(places, estimators, data, rows)) for places in arrays.values()]


def _train_array(
    places: list[int], estimators: Sequence[Any], data: tuple[Tensor, ...], rows: Sequence[Tensor]
) -> Fitted:
    estimators, rows = [estimators[place] for place in places], [rows[place] for place in places]
    first, (inputs, targets, *weights) = estimators[0], data
    loss, outputs = first.loss or first._default_loss, first._outputs
    make_model = functools.partial(first.make_model or perceptron, tuple(inputs.shape[1:]), outputs)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if len(batch) == 2:
            return loss(model(batch[0]), batch[1])
        weight = batch[2]
        losses = loss(model(batch[0]), batch[1], reduction="none").reshape(len(weight), -1).mean(1)
        # A batch without any weight has loss 0.
        return (weight * losses).sum() / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)

    if weights and "reduction" not in inspect.signature(loss).parameters:
        cure = 'give a function with one, as of torch.nn.functional, that returns a loss per row for reduction="none"'
        raise HyperparameterError(f"sample_weight needs a loss with an argument reduction, {loss!r} has none; {cure}")

    seeds = [_seed(estimator.random_state) for estimator in estimators]
    rows_of = [{**(one.model_params or {}), "lr": one.lr, "weight_decay": one.weight_decay} for one in estimators]
    columns: dict[str, Any] = {name: [row[name] for row in rows_of] for name in rows_of[0]}
    if not any(columns["weight_decay"]):
        del columns["weight_decay"]
    experiment = hfta.Experiment(make_model, loss_fn, first.optimizer, seeds=seeds, **columns)
    dtype = next(experiment.model.parameters(), inputs).dtype
    inputs = inputs.to(first.device, dtype)
    targets = targets.to(first.device, dtype if targets.is_floating_point() else targets.dtype)
    weights = [weight.to(first.device, dtype) for weight in weights]
    _check_outputs(experiment.model, inputs[:2], outputs)
    options: dict[str, Any] = {}
    if first.patience is not None:
        rows, held_out = zip(*(_held_out(*each, first.hold_out) for each in zip(rows, seeds, strict=True)), strict=True)
        options = {"evaluate": (experiment.metric, (inputs, targets, *weights), held_out), "restore_best": "val_loss"}
        options |= {"compact": True, "callbacks": [hfta.callbacks.early_stopping("val_loss", first.patience)]}
    for member, each in enumerate([*rows, *options.get("evaluate", [()])[-1]] if weights else []):
        if not weights[0][each.to(first.device)].any():
            text = f"model {member % len(rows)}: sample_weight is zero for all rows that it trains on or is stopped by"
            raise HyperparameterError(f"{text}; give one of them a weight, or leave its rows out")
    options |= dict(epochs=first.epochs, batches_per_epoch=first.batches_per_epoch, progress=False)
    experiment.fit((inputs, targets, *weights), first.batch_size, rows=rows, **options)
    params = hfta.models.Stacked(experiment.state.params, hfta.step.stacked(experiment.state).buffers)
    return experiment.model, params, experiment.history


def _seed(random_state: Any) -> int:
    """An integer as it is; else a number that scientists' generators draw, as everywhere in scikit-learn."""
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(require("sklearn.utils", "sklearn").check_random_state(random_state).randint(2**31 - 1))


def _held_out(rows: Tensor, seed: int, share: float) -> tuple[Tensor, Tensor]:
    """Rows to train on, and rows to stop by, drawn by the seed."""
    count = max(1, round(share * len(rows)))
    if not 0 < share < 1 or count >= len(rows):
        cure = "give a share between 0 and 1 that leaves each model rows to train on, or patience=None"
        raise HyperparameterError(f"hold_out is {share} of {len(rows)} rows; {cure}")
    rows = rows[hfta.random.permutation(hfta.random.fold_in(hfta.random.keys([seed]), _HOLD_OUT), len(rows))[0]]
    return rows[count:], rows[:count]


def _check_outputs(model: nn.Module, inputs: Tensor, outputs: int) -> None:
    """Raise a HyperparameterError unless a model returns ``[N, outputs]``."""
    with torch.no_grad():
        shape = [*copy.deepcopy(model).to(inputs.device).eval()(inputs).shape]
    if shape != [len(inputs), outputs]:
        text = f"the model returns {shape} for {len(inputs)} samples, not [{len(inputs)}, {outputs}]"
        raise HyperparameterError(f"{text}; let make_model(shape, outputs) use its second argument")
