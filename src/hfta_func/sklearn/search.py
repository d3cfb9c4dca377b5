"""Cross-validation and search in arrays: all folds and settings are members."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hfta_func as hfta
from hfta_func._types import require
from hfta_func.errors import HyperparameterError
from hfta_func.sklearn.estimators import ArrayEstimator, train, weights_of

_MODULES = "base", "metrics", "model_selection", "pipeline", "utils.validation"
base, metrics, selection, pipeline, validation = (require(f"sklearn.{name}", "sklearn") for name in _MODULES)
numpy = require("numpy", "sklearn")


def cross_val_score(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    groups: Any = None,
    cv: Any = 5,
    scoring: Any = None,
    by: Any = None,
    params: Mapping[str, Any] | None = None,
) -> Any:
    """The scores of all folds, whose models train as one array; as scikit-learn's function of this name.

    Args:
        estimator: An :class:`ArrayClassifier` or :class:`ArrayRegressor`, or a ``Pipeline`` that ends with one; it is not
            changed.
        X: Samples ``[n, ...]``.
        y: Their labels or numbers.
        groups: What ``cv`` keeps together, such as sessions.
        cv: A number of folds, or a splitter of scikit-learn, such as ``LeaveOneGroupOut()``.
        scoring: A scorer or its name; by default the estimator's own score.
        by: A value per sample, such as a person: each has folds, and models, of its own, and all of them are one array.
        params: ``{"sample_weight": ...}``, see :meth:`ArraySearchCV.fit`.

    Returns:
        The scores of the folds, ``[K]``; with ``by`` a dict of these by value.

    Raises:
        ValueError: as scikit-learn's, and for an estimator that is no array.

    Example:
        >>> from hfta_func.sklearn import ArrayClassifier
        >>> x = torch.randn(60, 4)
        >>> y, persons, sessions = (x[:, 0] > 0).long(), torch.arange(60) % 2, torch.arange(60) // 20
        >>> from sklearn.model_selection import LeaveOneGroupOut
        >>> scores = cross_val_score(ArrayClassifier(epochs=3), x, y, groups=sessions, cv=LeaveOneGroupOut(), by=persons)
        >>> [(person, len(each)) for person, each in scores.items()]
        [(0, 3), (1, 3)]
    """
    labels = numpy.asarray(y)
    names = numpy.zeros(len(labels)) if by is None else validation.column_or_1d(by)
    validation.check_consistent_length(X, labels, names, groups)
    parts = [numpy.flatnonzero(names == name) for name in numpy.unique(names)]
    folds = [[(part[a], part[b]) for a, b in _splits(estimator, X, labels, groups, cv, part)] for part in parts]
    scores = _scores(estimator, [{}], X, y, [fold for each in folds for fold in each], scoring, params or {})[0]
    by_name = numpy.split(scores, numpy.cumsum([len(each) for each in folds])[:-1])
    return scores if by is None else dict(zip(numpy.unique(names).tolist(), by_name, strict=True))


class ArraySearchCV(selection.GridSearchCV):
    """A search over settings by cross-validation, whose folds and settings are members of arrays; as ``GridSearchCV``.

    Args:
        estimator: An :class:`ArrayClassifier` or :class:`ArrayRegressor`, or a ``Pipeline`` that ends with one, whose steps
            before are fitted on the training rows of each fold, once for all settings that do not change them.
        param_grid: Lists of values by name, of which all combinations are tried, or a list of settings, such as of
            scikit-learn's ``ParameterSampler``.
        scoring: A scorer or its name; by default the estimator's own score.
        cv: A number of folds, or a splitter of scikit-learn.
        refit: Whether to train the best setting on all rows at the end.

    Attributes:
        cv_results_: Settings and scores, with the names of ``GridSearchCV``.
        best_params_: The setting with the best mean score.
        best_score_: That score.
        best_estimator_: An estimator with this setting, trained on all rows.

    Example:
        >>> from hfta_func.sklearn import ArrayClassifier
        >>> x = torch.randn(60, 4)
        >>> search = ArraySearchCV(ArrayClassifier(epochs=3), {"lr": [1e-4, 1e-1], "random_state": [0, 1]}, cv=3)
        >>> search.fit(x, (x[:, 0] > 0).long()).best_params_["lr"]
        0.1
    """

    # scikit-learn reads parameters from the signature.
    def __init__(self, estimator: Any, param_grid: Any, *, scoring: Any = None, cv: Any = 5, refit: bool = True):
        super().__init__(estimator, param_grid, scoring=scoring, cv=cv, refit=refit)

    def fit(self, X: Any, y: Any, groups: Any = None, **params: Any) -> ArraySearchCV:
        """Search for the best setting.

        Args:
            X: Samples ``[n, ...]``, or what the first step of a pipeline takes.
            y: Their labels or numbers.
            groups: What the splitter keeps together.
            params: ``sample_weight``, see :meth:`ArrayClassifier.fit`; of a pipeline ``step__sample_weight`` with the name of
                its last step. As in scikit-learn, scores are without weights.

        Returns:
            The search.

        Raises:
            ValueError: as scikit-learn's, and for an estimator that is no array.
        """
        grid = self.param_grid
        settings: list[dict[str, Any]] = [*(selection.ParameterGrid(grid) if isinstance(grid, Mapping) else grid)]
        splits = _splits(self.estimator, X, numpy.asarray(y), groups, self.cv, slice(None))
        scores = _scores(self.estimator, settings, X, y, splits, self.scoring, params)
        rows = [{"test_scores": score, "fit_time": 0.0, "score_time": 0.0} for score in scores.flatten()]
        results = self._format_results(settings, len(splits), rows)
        self.cv_results_ = {name: column for name, column in results.items() if not name.endswith("_time")}
        self.n_splits_, self.multimetric_ = len(splits), False
        self.scorer_ = metrics.check_scoring(self.estimator, self.scoring)
        self.best_index_ = int(results["rank_test_score"].argmin())
        self.best_params_ = settings[self.best_index_]
        self.best_score_ = float(results["mean_test_score"][self.best_index_])
        if self.refit:
            self.best_estimator_ = _with(self.estimator, self.best_params_).fit(X, y, **params)
        return self


def _splits(estimator: Any, X: Any, y: Any, groups: Any, cv: Any, part: Any) -> list[tuple[Any, Any]]:
    """Train and test rows of the folds, numbers in ``part``."""
    splitter = selection.check_cv(cv, y[part], classifier=base.is_classifier(estimator))
    groups = None if groups is None else validation.column_or_1d(groups)[part]
    return [*splitter.split(y[part], y[part], groups)]


class _Table(NamedTuple):
    """Samples as members see them."""

    parts: list[Any]
    origins: list[Any]
    """Of each part, the rows of the data that it was made of."""
    places: list[int]
    rows: list[Tensor]
    """Of each member, its rows in the parts together."""


def _tables(pipelines: Sequence[Any], settings: Sequence[Any], X: Any, y: Any, splits: Sequence[Any]) -> list[_Table]:
    """Fit the steps before the last, once for each fold and setting of them; a table for each shape that these make."""
    last, tables, fitted = pipelines[0].steps[-1][0], {}, {}
    for place, whole in enumerate(pipelines):
        fold, setting = place % len(splits), settings[place // len(splits)]
        # By identity, since values may be arrays and estimators; the settings hold them.
        key = fold, *sorted((name, id(value)) for name, value in setting.items() if name.partition("__")[0] != last)
        if key not in fitted:
            trained, steps = splits[fold][0], whole[:-1]
            part = steps.fit_transform(_at(X, trained), y[trained]) if steps.steps else _at(X, trained)
            table: _Table = tables.setdefault(part.shape[1:], _Table([], [], [], []))
            start = sum(map(len, table.origins))
            table.parts.append(part)
            table.origins.append(trained)
            fitted[key] = steps, part, table, torch.arange(start, start + len(trained))
        steps, part, table, rows = fitted[key]
        whole.steps[:-1] = steps.steps
        # Names of features, which may differ where their number does not.
        validation.validate_data(whole.steps[-1][1], part, allow_nd=True)
        table.places.append(place)
        table.rows.append(rows)
    return [*tables.values()]


def _with(estimator: Any, setting: Mapping[str, Any]) -> Any:
    """An estimator of its own with a setting, of which steps are copied, too."""
    return base.clone(estimator).set_params(**base.clone(setting, safe=False))


def _at(X: Any, rows: Any) -> Any:
    if hasattr(X, "tocsr"):
        return X.tocsr()[rows]
    return X.iloc[rows] if hasattr(X, "iloc") else numpy.asarray(X)[rows]


def _scores(
    estimator: Any, settings: list[Any], X: Any, y: Any, splits: Sequence[Any], scoring: Any, params: Mapping[str, Any]
) -> Any:
    """The scores ``[settings, folds]`` of one member each."""
    labels, is_pipeline = numpy.asarray(y), isinstance(estimator, pipeline.Pipeline)
    name = f"{estimator.steps[-1][0]}__sample_weight" if is_pipeline else "sample_weight"
    wholes = [_with(estimator, setting) for setting in settings for _ in splits]
    members = [whole.steps[-1][1] if is_pipeline else whole for whole in wholes]
    for member in members:
        if not isinstance(member, ArrayEstimator):
            cure = "end the pipeline with an ArrayClassifier or ArrayRegressor, or use scikit-learn's own function"
            raise HyperparameterError(f"{type(member).__name__} does not train as an array; {cure}")
    if other := params.keys() - {name}:
        raise HyperparameterError(f"fit takes {name}, not {min(other)}; leave it out, or use scikit-learn's function")
    weights = weights_of(params.get(name), labels)
    if is_pipeline:
        tables = _tables(wholes, settings, X, labels, splits)
    else:
        rows = [torch.as_tensor(trained) for _ in settings for trained, _ in splits]
        tables = [_Table([X], [slice(None)], [*range(len(members))], rows)]
    scorer, scores = metrics.check_scoring(wholes[0], scoring), numpy.zeros(len(members))
    for table in tables:
        first = base.clone(members[table.places[0]])
        if is_pipeline:
            # Classes are those of all rows.
            _, targets = first._learn_classes(numpy.zeros((len(labels), 1)), y)
            del first.n_features_in_
            parts = [validation.check_array(part, allow_nd=True) for part in table.parts]
            origin = numpy.concatenate(table.origins)
            data = torch.tensor(numpy.concatenate(parts)), targets[origin], *(each[origin] for each in weights)
        else:
            data = *first._learn_classes(X, y), *weights
        learned = {name: value for name, value in vars(first).items() if name not in first.get_params()}
        for place in table.places:
            vars(members[place]).update(learned, groups_=numpy.zeros(1), _is_grouped=False)
        for places, (model, stacked, _) in train([members[place] for place in table.places], data, table.rows):
            for index, place in enumerate(table.places[each] for each in places):
                members[place].model_, members[place].params_ = model, hfta.take(stacked, [index])
                tested = splits[place % len(splits)][1]
                try:
                    scores[place] = scorer(wholes[place], _at(X, tested), labels[tested])
                except ValueError as error:
                    # As in scikit-learn: a model that went to infinity has no score, and does not end the search.
                    warnings.warn(f"a fold of {wholes[place]!r} has no score: {error}", RuntimeWarning, stacklevel=2)
                    scores[place] = numpy.nan
    return scores.reshape(-1, len(splits))
