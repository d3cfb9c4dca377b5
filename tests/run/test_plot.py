import sys

import numpy
import pytest
import torch
from matplotlib import colors, pyplot
from matplotlib.figure import Figure

import hfta_func as hfta
from hfta_func.plot import bands, heatmap
from scripts import X, Y, make, mse


@pytest.fixture(autouse=True)
def no_window():
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def history(values):
    """A history of ``values [epochs, M]``."""
    made = hfta.run.History(torch.arange(values.shape[1]))
    made.epochs = [{"accuracy": row} for row in torch.as_tensor(values)]
    return made


def edges(band):
    """Lower and upper edge of a band by position along the axis."""
    points = band.get_paths()[0].vertices
    at = sorted(set(points[:, 0]))
    return at, [points[points[:, 0] == x, 1].min() for x in at], [points[points[:, 0] == x, 1].max() for x in at]


def test_line_is_the_mean_and_band_the_central_members():
    values = numpy.random.default_rng(0).random((4, 10))
    lr = [0.1] * 3 + [0.01] * 7
    ax = bands(history(values).frame(lr=lr), "accuracy", by="lr", level=0.8, ax=Figure().subplots())

    assert [line.get_label() for line in ax.lines] == ["0.01", "0.1"]
    for line, band, members in zip(ax.lines, ax.collections, (values[:, 3:], values[:, :3]), strict=True):
        numpy.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
        numpy.testing.assert_allclose(line.get_ydata(), members.mean(1), rtol=1e-12)
        at, low, high = edges(band)
        assert at == [1, 2, 3, 4]
        numpy.testing.assert_allclose(low, numpy.quantile(members, 0.1, axis=1), rtol=1e-12)
        numpy.testing.assert_allclose(high, numpy.quantile(members, 0.9, axis=1), rtol=1e-12)
        assert colors.same_color(line.get_color(), band.get_facecolor()[0, :3])


def test_legend_names_the_groups_and_colours_differ():
    values = numpy.random.default_rng(1).random((2, 10))
    ax = bands(history(values).frame(width=range(10)), "accuracy", by="width", ax=Figure().subplots())
    assert ax.get_legend().get_title().get_text() == "width"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [str(width) for width in range(10)]
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 10


def test_members_that_are_not_finite_are_left_out_and_counted():
    values = numpy.array([[1.0, 2.0, 3.0, 5.0], [4.0, numpy.nan, 6.0, numpy.inf]])
    ax = bands(history(values).frame(lr=[0.1] * 4), "accuracy", by="lr", ax=Figure().subplots())
    numpy.testing.assert_allclose(ax.lines[0].get_ydata(), [2.75, 5.0], rtol=1e-12)
    assert ax.lines[0].get_label() == "0.1 (2 not finite)"


def test_a_history_of_training_can_be_drawn_and_saved(tmp_path):
    experiment = hfta.Experiment(make, mse, hfta.sgd, seeds=4, lr=[0.1, 0.1, 0.01, 0.01])
    made = experiment.fit((X, Y), 4, epochs=3, progress=False)
    ax = bands(made.frame(), "loss", by="lr")
    numpy.testing.assert_allclose(ax.lines[1].get_ydata(), made["loss"][:, :2].mean(1), rtol=1e-6)
    ax.figure.savefig(tmp_path / "loss.png")
    assert pyplot.imread(tmp_path / "loss.png")[..., :3].std() > 0.01


def test_errors_name_the_cure(monkeypatch):
    frame = history(numpy.array([[0.2, 0.6]])).frame()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hfta_func\[plot\]'"):
        bands(frame, "accuracy")


def test_a_heat_map_has_the_mean_of_each_cell_in_the_last_epoch():
    columns = hfta.grid(lr=[0.1, 0.01], p=[0.5, 0.0, 0.2], seeds=[7, 8])
    values = numpy.random.default_rng(0).random((2, 12))
    values[1, 3] = numpy.nan
    made = history(values)
    made.epochs = [{**metrics, "finite": metrics["accuracy"].isfinite().double()} for metrics in made.epochs]
    for frame in (made.frame(**columns), made.last(**columns).sample(frac=1, random_state=0)):
        ax = heatmap(frame, "accuracy", x="lr", y="p", ax=Figure().subplots())
        # Members are ordered by lr, p and seed; rows of the picture are sorted by p and its columns by lr.
        expected = values[1].reshape(2, 3, 2).mean(-1)[::-1, [1, 2, 0]].T
        numpy.testing.assert_allclose(ax.images[0].get_array().filled(numpy.nan), expected, rtol=1e-12)
        assert [text.get_text() for text in ax.texts] == [f"{mean:.3g}" for mean in expected.flatten()]
        assert "nan" in [text.get_text() for text in ax.texts]
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0.01", "0.1"]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["0.0", "0.2", "0.5"]
