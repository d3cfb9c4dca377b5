"""Evaluation where the data is: models go to the sites, and only declared metrics come back."""

from __future__ import annotations

import math
import queue
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from hfta_func import EvalStep, Stacked, WorkerError, make_eval_step, num_models, stack_params
from hfta_func._types import require
from hfta_func.cluster import ray_actors
from hfta_func.workers.local import WorkerPool
from hfta_func.workers.pool import Pool
from hfta_func.workers.wire import dumps, one_line_error

if TYPE_CHECKING:
    import pandas

Mask = Callable[[Any], Tensor]


class Site(NamedTuple):
    """Where data is, and stays.

    Args:
        name: What the table calls it.
        load: Called at the site; returns a tree of tensors with one row per sample.
        resources: Resources of the Ray nodes that are this site, such as ``{"hospital-a": 1}``; without, the site is a
            process on this machine.
    """

    name: str
    load: Callable[[], Any]
    resources: Mapping[str, float] | None = None


class Score(NamedTuple):
    """One metric of one member for one group of rows at one site.

    Args:
        site: Name of the site.
        group: Name of the group.
        member: Number of the model.
        metric: Name of the metric.
        rows: Number of rows, 0 without an answer.
        mean: Mean over the rows, NaN without an answer.
        low: Lower end of the mean's confidence interval.
        high: Upper end.
        status: ``"ok"``, ``"refused: ..."`` for groups that are too small, ``"missing: ..."`` for sites without an answer,
            ``"failed: ..."``.
    """

    site: str
    group: str
    member: int
    metric: str
    rows: int
    mean: float
    low: float
    high: float
    status: str


class Scores(list[Score]):
    """All scores of an evaluation, by site, group, member and metric."""

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per score.

        Raises:
            ImportError: if pandas is not installed.
        """
        return require("pandas", "plot").DataFrame([*self], columns=[*Score._fields])


def evaluate(
    models: Sequence[nn.Module],
    sites: Sequence[Site],
    metric_fn: Callable[..., Any],
    *,
    metrics: Sequence[str],
    groups: Mapping[str, Mask] | None = None,
    min_count: int = 10,
    level: float = 0.95,
    batch_size: int = 256,
    timeout: float = 600.0,
) -> Scores:
    """Evaluate M models at K sites at once, each of which gets all models as one array.

    The data never leaves its site. What comes back are, for each group, member and declared metric, the number of rows, the
    mean and its confidence interval; it is checked at the site, before anything is sent. Of what goes wrong there, the class
    of the error comes back, without its text. This is protection from mistakes: ``metric_fn`` and ``load`` run at the site,
    so a site must trust whoever writes them.

    Args:
        models: Modules of one architecture.
        sites: Where the data is.
        metric_fn: ``metric_fn(model, batch)`` of ONE model in eval mode: a number for every row, ``[N]``, or a dict of such
            tensors by name. Booleans are shares, with an interval of Wilson's; means of other numbers have a normal one.
        metrics: Names of all that ``metric_fn`` returns; a single tensor has the function's own.
        groups: Masks ``[N]`` of rows by name, each a function of a site's data; all rows by default.
        min_count: Groups of fewer rows are refused, and groups that have all rows of another one but fewer than this.
        level: Of the confidence intervals.
        batch_size: Rows that are evaluated at once.
        timeout: Seconds after which a site without an answer is missing.

    Raises:
        ValueError: if there is no site, two have one name, or a number is not valid.
        StackError: if the models are not of one architecture.
        TypeError: if ``metric_fn`` or ``load`` cannot be sent.
        ImportError: if a site has resources and Ray is not installed.

    Example:
        .. code-block:: python

            sites = [cluster.Site("a", load_a, {"hospital-a": 1}), cluster.Site("b", load_b, {"hospital-b": 1})]
            found = cluster.evaluate(models, sites, correct, metrics=["correct"], min_count=20)
            print(found.frame())
    """
    _check(sites, metrics, groups, min_count, level, batch_size, timeout)
    named = {"all": _everyone} if groups is None else dict(groups)
    stacked = stack_params(models)
    visit = _Visit(
        *(make_eval_step(models[0], metric_fn), stacked, tuple(metrics), named, min_count),
        *(statistics.NormalDist().inv_cdf((1 + level) / 2), batch_size),
    )
    for site in sites:
        try:
            dumps(site.load)
        except Exception as error:
            raise TypeError(
                f"site {site.name!r}: load cannot be sent ({one_line_error(error)}); open what it uses inside it"
            ) from error
    pools: list[Pool] = []
    answers: dict[str, Any] = {}
    try:
        for site in sites:
            pools.append(_pool(site))
        for site, pool in zip(sites, pools, strict=True):
            pool.submit(visit, load=site.load)
        end = time.monotonic() + timeout
        for site, pool in zip(sites, pools, strict=True):
            answers[site.name] = _answer(pool, end, timeout)
    finally:
        for pool in pools:
            pool.close()
    return Scores(
        score
        for site in sites
        for group in named
        for score in _scores(site.name, group, answers[site.name], len(models), tuple(metrics))
    )


class _Visit:
    """What is called at a site."""

    label = "metric_fn"

    def __init__(
        self,
        step: EvalStep,
        stacked: Stacked,
        metrics: tuple[str, ...],
        groups: Mapping[str, Mask],
        min_count: int,
        width: float,
        batch_size: int,
    ):
        self._step, self._stacked, self._metrics, self._groups = step, stacked, metrics, groups
        self._min_count, self._width, self._batch_size = min_count, width, batch_size

    def __call__(self, load: Callable[[], Any]) -> Any:
        try:
            return self._scores(_mapped(torch.as_tensor, load()))
        except _Refusal as error:
            return f"failed: {error}"
        except Exception as error:
            # Its text may hold data.
            return f"failed: {type(error).__name__}"

    def _scores(self, data: Any) -> dict[str, Any]:
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in optree.tree_leaves(data)}
        if len(sizes) != 1:
            raise _Refusal("load returned leaves of unequal numbers of rows")
        (rows,) = sizes
        masks: dict[str, Tensor] = {}
        refused: dict[str, str] = {}
        for name, mask in self._groups.items():
            own = torch.as_tensor(mask(data))
            if own.dtype != torch.bool or own.shape != (rows,):
                raise _Refusal(f"group {name!r} is no boolean for every row")
            if int(own.sum()) < self._min_count:
                refused[name] = f"refused: fewer than {self._min_count} rows"
            elif any(self._tells_apart(own, other) for other in masks.values()):
                refused[name] = f"refused: fewer than {self._min_count} rows apart from another group"
            else:
                masks[name] = own
        if not masks:
            return refused
        parts = [self._measured(data, at, rows) for at in range(0, rows, self._batch_size)]
        values = {name: torch.cat([part[name] for part in parts], 1) for name in self._metrics}
        found = {
            name: [
                [self._summed(values[metric][member, own]) for metric in self._metrics]
                for member in range(num_models(self._stacked))
            ]
            for name, own in masks.items()
        }
        return {**refused, **found}

    def _tells_apart(self, own: Tensor, other: Tensor) -> bool:
        """Whether the difference of two groups' sums is that of few rows."""
        more, less = int((own & ~other).sum()), int((other & ~own).sum())
        return 0 < more + less < self._min_count

    def _measured(self, data: Any, at: int, rows: int) -> dict[str, Tensor]:
        stop = min(rows, at + self._batch_size)
        found = self._step(self._stacked, _mapped(lambda leaf: leaf[at:stop], data))
        if set(found) != set(self._metrics):
            raise _Refusal(f"metric_fn returned {sorted(found)}, but {sorted(self._metrics)} were declared")
        for name, values in found.items():
            if values.shape[1:] != (stop - at,) or values.is_complex():
                raise _Refusal(f"metric {name!r} is no number for every row")
        return found

    def _summed(self, values: Tensor) -> tuple[int, float, float, float]:
        """Number, mean and interval."""
        count, width = len(values), self._width
        mean = float(values.double().mean())
        if values.dtype == torch.bool:
            middle = (mean + width**2 / (2 * count)) / (1 + width**2 / count)
            half = width * math.sqrt(mean * (1 - mean) / count + (width / (2 * count)) ** 2) / (1 + width**2 / count)
            return count, mean, middle - half, middle + half
        half = width * float(values.double().std()) / math.sqrt(count)
        return count, mean, mean - half, mean + half


class _Refusal(Exception):
    """What must not leave a site, or cannot be computed there; its text is our own."""


def _mapped(function: Callable[[Any], Tensor], tree: Any) -> Any:
    mapped: Any = optree.tree_map(function, tree)
    return mapped


def _everyone(data: Any) -> Tensor:
    return torch.ones(len(optree.tree_leaves(data)[0]), dtype=torch.bool)


def _pool(site: Site) -> Pool:
    """A pool of the one worker that is a site."""
    return WorkerPool(1) if site.resources is None else ray_actors.lone(site.resources)


def _answer(pool: Pool, end: float, timeout: float) -> Any:
    """What a site says, or why it says nothing."""
    try:
        answer = pool.wait(max(0.0, end - time.monotonic()))[1]
    except queue.Empty:
        return f"missing: no answer in {timeout:g} s"
    except WorkerError as error:
        return f"missing: {one_line_error(error)}"
    if isinstance(answer, Exception):
        return f"failed: {one_line_error(answer) if isinstance(answer, ImportError) else type(answer).__name__}"
    return answer


def _scores(site: str, group: str, answer: Any, count: int, metrics: tuple[str, ...]) -> list[Score]:
    found = answer if isinstance(answer, str) else answer[group]
    nothing = 0, math.nan, math.nan, math.nan, found
    scores: list[Score] = []
    for member in range(count):
        for place, metric in enumerate(metrics):
            numbers: Any = nothing if isinstance(found, str) else (*found[member][place], "ok")
            scores.append(Score(site, group, member, metric, *numbers))
    return scores


def _check(
    sites: Sequence[Site],
    metrics: Sequence[str],
    groups: Mapping[str, Mask] | None,
    min_count: int,
    level: float,
    batch_size: int,
    timeout: float,
) -> None:
    names = [site.name for site in sites]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not sites or twice:
        raise ValueError(
            f"two sites are named {twice[0]!r}" if twice else "there is no site; pass a list of cluster.Site"
        )
    if isinstance(metrics, str) or not metrics or len(set(metrics)) < len(metrics):
        raise ValueError(f"metrics is {metrics!r}; pass a list of the names that metric_fn returns, each once")
    if groups is not None and not groups:
        raise ValueError("groups is empty; leave it out for one group of all rows")
    if not isinstance(min_count, int) or min_count < 2:
        raise ValueError(f"min_count is {min_count!r}; it must be at least 2, because one row is not a group")
    if not 0 < level < 1:
        raise ValueError(f"level is {level!r}; it must be between 0 and 1")
    if not isinstance(batch_size, int) or batch_size < 1 or not timeout > 0:
        raise ValueError(f"batch_size is {batch_size!r} and timeout {timeout!r}; both must be more than 0")
