"""The evidence of convergence: what is judged, and one workload from its command line to picture, table and exit status."""

import csv

import numpy
import pandas
import pytest
from examples.convergence import Case, judge
from matplotlib import pyplot
from scipy import stats

from examples import convergence

HIGHER = Case("up", "A model, some data", "resnet", "accuracy", "higher", 0.9)
LOWER = Case("down", "A model, some data", "dcgan", "frechet", "lower", 5.0)
TINY = Case(
    "tiny",
    "A small Transformer, a little text",
    "transformer --limit 64 --epochs 2 --batch-size 16 --length 16",
    *("perplexity", "lower", 1000.0),
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.exhaustive]


MISSED, DIFFER = "{} misses the stated quality", "array and solo differ beyond seed noise"


@pytest.mark.parametrize(
    ("case", "array", "solo", "verdict"),
    [
        # The mean counts, not the worst member.
        (HIGHER, [0.88, 0.95, 0.94], [0.94, 0.96, 0.93], ["passed"]),
        (HIGHER, [0.89, 0.91, 0.88], [0.94, 0.96, 0.86], [MISSED.format("array")]),
        (HIGHER, [0.93, 0.95, 0.84], [0.89, 0.91, 0.88], [MISSED.format("solo")]),
        (HIGHER, [0.91, 0.92, 0.91], [0.98, 0.99, 0.98], [DIFFER]),
        (LOWER, [9.0, 9.1, 9.2], [6.1, 6.2, 6.3], [MISSED.format("array"), MISSED.format("solo"), DIFFER]),
        # Nothing differs, and the test alone would not know.
        (HIGHER, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], ["passed"]),
        # A member that failed.
        (LOWER, [3.0, 4.0, numpy.nan], [4.5, 3.5, 3.0], [MISSED.format("array"), DIFFER]),
    ],
)
def test_verdict(case, array, solo, verdict):
    row = judge(case, array, solo)
    assert row["verdict"] == "; ".join(verdict)
    named = (row["case"], row["metric"], row["better"], row["stated"])
    assert named == (case.name, case.metric, case.better, case.stated)
    assert (row["solo_min"], row["solo_max"]) == (min(solo), max(solo))
    assert row["solo_mean"] == pytest.approx(sum(solo) / 3)
    if len({*array, *solo}) > 1:
        assert row["p"] == pytest.approx(stats.ttest_ind(array, solo, equal_var=False).pvalue, rel=1e-12, nan_ok=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script on a case: exit status, the row of the case, all rows."""
    monkeypatch.setattr(convergence, "SEEDS", (3, 4, 5))

    def run(case):
        monkeypatch.setattr(convergence, "CASES", (TINY, HIGHER, case))
        status = convergence.main([case.name, "--out", str(tmp_path / "out"), "--docs", str(tmp_path / "docs")])
        rows = list(csv.DictReader((tmp_path / "docs" / "quality.csv").read_text().splitlines()))
        return status, rows

    return run


def test_a_case_from_command_line_to_picture_and_table(run, tmp_path, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "quality.csv").write_text("case,metric,stated,verdict\ntiny,old,0,failed\nup,accuracy,0.9,passed\n")
    status, (row, other) = run(TINY)
    assert status == 0 and row["verdict"] == "passed" and row["metric"] == "perplexity"
    # A case that was not run keeps its row.
    assert other["case"] == "up" and other["verdict"] == "passed"
    out = capsys.readouterr().out
    for how in "array", "solo":
        table = pandas.read_csv(tmp_path / "out" / "tiny" / how / "transformer.csv")
        assert set(table.how) == {how} and list(table.seed) == [3, 3, 4, 4, 5, 5]
        last = table[table.epoch == 2].perplexity
        found = [float(row[f"{how}_{name}"]) for name in ("mean", "min", "max")]
        assert found == pytest.approx([last.mean(), last.min(), last.max()], abs=1e-4)
        seconds = table.seconds.sum() / (3 if how == "array" else 1)
        assert float(row[f"{how}_seconds"]) == pytest.approx(seconds, abs=0.06)
    assert 0.01 <= float(row["p"]) <= 1 and f"{float(row['p']):.4f}" in out and "array_mean" in out
    assert f"Table: {docs / 'quality.csv'}" in out
    pixels = pyplot.imread(docs / "tiny.png")
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1300 and pixels[..., :3].std() > 0.01
    assert (docs / "tiny.png").stat().st_size < 150_000


def test_a_criterion_that_is_not_met_is_the_exit_status(run):
    status, rows = run(TINY._replace(name="strict", stated=1.0))
    assert status == 1 and rows[0]["verdict"].startswith("array misses the stated quality; solo misses the stated")


def test_refused(capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        convergence.main(["lenet"])
    assert "there is no case 'lenet'; choose from resnet, mobilenet, pointnet-cls" in capsys.readouterr().err
    monkeypatch.setattr(convergence, "CASES", (HIGHER._replace(argv="resnet --dataset flowers"),))
    with pytest.raises(SystemExit, match="up: the example did not run to its end"):
        convergence.main(["--out", str(tmp_path), "--docs", str(tmp_path)])
    assert "invalid choice: 'flowers'" in capsys.readouterr().err
