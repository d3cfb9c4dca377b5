"""Comparisons over pairs of seeds, against scipy's own tests and against draws."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

import hfta_func as hfta

stats = pytest.importorskip("scipy.stats", reason="needs scipy")
pandas = pytest.importorskip("pandas", reason="needs pandas")

PLAIN = np.random.default_rng(0).normal(0.9, 0.02, 24)
BETTER = PLAIN + np.random.default_rng(1).normal(0.01, 0.01, 24)


def test_a_difference_has_the_numbers_of_scipy() -> None:
    (found,) = hfta.compare({"plain": PLAIN, "better": BETTER}).differences
    differences = BETTER - PLAIN
    assert (found.name, found.baseline, found.pairs) == ("better", "plain", 24)
    assert found.mean == pytest.approx(differences.mean())
    assert found.deviation == pytest.approx(differences.std(ddof=1))
    assert found.unpaired == pytest.approx(math.hypot(PLAIN.std(ddof=1), BETTER.std(ddof=1)))
    assert found.wins == (differences > 0).mean()
    test = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=99_999, rng=np.random.default_rng(3)
    )
    assert found.permutation == pytest.approx(test.pvalue, abs=0.003)
    t = stats.t.interval(0.95, 23, differences.mean(), stats.sem(differences))
    assert (found.low, found.high) == pytest.approx(t, abs=0.001)
    # Asked twice, it says the same.
    assert hfta.compare({"plain": PLAIN, "better": BETTER}).differences == [found]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_breaks_no_ties(dtype: torch.dtype) -> None:
    """Accuracies are tested as the numbers of images that they stand for."""
    random, ties = np.random.default_rng(0), []
    for _ in range(60):
        count = int(random.integers(3, 9))
        plain = random.integers(695, 712, count)
        better = plain + random.integers(-3, 4, count)
        flips = [abs(np.dot(signs, better - plain)) for signs in itertools.product((1, -1), repeat=count)]
        share = np.mean([flip >= abs((better - plain).sum()) for flip in flips])
        accuracies = {
            name: 100 * torch.tensor(images).to(dtype) / 719 for name, images in (("a", plain), ("b", better))
        }
        (found,) = hfta.compare(accuracies, resamples=999).differences
        assert found.permutation == share, (plain, better)
        if plain.sum() == better.sum():
            ties.append((found.mean, found.seeds))
        # An interval that ends where as many images are gained as lost ends at 0.
        assert all(end == 0 or abs(end) > 1e-3 for end in (found.low, found.high))
    assert ties and set(ties) == {(0.0, math.inf)}


@pytest.mark.parametrize("mean", [1.0, 0.2, 3.0])
def test_the_seeds_needed_find_a_difference_in_four_of_five_studies(mean: float) -> None:
    base = np.array([-1.0, 1.0, -1.0, 1.0])
    sample = mean + base / base.std(ddof=1)
    (found,) = hfta.compare({"a": np.zeros(4), "b": sample}).differences
    count = int(found.seeds)
    draws = np.random.default_rng(0).normal(mean, 1.0, (4000, count))
    share = (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean()
    assert share == pytest.approx(0.8, abs=0.02) or (count <= 4 and share > 0.8)
    assert found.seeds_for(found.mean) == found.seeds_for(-found.mean) == count
    assert found.seeds_for(found.mean / 2) > count and found.seeds_for(0) == math.inf


def test_equal_and_constant_differences() -> None:
    same, shifted = hfta.compare({"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [2.0, 3.0]}).differences
    assert (same.mean, same.low, same.high, same.wins, same.permutation) == (0, 0, 0, 0.5, 1)
    assert same.seeds == math.inf and "inf" in str(hfta.compare({"a": [1.0, 2.0], "b": [1.0, 2.0]}))
    assert (shifted.mean, shifted.low, shifted.high, shifted.seeds) == (1, 1, 1, 2)


def test_every_form_gives_the_same() -> None:
    expected = hfta.compare({"plain": PLAIN, "better": BETTER}).differences[0]
    histories = {}
    for name, values in (("plain", PLAIN), ("better", BETTER)):
        histories[name] = hfta.run.History(torch.arange(24))
        histories[name].epochs = [{"accuracy": torch.zeros(24)}, {"accuracy": torch.tensor(values)}]
    frame = pandas.concat(
        [history.frame(kind=[name] * 24).sample(frac=1, random_state=0) for name, history in histories.items()]
    )
    for found in (hfta.compare(histories, "accuracy"), hfta.compare(frame, "accuracy", by="kind")):
        (difference,) = found.differences
        assert difference.mean == pytest.approx(expected.mean) and difference.pairs == 24
        assert (difference.permutation, difference.wins) == (expected.permutation, expected.wins)


def test_what_is_not_finite_leaves_its_pair_out() -> None:
    spoilt = BETTER.copy()
    spoilt[3] = np.nan
    (found,) = hfta.compare({"plain": PLAIN, "better": spoilt}).differences
    assert found.pairs == 23
    assert found.mean == pytest.approx(np.delete(BETTER - PLAIN, 3).mean())


def test_table_and_picture() -> None:
    from matplotlib.figure import Figure

    found = hfta.compare({"plain": PLAIN, "better": BETTER, "worse": PLAIN - 0.02}, baseline="better")
    each, differences = (part.splitlines() for part in str(found).split("\n\n"))
    assert len(each) == 4 and len(differences) == 3 and "plain - better" in differences[1]
    name, seeds, mean, _, deviation, low, high = each[1].replace("[", "").replace("]", "").replace(",", "").split()
    assert (name, seeds, mean, deviation) == ("plain", "24", f"{PLAIN.mean():.4g}", f"{PLAIN.std(ddof=1):.2g}")
    t = stats.t.interval(0.95, 23, PLAIN.mean(), stats.sem(PLAIN))
    assert (float(low), float(high)) == pytest.approx(t, abs=0.002)
    assert repr(found) == "Comparison(3 configurations, baseline 'better')" and found._repr_html_().count("<tr>") == 7
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    assert list(found.frame()["name"]) == ["plain", "worse"]
    long = str(hfta.compare({"a name of many letters": PLAIN, "another, longer still": BETTER})).split("\n\n")
    assert all(len(set(map(len, part.splitlines()))) == 1 for part in long)
    assert long[1].splitlines()[1].startswith("another, longer still - a name of many letters ")
    ax = found.plot(Figure().subplots())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["plain", "worse"]


def history(seeds: list[int], epochs: int) -> hfta.run.History:
    made = hfta.run.History(torch.tensor(seeds))
    made.epochs = [{"loss": torch.ones(len(seeds))}] * epochs
    return made


TWO = {"a": [1.0, 2.0], "b": [2.0, 1.0]}
BY_KIND = {"metric": "loss", "by": "kind"}
TWICE = pandas.DataFrame({"seed": [0, 0], "kind": ["a", "a"], "loss": [1.0, 2.0]})
UNEVEN = pandas.DataFrame({"seed": [0, 0, 1], "kind": ["a"] * 3, "loss": [1.0] * 3, "epoch": [1, 2, 1]})


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ({"a": [1.0, 2.0]}, {}, "there are 1 configurations; a comparison needs two"),
        ({"a": [1.0], "b": [2.0]}, {}, "'b' and 'a' have 1 seeds in common"),
        ({"a": [1.0, 2.0], "b": [2.0]}, {}, "give each one value per seed"),
        (TWO, {"baseline": "c"}, "baseline is 'c' and level 0.95; pass one of 'a', 'b'"),
        (TWO, {"level": 95}, "level 95; pass one of 'a', 'b', and a number between 0 and 1"),
        (7, {}, "pass a dict of values or histories by name"),
        (TWICE, BY_KIND, "several values for 'a' and seed 0; keep one of them, or tell them apart"),
        (UNEVEN, BY_KIND, r"kind and seed end at different epochs, 1 to 2; pass rows .* frame\[frame.epoch == 1\]"),
        ({"a": history([0, 0], 1), "b": history([0, 1], 1)}, {"metric": "loss"}, "several values for 'a' and seed 0"),
        ({"a": history([0], 1), "b": history([0], 2)}, {"metric": "loss"}, "{'a': 1, 'b': 2} values, or epochs of"),
    ],
)
def test_bad_input(runs: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hfta.compare(runs, **options)  # type: ignore[arg-type]
