"""One array from its factory, loss, optimizer, seeds and hyperparameters, each said once."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfta_func._tree import indices, take
from hfta_func._types import HyperparameterError, Shared
from hfta_func.models.scalar_attributes import is_pattern, numbers_of, numbers_text
from hfta_func.models.stack import build, init_params, unstack_params
from hfta_func.optim import GradientTransformation
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import is_batch, make_evaluation
from hfta_func.run.fit import fit
from hfta_func.run.history import History, Metrics, Mode
from hfta_func.step.gradients import num_positional
from hfta_func.step.prediction import Prediction, predict
from hfta_func.step.state import TrainState, stacked
from hfta_func.step.train import TrainStep, make_train_step

if TYPE_CHECKING:
    import pandas


def grid(*, seeds: int | Sequence[int] | Tensor = 1, **values: Sequence[Any] | Tensor) -> dict[str, list[Any]]:
    """All combinations of values, as columns with one value per member; the last name varies faster, and seeds fastest.

    Args:
        seeds: Number of seeds, or the seeds, which every combination has; the column ``seeds``.
        values: By name, the values to combine.

    Returns:
        The columns by name, for an :class:`Experiment`; or for optimizers, ``hparams`` and frames of your own.

    Raises:
        HyperparameterError: if a name has no list of values.

    Example:
        >>> grid(lr=[0.1, 0.2], seeds=2)
        {'lr': [0.1, 0.1, 0.2, 0.2], 'seeds': [0, 1, 0, 1]}
    """
    axes = {name: _column(axis) for name, axis in {**values, "seeds": _seeds(seeds)}.items()}
    for name, axis in axes.items():
        if not axis:
            raise HyperparameterError(
                f"{name} is {values.get(name, seeds)!r}; a grid needs a list with at least one value"
            )
    return {
        name: list(column)
        for name, column in zip(axes, zip(*itertools.product(*axes.values()), strict=True), strict=True)
    }


class Experiment:
    """An array with all that made it, which hands out the functional parts: ``step``, ``state``, ``history``.

    Args:
        make_model: Makes one model; hyperparameters with the names of its arguments are passed to it.
        loss_fn: The loss of ONE model, as of :func:`make_train_step`.
        optimizer: A function such as ``adam`` that takes hyperparameters by name, or what it returns.
        metric: A metric of ONE model, as of :func:`make_eval_step`; by default the loss, reported as ``val_loss``.
        seeds: Number of members, or one integer per member.
        init_seeds: Seeds of initial parameters, by default ``seeds``: ``[0] * 8`` has eight members start alike.
        options: Further arguments of :func:`make_train_step`.
        hyperparameters: By name, a value for all members or a list of one per member, as :func:`grid` returns them. What
            neither factory nor optimizer takes is one of the ``hparams`` of :meth:`TrainStep.init`.

    Attributes:
        model: The model of the first seed.
        step: The :class:`TrainStep`.
        state: The :class:`TrainState`, which :meth:`fit` replaces.
        history: The :class:`History` of the last :meth:`fit`.
        hyperparameters: The columns of the members.

    Raises:
        HyperparameterError: if nothing takes a hyperparameter, or a list has another length than there are members.

    Example:
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> train = torch.randn(32, 4), torch.randn(32, 1)
        >>> experiment = Experiment(lambda: torch.nn.Linear(4, 1), loss_fn, sgd, **grid(lr=[0.01, 0.1], seeds=3))
        >>> experiment.fit(train, 8, epochs=2, evaluate=train, progress=False)
        History(6 members, 2 epochs: loss, finite, val_loss)
        >>> experiment.last().groupby("lr").val_loss.mean().shape
        (2,)
    """

    def __init__(
        self,
        make_model: Callable[..., nn.Module],
        loss_fn: Callable[..., Any],
        optimizer: GradientTransformation | Callable[..., GradientTransformation],
        metric: Callable[..., Any] | None = None,
        *,
        seeds: int | Sequence[int] | Tensor,
        init_seeds: Sequence[int] | Tensor | None = None,
        options: Mapping[str, Any] | None = None,
        **hyperparameters: Any,
    ):
        numbers = _seeds(seeds)
        self.hyperparameters = {
            name: _column(value) or [value] * len(numbers) for name, value in hyperparameters.items()
        }
        for name, column in self.hyperparameters.items():
            if len(column) != len(numbers):
                raise HyperparameterError(
                    f"{name} has {len(column)} values for {len(numbers)} models; give one per model, or grid(...)"
                )
        of_model = self._named(make_model)
        self.model = build(make_model, numbers[0], {name: column[0] for name, column in of_model.items()})
        is_made = isinstance(optimizer, GradientTransformation)
        of_optimizer = {} if is_made else self._named(optimizer)
        hparams = {n: c for n, c in self.hyperparameters.items() if n not in of_model and n not in of_optimizer}
        self._refuse_unused(hparams, make_model, optimizer, num_positional(loss_fn) >= 3)
        self.metric = metric or _validation(loss_fn)
        made = optimizer if is_made else optimizer(**of_optimizer)
        self.step: TrainStep = make_train_step(self.model, loss_fn, made, **(options or {}))
        given, first = self.step.options, numbers if init_seeds is None else init_seeds
        shared = {"share_frozen": given.share_frozen, "shared_params": given.shared_params}
        params = init_params(make_model, first, **shared, **of_model)
        self.state: TrainState = self.step.init(*params, seeds=numbers, hparams=hparams)
        self.history = History(self.state.keys)
        self._epochs, self._columns = 0, self.hyperparameters

    def fit(
        self, data: Any, batch_size: int | None = None, *, epochs: int, evaluate: Any = None, **options: Any
    ) -> History:
        """Train all members, from where the last call ended.

        Args:
            data: A tree of tensors with one row per sample; without a ``batch_size``, an iterable over batches.
            batch_size: Rows per member and batch.
            epochs: Number of epochs.
            evaluate: Data for the metric after each epoch, or what :func:`hfta_func.fit` takes.
            options: Further arguments of :class:`ArrayLoader`, such as ``rows``, and of :func:`hfta_func.fit`.

        Returns:
            The history of this call.
        """
        names = options.keys() & inspect.signature(ArrayLoader).parameters
        loader = data
        if batch_size is not None:
            own: dict[str, Any] = {"shared": True} if self.step.batch_dims is None else {"seeds": self.state.keys}
            own |= {"device": self.state.keys.device} | {name: options.pop(name) for name in names}
            loader = ArrayLoader(data, batch_size, **own)
            loader.load_state_dict({"epoch": self._epochs, "batches": 0})
        elif names or is_batch(data):
            raise HyperparameterError(
                f"fit(data{', '.join(['', *sorted(names)])}) needs a batch_size, or a loader as data"
            )
        is_data = not (
            evaluate is None or callable(evaluate) or (isinstance(evaluate, tuple) and callable(evaluate[0]))
        )
        options["evaluate"] = (self.metric, evaluate) if is_data else evaluate
        self.state, self.history = fit(self.step, self.state, loader, epochs=epochs, **options)
        self._epochs += len(self.history)
        # Members that a callback added have none.
        added = [None] * (len(self.history.seeds) - len(next(iter(self.hyperparameters.values()), [])))
        self._columns = {name: [*column, *added] for name, column in self.hyperparameters.items()}
        self.hyperparameters = self._chosen(self._columns, self.history.members)
        return self.history

    def evaluate(self, data: Any, rows: Sequence[Sequence[int] | Tensor] | None = None) -> Metrics:
        """The metrics of all members now.

        Args:
            data: As that of :func:`hfta_func.fit`'s ``evaluate``.
            rows: The rows of each member.
        """
        evaluate = make_evaluation(self.step, (self.metric, data, *([] if rows is None else [rows])), self.state)
        assert evaluate is not None
        return evaluate(self.state)

    def take(self, index: int | slice | Sequence[int] | Tensor) -> Experiment:
        """The experiment of some members, as :func:`hfta_func.take` selects them, without a history."""
        other, chosen = copy.copy(self), indices(index, len(self.state.keys))
        other.state, other.history = take(self.state, chosen), History(self.state.keys[chosen])
        other.hyperparameters = other._columns = self._chosen(self.hyperparameters, chosen)
        return other

    def models(self) -> list[nn.Module]:
        """Every member as an ordinary module, see :func:`unstack_params`."""
        shared = self.state.shared.params if isinstance(self.state.shared, Shared) else {}
        buffers = stacked(self.state).buffers
        share_frozen = self.step.options.share_frozen
        return unstack_params(self.model, self.state.params, buffers, share_frozen=share_frozen, shared=shared)

    def predict(self, batches: Any, *, batch_dims: Any = None) -> Prediction:
        """What all members predict, see :func:`hfta_func.predict`."""
        share_frozen = self.step.options.share_frozen
        return predict(self.model, self.state, batches, batch_dims=batch_dims, share_frozen=share_frozen)

    def frame(self) -> pandas.DataFrame:
        """:meth:`History.frame` with the hyperparameters."""
        return self.history.frame(**self._columns)

    def last(self) -> pandas.DataFrame:
        """:meth:`History.last` with the hyperparameters."""
        return self.history.last(**self._columns)

    def best(self, metric: str, mode: Mode = "min") -> pandas.DataFrame:
        """:meth:`History.best` with the hyperparameters."""
        return self.history.best(metric, mode, **self._columns)

    def __repr__(self) -> str:
        return repr(self.state).replace("TrainState", "Experiment", 1)

    def _repr_html_(self) -> str:
        return f"{self!r}<br>{self.history._repr_html_()}"

    def _named(self, func: Callable[..., Any]) -> dict[str, list[Any]]:
        """The hyperparameters that a function takes."""
        return {name: self.hyperparameters[name] for name in _arguments(func) if name in self.hyperparameters}

    def _refuse_unused(self, hparams: Mapping[str, Any], factory: Any, optimizer: Any, takes_hparams: bool) -> None:
        known = numbers_of(self.model)
        unused = [name for name in hparams if name not in known and not is_pattern(name)]
        if unused and not takes_hparams:
            made = isinstance(optimizer, GradientTransformation)
            options = "is made already; pass adam, not adam()" if made else f"takes {_arguments(optimizer)}"
            raise HyperparameterError(
                f"nothing takes {unused}: the factory takes {_arguments(factory)}, the optimizer {options}, the loss "
                f"only (model, batch), and of the model's numbers {numbers_text(known, unused[0])}"
            )

    @staticmethod
    def _chosen(columns: Mapping[str, list[Any]], members: Tensor) -> dict[str, list[Any]]:
        return {name: [column[member] for member in members.tolist()] for name, column in columns.items()}


def _seeds(seeds: int | Sequence[int] | Tensor) -> list[int]:
    return [*range(seeds)] if isinstance(seeds, int) else _column(seeds)


def _column(values: Any) -> list[Any]:
    """The values of a sequence or a tensor; none for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [*values] if isinstance(values, Sequence) and not isinstance(values, str) else []


def _arguments(func: Callable[..., Any]) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return [name for name, parameter in inspect.signature(func).parameters.items() if parameter.kind in kinds]


def _validation(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss and what it reports as metrics, whose names begin with ``val_``."""

    def named(result: Any) -> dict[str, Tensor]:
        loss, further = result if isinstance(result, tuple) else (result, {})
        return {"val_loss": loss, **{f"val_{name}": value for name, value in further.items()}}

    if num_positional(loss_fn) >= 3:
        return lambda model, batch, hparams: named(loss_fn(model, batch, hparams))
    return lambda model, batch: named(loss_fn(model, batch))
