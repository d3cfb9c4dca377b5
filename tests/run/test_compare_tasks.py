"""Statistics of scores in several tasks, against rliable's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import hfta_func as hfta

pytest.importorskip("scipy.stats", reason="needs scipy")
RLIABLE = json.loads((Path(__file__).parents[1] / "data" / "rliable.json").read_text())
SCORES = RLIABLE["scores"]


def test_statistics_and_intervals_are_those_of_rliable() -> None:
    found = hfta.run.compare_tasks(SCORES, optimum=0.9, resamples=4000)
    wanted = {(name, key): ends for key, own in RLIABLE["estimates"].items() for name, ends in own.items()}
    wanted["tuned", "improves on plain"] = RLIABLE["improvement"]
    assert {(one.name, one.statistic) for one in found.estimates} == wanted.keys()
    for one in found.estimates:
        value, low, high = wanted[one.name, one.statistic]
        assert one.value == pytest.approx(value, abs=1e-12), one
        # Both ends are estimates from some thousand draws.
        assert (one.low, one.high) == pytest.approx((low, high), abs=0.07 * (high - low)), one
    thresholds = np.array(RLIABLE["thresholds"])
    for name, (shares, low, high) in RLIABLE["profiles"].items():
        own = found.profile(name, thresholds)
        np.testing.assert_allclose(own[0], shares, rtol=0, atol=1e-12)
        np.testing.assert_allclose(own[1:], (low, high), rtol=0, atol=0.03)


def test_every_task_is_drawn_alone_and_both_sides_of_a_pair_too() -> None:
    """Scores that differ between seeds alone: one draw for all tasks would leave the spread of a single task."""
    scores = np.random.default_rng(0).normal(size=(20, 1)).repeat(16, 1)
    (*_, mean, _) = hfta.run.compare_tasks({"a": scores}).estimates
    spread = scores[:, 0].std() / math.sqrt(20 * 16)
    assert mean.high - mean.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    improvement = hfta.run.compare_tasks({"a": scores, "b": scores}).estimates[-1]
    assert improvement.value == 0.5
    assert improvement.high - improvement.low == pytest.approx(2 * 1.96 * math.sqrt(41 / 12 / 20**2 / 16), rel=0.1)


def test_a_comparison_is_shown_and_drawn() -> None:
    tensors = {name: torch.tensor(own, dtype=torch.float64) for name, own in SCORES.items()}
    found = hfta.run.compare_tasks(tensors, baseline="tuned", level=0.5, resamples=99)
    assert found.estimates == hfta.run.compare_tasks(SCORES, baseline="tuned", level=0.5, resamples=99).estimates
    head, *rows = str(found).splitlines()
    assert head.split("  ")[-1].strip() == "improves on tuned" and "50% intervals" in head
    assert [row.split()[0] for row in rows[-2:]] == ["plain", "tuned"]
    assert rows[-2].rstrip().endswith("]") and len(rows[-1].rstrip()) < len(rows[-2].rstrip())
    assert "<table" in found._repr_html_()
    axes = found.plot(pytest.importorskip("matplotlib.figure").Figure().subplots())
    assert [line.get_label() for line in axes.lines] == ["plain", "tuned"] and len(axes.collections) == 2
    lowest = min(map(np.min, SCORES.values()))
    assert axes.lines[0].get_ydata()[0] == np.mean(np.array(SCORES["plain"]) > lowest) < 1
    assert axes.lines[1].get_ydata()[-1] == 0


@pytest.mark.parametrize(
    ("scores", "more", "message"),
    [
        ({}, {}, "the baseline None is none of the configurations"),
        ({"a": [[1.0], [2.0]]}, {"baseline": "b"}, "the baseline 'b' is none of the configurations 'a'"),
        ({"a": [1.0, 2.0]}, {}, r"the scores are {'a': \[2\]}; give \[seeds, tasks\] of two seeds or more"),
        ({"a": [[1.0, 2.0]]}, {}, r"{'a': \[1, 2\]}"),
        ({"a": np.ones((3, 2)), "b": np.ones((3, 1))}, {}, r"{'a': \[3, 2\], 'b': \[3, 1\]}.* in the same tasks"),
        ({"a": [[1.0], [2.0]]}, {"resamples": 0}, "resamples is 0; give an integer of at least 1"),
        ({"a": [[1.0], [2.0]]}, {"level": 95}, "level is 95; it must be between 0 and 1"),
    ],
)
def test_scores_that_say_nothing_are_refused(scores, more, message) -> None:
    with pytest.raises(ValueError, match=message):
        hfta.run.compare_tasks(scores, **more)
