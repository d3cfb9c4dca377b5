"""Evaluation where the data is: what comes back is what a loop over models computes there, and nothing else does."""

from __future__ import annotations

import math
import os
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from examples import sites
from processes import local_ray

M = 3


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double() for _ in range(M)]


def rows(seed: int, count: int = 50) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).double()
    return inputs, (inputs[:, 0] > 0).long()


def metric_fn(model: Any, batch: Any) -> dict[str, Tensor]:
    outputs = model(batch[0])
    return {"correct": outputs.argmax(1) == batch[1], "margin": outputs[:, 1] - outputs[:, 0]}


METRICS = ["correct", "margin"]
NO_NUMBER = "'<lambda>' is no number for every row"


def visited(load: Any, metric_fn: Any = metric_fn, metrics: Any = METRICS, groups: Any = None, **options: Any) -> Any:
    """What a site says, in this process."""
    step = hfta.make_eval_step(models()[0], metric_fn)
    named = {"all": sites._all_rows} if groups is None else groups
    options = {"min_count": 10, "width": 1.96, "batch_size": 16} | options
    return sites._Visit(step, hfta.stack_params(models()), tuple(metrics), named, **options)(load)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites get all the time that they need to start, but the last one, which never answers."""
    answer, asked = sites._answer, []

    def wait(pool: Any, end: float, timeout: float) -> Any:
        asked.append(pool)
        last = len(asked) == int(timeout) % 10
        return answer(pool, time.monotonic() + 0.2 if last else end, timeout)

    monkeypatch.setattr(sites, "_answer", wait)


def sites_by_kind() -> list[sites.Site]:
    here = os.getpid()

    def own(seed: int) -> Any:
        assert os.getpid() != here
        return rows(seed)

    def broken() -> Any:
        raise KeyError("patient 17")

    def silent() -> Any:
        time.sleep(3600)

    return [
        sites.Site("a", lambda: own(1)),
        sites.Site("b", lambda: own(2)),
        sites.Site("broken", broken),
        sites.Site("silent", silent),
    ]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("impatient")
def test_every_model_is_scored_at_every_site_and_who_is_silent_is_missing():
    found = sites.evaluate(models(), sites_by_kind(), metric_fn, metrics=METRICS, timeout=594)
    assert len(found) == 4 * M * 2
    for score in found:
        assert score.group == "all" and score.metric in METRICS
        if score.site in ("a", "b"):
            model, batch = models()[score.member].eval(), rows(1 if score.site == "a" else 2)
            with torch.no_grad():
                values = metric_fn(model, batch)[score.metric].double()
            assert score.status == "ok" and score.rows == 50
            assert score.mean == pytest.approx(float(values.mean()), rel=1e-12)
            assert score.low < score.mean < score.high
            if score.metric == "margin":
                half = 1.959964 * float(values.std()) / math.sqrt(50)
                assert (score.low, score.high) == pytest.approx((score.mean - half, score.mean + half), rel=1e-6)
        else:
            assert score.rows == 0 and math.isnan(score.mean)
            # The text of an error may hold data.
            assert score.status == {"broken": "failed: KeyError", "silent": "missing: no answer in 594 s"}[score.site]
    assert len({score.mean for score in found if score.metric == "margin" and score.rows}) == 2 * M
    pytest.importorskip("pandas")
    frame = found.frame()
    assert [*frame.columns][:5] == ["site", "group", "member", "metric", "rows"] and len(frame) == len(found)


def test_shares_have_intervals_of_wilson():
    found = visited(lambda: rows(1, 20), lambda model, batch: batch[0][:, 0] < 99, ["<lambda>"])
    # For 20 of 20, with z = 1.96, as the formula gives by hand: n / (n + z^2).
    assert found["all"][0][0] == pytest.approx((20, 1.0, 20 / (20 + 1.96**2), 1.0))


def test_small_groups_are_refused():
    groups = {
        "all": lambda data: torch.ones(50, dtype=torch.bool),
        "first": lambda data: torch.arange(50) < 20,
        "few": lambda data: torch.arange(50) < 9,
        "none": lambda data: torch.arange(50) < 0,
        "all but one": lambda data: torch.arange(50) > 0,
        "rest": lambda data: torch.arange(50) >= 20,
    }
    found = visited(lambda: rows(1), groups=groups)
    assert {name for name, each in found.items() if isinstance(each, str)} == {"few", "none", "all but one"}
    assert found["few"] == found["none"] == "refused: fewer than 10 rows"
    assert found["all but one"] == "refused: fewer than 10 rows apart from another group"
    assert (found["first"][0][0][0], found["rest"][0][0][0]) == (20, 30)
    whole, first, rest = (found[name][1][1][1] for name in ("all", "first", "rest"))
    assert whole == pytest.approx((20 * first + 30 * rest) / 50)
    assert visited(lambda: rows(1, 9)) == {"all": "refused: fewer than 10 rows"}
    assert not isinstance(visited(lambda: rows(1, 10))["all"], str)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"metric_fn": lambda _, batch: {"rows": batch[0][:, 0]}}, r"returned \['rows'\], but \['correct', 'margin'\]"),
        (
            {"metric_fn": lambda model, batch: metric_fn(model, batch) | {"more": batch[0][:, 0]}},
            r"returned \['correct', 'margin', 'more'\], but \['correct', 'margin'\] were declared",
        ),
        ({"metric_fn": lambda model, batch: batch[0], "metrics": ["<lambda>"]}, NO_NUMBER),
        ({"metric_fn": lambda model, batch: batch[0].mean(), "metrics": ["<lambda>"]}, NO_NUMBER),
        ({"groups": {"odd": lambda data: torch.ones(3, dtype=torch.bool)}}, "group 'odd' is no boolean for every row"),
        ({"groups": {"odd": lambda data: data[1]}}, "group 'odd' is no boolean for every row"),
        ({"load": lambda: (rows(1)[0], rows(2, 9)[1])}, "leaves of unequal numbers of rows"),
        ({"load": lambda: {}["patient 17"]}, "^failed: KeyError$"),
    ],
)
def test_what_was_not_declared_stays_at_the_site(change: dict[str, Any], says: str):
    found = visited(**{"load": lambda: rows(1), **change})
    assert isinstance(found, str) and found.startswith("failed: ")
    assert re.search(says, found)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("impatient")
def test_sites_of_a_cluster_are_where_their_resources_are():
    where = [sites.Site(name, lambda seed=seed: rows(seed), {name: 1}) for seed, name in enumerate("abc")]
    with local_ray(num_cpus=2, resources={"a": 1, "b": 1}):
        found = sites.evaluate(models(), where, metric_fn, metrics=METRICS, timeout=593)
    assert {score.site: score.status for score in found} == {"a": "ok", "b": "ok", "c": "missing: no answer in 593 s"}
