"""Cross-validation and search in arrays: all folds and settings are members."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import hfta_func as hfta
from hfta_func._types import require
from hfta_func.sklearn.estimators import train

numpy, base, metrics, selection, validation = (
    require(name, "sklearn")
    for name in ("numpy", "sklearn.base", "sklearn.metrics", "sklearn.model_selection", "sklearn.utils.validation")
)


def cross_val_score(
    estimator: Any, X: Any, y: Any, *, groups: Any = None, cv: Any = 5, scoring: Any = None, by: Any = None
) -> Any:
    """The scores of all folds, whose models train as one array; as scikit-learn's function of this name.

    Args:
        estimator: An :class:`ArrayClassifier` or :class:`ArrayRegressor`, which is not changed.
        X: Samples ``[n, ...]``.
        y: Their labels or numbers.
        groups: What ``cv`` keeps together, such as sessions.
        cv: A number of folds, or a splitter of scikit-learn, such as ``LeaveOneGroupOut()``.
        scoring: A scorer or its name; by default the estimator's own score.
        by: A value per sample, such as a person: each has folds, and models, of its own, and all of them are one array.

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
    scores = _scores(estimator, [{}], X, y, [fold for each in folds for fold in each], scoring)[0]
    by_name = numpy.split(scores, numpy.cumsum([len(each) for each in folds])[:-1])
    return scores if by is None else dict(zip(numpy.unique(names).tolist(), by_name, strict=True))


class ArraySearchCV(selection.GridSearchCV):
    """A search over settings by cross-validation, whose folds and settings are members of arrays; as ``GridSearchCV``.

    Args:
        estimator: An :class:`ArrayClassifier` or :class:`ArrayRegressor`.
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

    def fit(self, X: Any, y: Any, groups: Any = None) -> ArraySearchCV:
        """Search; ``groups`` is what the splitter keeps together."""
        grid = self.param_grid
        settings: list[dict[str, Any]] = [*(selection.ParameterGrid(grid) if isinstance(grid, Mapping) else grid)]
        splits = _splits(self.estimator, X, numpy.asarray(y), groups, self.cv)
        scores = _scores(self.estimator, settings, X, y, splits, self.scoring)
        rows = [{"test_scores": score, "fit_time": 0.0, "score_time": 0.0} for score in scores.flatten()]
        results = self._format_results(settings, len(splits), rows)
        self.cv_results_ = {name: column for name, column in results.items() if not name.endswith("_time")}
        self.n_splits_, self.multimetric_ = len(splits), False
        self.scorer_ = metrics.check_scoring(self.estimator, self.scoring)
        self.best_index_ = int(results["rank_test_score"].argmin())
        self.best_params_ = settings[self.best_index_]
        self.best_score_ = float(results["mean_test_score"][self.best_index_])
        if self.refit:
            self.best_estimator_ = base.clone(self.estimator).set_params(**self.best_params_).fit(X, y)
        return self


def _splits(estimator: Any, X: Any, y: Any, groups: Any, cv: Any, part: Any = None) -> list[tuple[Any, Any]]:
    """Train and test rows of the folds, numbers in ``part``."""
    part = slice(None) if part is None else part
    splitter = selection.check_cv(cv, y[part], classifier=base.is_classifier(estimator))
    groups = None if groups is None else validation.column_or_1d(groups)[part]
    return [*splitter.split(y[part], y[part], groups)]


def _scores(
    estimator: Any, settings: Iterable[Mapping[str, Any]], X: Any, y: Any, splits: Sequence[Any], scoring: Any
) -> Any:
    """The scores ``[settings, folds]`` of one member each."""
    first = base.clone(estimator)
    data = first._learn_classes(X, y)
    learned = {name: value for name, value in vars(first).items() if name not in first.get_params()}
    members, rows = [], []
    for setting in settings:
        for trained, _ in splits:
            member = base.clone(estimator).set_params(**setting)
            vars(member).update(learned, groups_=numpy.zeros(1), _is_grouped=False)
            members.append(member)
            rows.append(torch.as_tensor(trained))
    scorer, scores = metrics.check_scoring(first, scoring), numpy.zeros(len(members))
    for places, fitted in train(members, data, rows):
        for index, place in enumerate(places):
            member = members[place]
            member.model_, member.params_ = fitted.model, hfta.take(fitted.params, [index])
            tested = splits[place % len(splits)][1]
            some = X.iloc[tested] if hasattr(X, "iloc") else numpy.asarray(X)[tested]
            try:
                scores[place] = scorer(member, some, numpy.asarray(y)[tested])
            except ValueError as error:
                # As in scikit-learn: a model that went to infinity has no score, and does not end the search.
                warnings.warn(f"a fold of {member!r} has no score: {error}", RuntimeWarning, stacklevel=2)
                scores[place] = numpy.nan
    return scores.reshape(-1, len(splits))
