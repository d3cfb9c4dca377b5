"""Estimators of scikit-learn: its own checks, a plain loop over groups, and its own searches, which train one by one."""

import pickle

import numpy
import pandas
import pytest
import scipy.sparse
import torch
from sklearn.decomposition import TruncatedSVD
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, LeaveOneGroupOut
from sklearn.model_selection import cross_val_score as one_by_one
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import hfta_func as hfta
from hfta_func.sklearn import ArrayClassifier, ArrayRegressor, ArraySearchCV, cross_val_score

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = {"epochs": 6, "batches_per_epoch": 5, "lr": 3e-2}


@pytest.mark.sampled(every=16)
@parametrize_with_checks(
    [ArrayClassifier(**SHORT), ArrayRegressor(**SHORT)],
    expected_failed_checks=lambda _: {
        "check_sample_weight_equivalence_on_dense_data": "which rows share a batch depends on their number"
    },
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def network(shape, outputs, width=5, p=0.0):
    """A model in double precision."""
    size = torch.Size(shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, width), nn.Tanh(), nn.Dropout(p), nn.Linear(width, outputs)
    ).double()


TINY = {"make_model": network, "epochs": 3, "batches_per_epoch": 4, "batch_size": 8}


@pytest.fixture
def table():
    """Samples of three persons with 17 to 41 rows in sessions, and their classes and numbers."""
    generator = numpy.random.default_rng(0)
    persons = generator.permutation(numpy.repeat(["c", "a", "b"], [17, 41, 30]))
    x = generator.standard_normal((88, 2, 3))
    labels = numpy.array(["no", "yes", "why"])[(x[:, 0, 0] > 0).astype(int) + (x[:, 1, 1] > 0)]
    return x, labels, x.sum(2) + 0.1 * generator.standard_normal((88, 2)), persons


def alone(x, y, loss_fn, outputs, lr, decay=0.0, seed=0, epochs=3, weights=()):
    """A model trained by PyTorch alone on all rows."""
    torch.manual_seed(seed)
    model = network(x.shape[1:], outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay)
    data = torch.tensor(x), torch.tensor(y), *map(torch.tensor, weights)
    loader = hfta.ArrayLoader(data, 8, seeds=[seed], rows=[range(len(x))], batches_per_epoch=4)
    for _ in range(epochs):
        for inputs, targets, *weight in loader:
            optimizer.zero_grad()
            loss_fn(model(inputs[0]), targets[0], *(each[0] for each in weight)).backward()
            optimizer.step()
    return model


def test_the_model_of_a_group_is_a_plain_one_of_its_rows(table):
    x, labels, numbers, persons = table
    classes, targets = numpy.unique(labels, return_inverse=True)
    classifier = ArrayClassifier(**TINY, lr=0.03, weight_decay=0.1, random_state=5).fit(x, labels, groups=persons)
    regressor = ArrayRegressor(**TINY, lr=0.01).fit(x, numbers, groups=persons)
    assert classifier.groups_.tolist() == ["a", "b", "c"] and classifier.classes_.tolist() == classes.tolist()
    chosen, scores, values = numpy.random.default_rng(1).permutation(88)[:50], [], []
    for member, person in enumerate("abc"):
        mine = persons == person
        model = alone(x[mine], targets[mine], nn.functional.cross_entropy, 3, 0.03, 0.1, seed=5)
        torch.testing.assert_close(classifier.models()[member].state_dict(), model.state_dict(), rtol=1e-10, atol=1e-12)
        scores.append(model(torch.tensor(x)).softmax(-1).detach().numpy())
        values.append(alone(x[mine], numbers[mine], nn.functional.mse_loss, 2, 0.01)(torch.tensor(x)).detach().numpy())
    each = numpy.searchsorted(["a", "b", "c"], persons)
    expected = numpy.stack(scores)[each, numpy.arange(88)][chosen]
    found = classifier.predict_proba(x[chosen], groups=persons[chosen])
    numpy.testing.assert_allclose(found, expected, rtol=1e-10)
    assert (classifier.predict(x[chosen], groups=persons[chosen]) == classes[expected.argmax(1)]).all()
    accuracy = (classes[expected.argmax(1)] == labels[chosen]).mean()
    assert classifier.score(x[chosen], labels[chosen], groups=persons[chosen]) == pytest.approx(accuracy)
    numpy.testing.assert_allclose(classifier.predict_proba(x), numpy.mean(scores, 0), rtol=1e-10)
    # Some groups, in any order.
    some = numpy.flatnonzero(persons != "b")[::-1]
    expected = numpy.stack(values)[each, numpy.arange(88)][some]
    numpy.testing.assert_allclose(regressor.predict(x[some], groups=persons[some]), expected, rtol=1e-10)
    single = ArrayRegressor(**TINY).fit(x, numbers[:, 0])
    assert single.predict(x, groups=persons).shape == (88,) and single.score(x, numbers[:, 0], groups=persons) < 1
    copy = pickle.loads(pickle.dumps(classifier))
    assert (copy.predict_proba(x, groups=persons) == classifier.predict_proba(x, groups=persons)).all()


def test_each_group_stops_by_rows_of_its_own(table):
    x, labels, _, persons = table
    options = {**TINY, "epochs": 12, "lr": 0.1, "patience": 2, "hold_out": 0.3, "random_state": 3}
    whole = ArrayClassifier(**options).fit(x, labels, groups=persons)
    epochs = (~whole.history_["loss"].isnan()).sum(0)
    assert len({*epochs.tolist()}) > 1 and epochs.min() < 12
    for person in "abc":
        mine = persons == person
        solo = ArrayClassifier(**options).fit(x[mine], labels[mine])
        if len(solo.classes_) == 3:
            expected = solo.predict_proba(x[mine])
            numpy.testing.assert_allclose(whole.predict_proba(x[mine], groups=persons[mine]), expected, rtol=1e-9)


def test_folds_of_an_array_score_as_one_by_one(table):
    x, labels, numbers, persons = table
    sessions = numpy.arange(88) // 22
    classifier, regressor = ArrayClassifier(**TINY, random_state=2), ArrayRegressor(**TINY)
    folds = {"groups": sessions, "cv": LeaveOneGroupOut(), "scoring": "neg_log_loss"}
    found = cross_val_score(classifier, x, labels, **folds)
    numpy.testing.assert_allclose(found, one_by_one(classifier, x, labels, **folds), rtol=1e-10)
    assert len({*found.round(9)}) == 4 and not hasattr(classifier, "classes_")
    found = cross_val_score(regressor, x, numbers, cv=KFold(3))
    numpy.testing.assert_allclose(found, one_by_one(regressor, x, numbers, cv=KFold(3)), rtol=1e-10)
    parted = cross_val_score(regressor, x, numbers, groups=sessions, cv=GroupKFold(2), by=persons)
    for person in "abc":
        mine = persons == person
        solo = one_by_one(regressor, x[mine], numbers[mine], groups=sessions[mine], cv=GroupKFold(2))
        numpy.testing.assert_allclose(parted[person], solo, rtol=1e-10)


@pytest.mark.exhaustive
def test_a_search_finds_what_scikit_learns_finds(table):
    x, labels, _, _ = table
    frame = pandas.DataFrame(x.reshape(88, 6), columns=[*"abcdef"])
    grid = {
        "lr": [0.03, 0.001],
        "random_state": [1, 2],
        "model_params": [{"width": 3}, {"width": 4, "p": 0.1}, {"width": 4, "p": 0.5}],
    }
    ours, theirs = same_search(ArrayClassifier(**TINY), grid, frame, labels)
    for name, column in ours.cv_results_.items():
        if name.endswith("score"):
            numpy.testing.assert_allclose(column, theirs.cv_results_[name], rtol=1e-9)
        elif name != "params":
            assert (column == theirs.cv_results_[name]).all()
    assert ours.best_score_ == pytest.approx(theirs.best_score_) and ours.n_splits_ == 3
    assert (ours.predict(frame) == theirs.predict(frame)).all()
    assert ours.score(frame, labels) == pytest.approx(theirs.score(frame, labels))


def weighted(loss):
    """The loss of a plain loop with weights."""

    def weighted_loss(outputs, targets, weight):
        each = loss(outputs, targets, reduction="none")
        return ((each if each.dim() == 1 else each.mean(1)) * weight).sum() / weight.sum()

    return weighted_loss


def test_weights_of_samples_are_those_of_a_plain_loop(table):
    x, labels, numbers, persons = table
    targets = numpy.unique(labels, return_inverse=True)[1]
    weights = numpy.random.default_rng(2).uniform(0.1, 3, 88)
    weights[::7] = 0
    classifier = ArrayClassifier(**TINY, lr=0.03).fit(x, labels, groups=persons, sample_weight=weights)
    regressor = ArrayRegressor(**TINY, lr=0.01).fit(x, numbers, persons, [*weights])
    for member, person in enumerate("abc"):
        mine = persons == person
        own = {"weights": [weights[mine]]}
        model = alone(x[mine], targets[mine], weighted(nn.functional.cross_entropy), 3, 0.03, **own)
        torch.testing.assert_close(classifier.models()[member].state_dict(), model.state_dict(), rtol=1e-10, atol=1e-12)
        model = alone(x[mine], numbers[mine], weighted(nn.functional.mse_loss), 2, 0.01, **own)
        torch.testing.assert_close(regressor.models()[member].state_dict(), model.state_dict(), rtol=1e-10, atol=1e-12)
    # Of rows held out, too, and in folds.
    options = {**TINY, "epochs": 12, "lr": 0.1, "patience": 2}
    plain, given = (ArrayClassifier(**options).fit(x, labels, sample_weight=each) for each in (None, weights))
    assert plain.history_["val_loss"][0] != given.history_["val_loss"][0]
    folds = {"cv": KFold(3), "scoring": "neg_log_loss", "params": {"sample_weight": weights}}
    found, expected = (score(ArrayClassifier(**TINY), x, labels, **folds) for score in (cross_val_score, one_by_one))
    numpy.testing.assert_allclose(found, expected, rtol=1e-10)
    assert (found != cross_val_score(ArrayClassifier(**TINY), x, labels, cv=KFold(3), scoring="neg_log_loss")).all()


def same_search(estimator, grid, x, y, **params):
    """Both searches, whose scores and best models are compared."""
    ours, theirs = (kind(estimator, grid, cv=3, scoring="neg_log_loss") for kind in (ArraySearchCV, GridSearchCV))
    for search in (ours, theirs):
        search.fit(x, y, **params)
    assert ours.cv_results_["params"] == [*theirs.cv_results_["params"]] and ours.best_params_ == theirs.best_params_
    for fold in range(3):
        name = f"split{fold}_test_score"
        numpy.testing.assert_allclose(ours.cv_results_[name], theirs.cv_results_[name], rtol=1e-9)
    assert len({*ours.cv_results_["split0_test_score"].round(9)}) > 1
    numpy.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), rtol=1e-9)
    return ours, theirs


def test_the_steps_of_a_pipeline_are_fitted_for_each_fold(table, monkeypatch):
    x, labels, _, _ = table
    frame = pandas.DataFrame(x.reshape(88, 6) * [1, 2, 3, 4, 5, 6] + 7, columns=[*"abcdef"])
    weights = numpy.random.default_rng(2).uniform(0.1, 3, 88)
    pipe = Pipeline([("scaler", StandardScaler()), ("best", SelectKBest(k=2)), ("net", ArrayClassifier(**TINY))])
    grid = {"net__lr": [0.1, 0.01], "scaler__with_mean": [True, False], "best__k": [2, 4]}
    ours, _ = same_search(pipe, grid, frame, labels, net__sample_weight=weights)
    assert ours.best_estimator_["net"].n_features_in_ == ours.best_params_["best__k"]
    pipe.set_output(transform="pandas")
    same_search(pipe, {"net__lr": [0.1, 0.01], "scaler": [MinMaxScaler(), "passthrough"]}, frame, labels)
    same_search(Pipeline([("net", ArrayClassifier(**TINY))]), {"net__lr": [0.1, 0.01]}, x, labels)
    same_search(
        make_pipeline(TruncatedSVD(3, random_state=0), ArrayClassifier(**TINY)),
        {"arrayclassifier__lr": [0.1, 0.01]},
        scipy.sparse.coo_array(x.reshape(88, 6)),
        labels,
    )
    # Once for each fold and its own settings, and all folds as one array.
    calls, arrays, fit = [], [], hfta.Experiment.fit
    monkeypatch.setattr(StandardScaler, "fit", lambda self, x, *_, **__: calls.append(len(x)) or self.partial_fit(x))
    monkeypatch.setattr(hfta.Experiment, "fit", lambda self, *a, **b: arrays.append(self) or fit(self, *a, **b))
    pipe = make_pipeline(StandardScaler(), ArrayClassifier(**TINY))
    ArraySearchCV(pipe, {"arrayclassifier__lr": [0.1, 0.01]}, cv=4, refit=False).fit(x.reshape(88, 6), labels)
    assert calls == [66] * 4 and len(arrays) == 1 and len(arrays[0].state.keys) == 8
    found = cross_val_score(pipe, x.reshape(88, 6), labels, cv=KFold(3))
    numpy.testing.assert_allclose(found, one_by_one(pipe, x.reshape(88, 6), labels, cv=KFold(3)), rtol=1e-10)


def test_a_setting_that_goes_to_infinity_does_not_end_a_search(table):
    x, _, values, _ = table
    search = ArraySearchCV(ArrayRegressor(epochs=2, batches_per_epoch=2), {"lr": [1e30, 1e-2]}, cv=2)
    with (
        pytest.warns(UserWarning, match="test scores are non-finite"),
        pytest.warns(RuntimeWarning, match="a fold of ArrayRegressor.* has no score: Input contains"),
    ):
        search.fit(x, values)
    assert search.best_params_ == {"lr": 1e-2} and numpy.isnan(search.cv_results_["mean_test_score"][0])


BAD = {
    "groups": (lambda c, x, y: c.fit(x, y, groups=[1, 2]), "inconsistent numbers of samples"),
    "2-d groups": (lambda c, x, y: c.fit(x, y, groups=x), "should be a 1d array"),
    "group": (
        lambda c, x, y: c.fit(x, y, groups=[1] * 6).predict(x, groups=[7] * 6),
        r"group 7 has no model, \[1\] have; fit",
    ),
    "numbers": (lambda c, x, y: c.fit(x, x[:, 0]), "Unknown label type: continuous"),
    "nan": (lambda c, x, y: c.fit(x * numpy.nan, y), "Input X contains NaN"),
    "features": (lambda c, x, y: c.fit(x, y).predict(x[:, :1]), "X has 1 features, but ArrayClassifier is expecting 2"),
    "hold_out": (
        lambda c, x, y: c.set_params(patience=2, hold_out=1.5).fit(x, y),
        "hold_out is 1.5 of 6 rows; give a share",
    ),
    "few rows": (lambda c, x, y: c.set_params(patience=2).fit(x, y, groups=[*range(6)]), "hold_out is 0.2 of 1 rows"),
    "outputs": (
        lambda c, x, y: c.set_params(make_model=lambda shape, outputs: nn.Linear(2, 5)).fit(x, y),
        r"the model returns \[2, 5\] for 2 samples, not \[2, 3\]",
    ),
    "seed": (lambda c, x, y: c.set_params(random_state="seven").fit(x, y), "'seven' cannot be used to seed"),
    "folds": (lambda c, x, y: cross_val_score(c, x, y, cv=9), "n_splits=9 greater than"),
    "setting": (lambda c, x, y: ArraySearchCV(c, {"rate": [1]}, cv=2).fit(x, y), "Invalid parameter 'rate'"),
    "nan group": (lambda c, x, y: c.fit(x, y, groups=[numpy.nan, 1, 1, 1, 2, 2]), "contains NaN"),
    "text": (lambda c, x, y: ArrayRegressor().fit(x, numpy.array(["a"] * 6)), "could not convert string to float"),
    "weight": (lambda c, x, y: c.fit(x, y, sample_weight=[1, 1, -2, 1, 1, 1]), r"sample_weight\[2\] is -2; give"),
    "no weight": (
        lambda c, x, y: c.fit(x, y, groups=[0, 0, 0, 1, 1, 1], sample_weight=[1, 1, 1, 0, 0, 0]),
        "model 1: sample_weight is zero for all rows",
    ),
    "weights": (lambda c, x, y: c.fit(x, y, sample_weight=[1, 1]), "inconsistent numbers of samples"),
    "loss": (
        lambda c, x, y: c.set_params(loss=nn.CrossEntropyLoss()).fit(x, y, sample_weight=[1] * 6),
        "needs a loss with an argument reduction, CrossEntropyLoss",
    ),
    "no array": (
        lambda c, x, y: ArraySearchCV(make_pipeline(LogisticRegression()), {}, cv=2).fit(x, y),
        "LogisticRegression does not train as an array; end the pipeline with",
    ),
    "parameter": (
        lambda c, x, y: ArraySearchCV(make_pipeline(c), {}, cv=2).fit(x, y, sample_weight=[1] * 6),
        "fit takes arrayclassifier__sample_weight, not sample_weight",
    ),
    "by": (lambda c, x, y: cross_val_score(c, x, y, by=[1], cv=2), "inconsistent numbers of samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, message = BAD[case]
    x = numpy.random.default_rng(0).standard_normal((6, 2))
    with pytest.raises(ValueError, match=message):
        call(ArrayClassifier(epochs=1, batches_per_epoch=1), x, numpy.array([0, 1, 2, 0, 1, 2]))
    with pytest.raises(NotFittedError):
        ArrayClassifier().predict(x)
