"""One array from its factory, loss, optimizer, seeds and hyperparameters, each said once."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfta_func import random
from hfta_func._tree import indices, take
from hfta_func.errors import HyperparameterError, StackError
from hfta_func.models.padding import padded
from hfta_func.models.stack import build, init_params, stack_params, unstack_params
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import is_batch, make_evaluation
from hfta_func.run.fit import fit
from hfta_func.run.history import History, Metrics
from hfta_func.step.ensemble import Ensemble
from hfta_func.step.members import num_positional
from hfta_func.step.prediction import Prediction, predict
from hfta_func.step.state import TrainState, shared_params, stacked
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
            raise HyperparameterError(f"{name} is {values.get(name, seeds)!r}; a grid needs a list of values")
    return dict(zip(axes, map(list, zip(*itertools.product(*axes.values()), strict=True)), strict=True))


class Experiment:
    """An array with all that made it, which hands out the functional parts: ``step``, ``state``, ``history``.

    Args:
        make_model: Makes one model; hyperparameters with the names of its arguments are passed to it. Or M models that exist.
        loss_fn: The loss of ONE model, as of :func:`make_train_step`.
        optimizer: A function such as ``adam`` that takes hyperparameters by name, or what it returns.
        metric: A metric of ONE model, as of :func:`make_eval_step`; by default the loss, reported as ``val_loss``.
        seeds: Number of members, or one integer per member.
        init_seeds: Seeds of initial parameters, by default ``seeds``; one for all has them start alike.
        options: Further arguments of :func:`make_train_step`.
        pad: Whether models differ in size, see :func:`padded`.
        hyperparameters: By name, a value for all members or a list of one per member, as :func:`grid` returns them. A tuple
            is one value, such as ``betas=(0.9, 0.99)``, where it is no number that an optimizer or model is to have. What
            neither factory nor optimizer takes is one of the ``hparams`` of :meth:`TrainStep.init`.

    Attributes:
        model: The model of the first seed, or the padded one.
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
        >>> experiment.history.last().groupby("lr").val_loss.mean().shape
        (2,)
    """

    def __init__(
        self,
        make_model: Callable[..., nn.Module] | Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        optimizer: Any,
        metric: Callable[..., Any] | None = None,
        *,
        seeds: int | Sequence[int] | Tensor,
        init_seeds: int | Sequence[int] | Tensor | None = None,
        options: Mapping[str, Any] | None = None,
        pad: bool = False,
        **hyperparameters: Any,
    ):
        factory_takes, optimizer_takes = _arguments(make_model), _arguments(optimizer)
        pairs = {name for name, default in optimizer_takes.items() if isinstance(default, tuple)}
        for name, value in hyperparameters.items():
            if isinstance(value, tuple) and name not in factory_takes.keys() | pairs:
                hyperparameters[name] = [*value]
        numbers, columns = columns_of(seeds, hyperparameters)
        of_model: Any = {name: columns[name] for name in columns if name in factory_takes}
        # The plain number 0 leaves momentum out; a list of zeros does not.
        of_optimizer = {name: value for name, value in hyperparameters.items() if name in optimizer_takes}
        of_optimizer |= {name: _pair(of_optimizer[name]) for name in pairs & of_optimizer.keys()}
        hparams = {name: columns[name] for name in columns if name not in {*of_model, *of_optimizer}}
        exist = None if callable(make_model) else [*make_model]
        if exist is not None and (len(exist) != len(numbers) or init_seeds is not None):
            raise StackError(f"got {len(exist)} models for {len(numbers)} seeds; give one each, and no init_seeds")
        sizes = [{name: column[i] for name, column in of_model.items()} for i in range(len(numbers) if pad else 1)]
        models = [build(make_model, numbers[0], size) for size in sizes] if exist is None else exist[:1]  # pyright: ignore
        self.model = padded(models) if pad else models[0]
        self.metric = _validation(loss_fn) if metric is None else metric
        if metric is not None:
            num_positional(metric)
        made: Any = optimizer(**of_optimizer) if callable(optimizer) and not isinstance(optimizer, type) else optimizer
        self.step: TrainStep = make_train_step(self.model, loss_fn, made, **(options or {}))
        self._base = {"share_frozen": self.step.options.share_frozen}
        made_by: Any = {**self._base, "shared_params": self.step.options.shared_params, **of_model}
        made_by |= {"pad": self.model} if pad else {}
        if exist is None:
            starts = columns_of(numbers, {"init_seeds": numbers if init_seeds is None else init_seeds})[1]
            params = init_params(make_model, starts["init_seeds"], **made_by)  # pyright: ignore
        else:
            params = stack_params(exist, **made_by)
        try:
            self.state: TrainState = self.step.init(*params, seeds=numbers, hparams=hparams)
        except HyperparameterError as error:
            takes = f"the factory takes {[*factory_takes]} and the optimizer {[*optimizer_takes]}"
            raise HyperparameterError(f"{error}; {takes}; pass adam, not adam(), to name its own") from error
        self.history, self._epochs = History(self.state.keys), 0
        self.history.columns = self.hyperparameters = columns

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
            The history of this call, whose frames have the hyperparameters.
        """
        given = self.arguments(data, batch_size, evaluate=evaluate, **options)
        self.state, self.history = fit(self.step, self.state, epochs=epochs, **given)
        self._epochs += len(self.history)
        # A member that a callback has added has none of its own.
        added = [None] * (len(self.history.seeds) - max(map(len, self.hyperparameters.values()), default=0))
        self.history.columns = {name: [*column, *added] for name, column in self.hyperparameters.items()}
        self.hyperparameters = self._columns_of(self.history.members, self.history.columns)
        return self.history

    def arguments(
        self, data: Any, batch_size: int | None = None, *, evaluate: Any = None, **options: Any
    ) -> dict[str, Any]:
        """The arguments of :func:`hfta_func.fit` for those of :meth:`fit`: its loader, ``evaluate`` and further options."""
        loader, names = data, options.keys() & inspect.signature(ArrayLoader).parameters
        if batch_size is not None:
            given: Any = {"shared": True} if self.step.batch_dims is None else {"seeds": self.state.keys}
            given |= {"device": self.state.keys.device, **{name: options.pop(name) for name in names}}
            loader = ArrayLoader(data, batch_size, **given)
            loader.load_state_dict({"epoch": self._epochs, "batches": 0})
        elif names or is_batch(data):
            raise HyperparameterError(f"{min(names, default='data')} needs a batch_size; or pass a loader as data")
        is_known = evaluate is None or callable(evaluate) or (isinstance(evaluate, tuple) and callable(evaluate[0]))
        return {**options, "loader": loader, "evaluate": evaluate if is_known else (self.metric, evaluate)}

    def evaluate(self, data: Any, *rows: Sequence[Sequence[int] | Tensor]) -> Metrics:
        """The metrics of all members now, over ``data`` as in :func:`hfta_func.fit`, and rows of each member's own."""
        evaluate: Any = make_evaluation(self.step, (self.metric, data, *rows), self.state)  # pyright: ignore
        metrics = evaluate(self.state)
        self.state = self.state._replace(buffers={**self.state.buffers, **evaluate.written})
        return metrics

    def take(self, index: int | slice | Sequence[int] | Tensor) -> Experiment:
        """The experiment of some members, as :func:`hfta_func.take` selects them, with an empty history."""
        other, chosen = copy.copy(self), indices(index, len(self.state.keys))
        other.state = take(self.state, chosen)
        other.history = History(other.state.keys)
        other.history.columns = other.hyperparameters = self._columns_of(chosen, self.hyperparameters)
        return other

    def models(self) -> list[nn.Module]:
        """Every member as an ordinary module, see :func:`unstack_params`."""
        made: Any = {"shared": shared_params(self.state), **self._base}
        return unstack_params(self.model, self.state.params, stacked(self.state).buffers, **made)

    def ensemble(self) -> Ensemble:
        """The members as one module, to call, deploy or export."""
        made: Any = {"shared": shared_params(self.state), "seeds": self.state.keys, **self._base}
        return Ensemble(self.model, self.state.params, stacked(self.state).buffers, **made)

    def predict(
        self, batches: Any, *, batch_dims: Any = None, inputs: Callable[[Any], Any] | None = None
    ) -> Prediction:
        """What all members predict, see :func:`hfta_func.predict`."""
        return predict(self.model, self.state, batches, batch_dims=batch_dims, inputs=inputs, **self._base)

    def frame(self) -> pandas.DataFrame:
        """The frame of the history, with the hyperparameters."""
        return self.history.frame()

    def __repr__(self) -> str:
        return repr(self.state).replace("TrainState", "Experiment", 1)

    def _repr_html_(self) -> str:
        return f"{self!r}<br>{self.history._repr_html_()}"

    def _columns_of(self, members: Tensor, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
        return {name: [column[member] for member in members.tolist()] for name, column in columns.items()}


def columns_of(
    seeds: int | Sequence[int] | Tensor, values: Mapping[str, Any]
) -> tuple[list[int], dict[str, list[Any]]]:
    """One seed per member, and one of each value; raises a HyperparameterError if there is none, or not one for each."""
    numbers = random.keys(_seeds(seeds)).tolist()
    if not numbers:
        raise HyperparameterError(f"seeds is {seeds!r}; give a number of models, or a list of one integer per model")
    columns = dict[str, list[Any]]()
    for name, value in values.items():
        # A tuple is one value, such as the size of an image.
        columns[name] = column = (() if isinstance(value, tuple) else _column(value)) or [value] * len(numbers)
        if len(column) != len(numbers):
            raise HyperparameterError(f"{name} has {len(column)} values for {len(numbers)} models; give one each")
    return numbers, columns


def _seeds(seeds: Any) -> list[Any]:
    """The seeds for a number of members, or those given."""
    seeds = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    return _column(range(seeds) if isinstance(seeds, int) else seeds)


def _column(values: Any) -> list[Any]:
    """The values of a sequence or a tensor; none for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [*values] if isinstance(values, Sequence) and not isinstance(values, str) else []


def _pair(given: Any) -> Any:
    """For an optimizer's pair, such as betas, of one number each or M: one for all members, or the two columns of a list."""
    columns = [*zip(*given, strict=True)] if isinstance(given, list) and all(map(_column, given)) else given
    return tuple(map(list, columns)) if columns is not given else given


def _arguments(func: Any) -> dict[str, Any]:
    """The names of what a function takes, with their defaults."""
    if not callable(func):
        return {}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(func).parameters.items()
    return {name: parameter.default for name, parameter in parameters if parameter.kind in kinds}


def _validation(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss_fn)
    def metric(*args: Any) -> dict[str, Tensor]:
        result = loss_fn(*args)
        loss, further = result if isinstance(result, tuple) else (result, {})
        return {"val_loss": loss, **{f"val_{name}": value for name, value in further.items()}}

    return metric
